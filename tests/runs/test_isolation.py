"""A third-party package whose methods go wrong in every way: each fails its own run, and nobody else's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedbench.tracking.schema import store_uri
from fedbench.tracking.store import open_store, runs_of

PACKAGE = Path(__file__).parents[1] / "misbehaving_package"
SUITE = """
name: isolation
dataset: "embedded?train=240&test=40"
scenario: {preset: iid, clients: 4, participation: 0.5}
training: {rounds: 3}
seeds: [0]
rows:
  - {method: fedavg}
  - {method: bad-raises}
  - {method: bad-system-exit}
  - {method: bad-hangs}
  - {method: bad-nan}
  - {method: bad-dies}
  - {method: bad-dies-once}
  - {method: bad-leaks}
  - {method: bad-shape}
  - {method: bad-forgets}
  - {method: bad-type}
  - {method: bad-chatters}
"""
FAILURES = {
    "bad-raises": "KeyError: 'no such [bold]thing[/bold] <b>here</b>' (",
    "bad-system-exit": "SystemExit: enough (",
    "bad-hangs": "timed out: took more than 30 s (--run-timeout)",
    "bad-nan": "training diverged",
    "bad-dies": "its process ended with exit code 3 (attempt 2 of 2)",
    "bad-leaks": "out of memory: RuntimeError: ",
    "bad-shape": "bad-shape answers the hook aggregate",
    "bad-forgets": "bad-forgets answers the hook aggregate but returned None",
    "bad-type": "bad-type answers the hook aggregate",
}
FINE = {"fedavg", "bad-dies-once", "bad-chatters"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package, installed into a folder of its own by its own build backend; two source files and metadata."""
    folder = tmp_path_factory.mktemp("misbehaving")
    source = folder / "source"
    shutil.copytree(PACKAGE, source)
    build = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    wheel = subprocess.run(
        [sys.executable, "-c", build, str(folder)], cwd=source, capture_output=True, text=True, check=True
    ).stdout.split()[-1]
    shutil.unpack_archive(folder / wheel, folder / "site", "zip")
    return folder / "site"


@pytest.fixture(scope="module")
def carried_out(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, object]]:
    """One command that runs them all."""
    folder = tmp_path_factory.mktemp("isolation")
    (folder / "suite.yaml").write_text(SUITE)
    command = [sys.executable, "-c", "from fedbench.cli.app import command; command()", "run", "--suite", "suite.yaml"]
    command += ["--jobs", "2", "--run-timeout", "30", "--retries", "1", "--memory-limit", "1.5", "--cache-dir", "cache"]
    path = os.pathsep.join([str(installed), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "FEDBENCH_TEST_MARKS": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    yield folder, done


@pytest.mark.slow
def test_every_kind_of_failure_is_contained_and_told(carried_out):
    folder, done = carried_out
    assert done.returncode == 1, done.stderr
    client = open_store(store_uri(str(folder / "fedbench-store")), create=False)
    by_method: dict[str, list[object]] = {}
    for _, run in runs_of(client, "isolation"):
        by_method.setdefault(run.data.params["method"], []).append(run)
    ends = {method: sorted(run.info.status for run in runs) for method, runs in by_method.items()}
    # what was given up and tried again stays as KILLED
    once = {method: ["FINISHED"] for method in FINE} | {method: ["FAILED"] for method in FAILURES}
    again = {method: [*once[method], "KILLED"] for method in ("bad-dies", "bad-leaks", "bad-dies-once")}
    assert ends == once | again
    for method, reason in FAILURES.items():
        (failed,) = [run for run in by_method[method] if run.info.status == "FAILED"]
        assert failed.data.tags["fedbench.failure"].startswith(reason), failed.data.tags["fedbench.failure"]
        assert reason[:40] in done.stderr
    leaked = [run.data.tags["fedbench.failure"] for run in by_method["bad-leaks"]]
    assert all("allocate memory" in reason for reason in leaked)


@pytest.mark.slow
def test_what_does_not_fail_has_the_numbers_of_fedavg(carried_out):
    folder, _ = carried_out
    client = open_store(store_uri(str(folder / "fedbench-store")), create=False)
    finished = [run for _, run in runs_of(client, "isolation") if run.info.status == "FINISHED"]
    finals = {
        json.dumps({name: value for name, value in sorted(run.data.metrics.items()) if "seconds" not in name})
        for run in finished
    }
    assert {run.data.params["method"] for run in finished} == FINE and len(finals) == 1


@pytest.mark.slow
def test_the_leaderboard_names_the_failures(carried_out):
    _, done = carried_out
    table = done.stdout.splitlines()
    for method, reason in FAILURES.items():
        assert any(f" {method} " in line and f"failed: {reason[:10]}" in line for line in table), method


@pytest.mark.slow
def test_fail_fast_and_a_traceback_file(installed, tmp_path):
    (tmp_path / "suite.yaml").write_text(SUITE)
    command = [sys.executable, "-c", "from fedbench.cli.app import command; command()", "run", "--suite", "suite.yaml"]
    command += ["--method", "bad-raises", "--method", "fedavg", "--jobs", "1", "--fail-fast", "--cache-dir", "cache"]
    environment = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "--fail-fast: not carried out: 1 run" in done.stderr
    assert "Traceback" in (tmp_path / "fedbench-store" / "failures.log").read_text()
    client = open_store(store_uri(str(tmp_path / "fedbench-store")), create=False)
    assert [run.info.status for _, run in runs_of(client, "isolation")] == ["FAILED"]
