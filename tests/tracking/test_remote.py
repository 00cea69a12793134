"""A tracking server in place of a folder: a real ``mlflow server``, which also holds the artifacts."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fedbench.cli.app import main
from fedbench.core.spec import RunSpec
from fedbench.plugins.provenance import Codes
from fedbench.testing import tiny_dataset
from fedbench.tracking import store
from fedbench.tracking.schema import store_uri
from fedbench.workflow.results import load
from fedbench_boards.leaderboard.results import load_results

PATIENCE = 60.0
"""Seconds the server has to answer; three on a machine that does nothing else."""
SUITE = """
name: remote
dataset: embedded
backbone: convnet
scenario: {preset: iid, clients: 2}
training: {rounds: 1, batch_size: 16}
rows:
  - {method: fedavg}
  - {method: creff}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server with an empty store; its artifacts go through it, not into a folder we share."""
    folder = tmp_path_factory.mktemp("server")
    backend = store_uri(str(folder / "backend"))
    # made here, where it takes a second, instead of by the server
    store.open_store(backend, create=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", backend, "--serve-artifacts"]
    command += ["--artifacts-destination", (folder / "artifacts").as_uri(), "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, "--workers", "1"], stdout=log, stderr=log, process_group=0)
        try:
            wait_for(f"http://127.0.0.1:{port}/health", process, folder / "log")
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(PATIENCE)


def wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(address, timeout=1):
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"the server did not answer:\n{log.read_text()}")


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def fedbench(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Ended]:
    """`fedbench ARGUMENTS --store SERVER` in an empty folder, on the tiny data set."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "remote.yaml").write_text(SUITE)
    monkeypatch.setattr("fedbench.runs.prepare.load_dataset", lambda *_, **__: tiny_dataset())
    monkeypatch.setattr("fedbench.runs.inspection.can_fork", lambda: False)  # nothing is patched in another process

    def call(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["fedbench", *arguments, "--store", server])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        return Ended(code, *capsys.readouterr())

    return call


@pytest.mark.slow
def test_a_suite_runs_resumes_and_is_evaluated_over_a_server(
    server: str, fedbench: Callable[..., Ended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("run", "--suite", "remote.yaml", "--engine", "in-process", "--cache-dir", "cache")
    first = fedbench(*command)
    assert first.code == 0, first.err
    assert re.search(rf"look inside  {server}/#/experiments/\d+/runs\?.*orderByAsc=false", first.out)
    # everything went to the server, but claims on runs, which whoever shares the cache sees
    assert {path.name for path in tmp_path.iterdir()} == {"remote.yaml", "cache"}
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["stores"]

    results = load_results(server, "remote")
    assert sorted(results["method"]) == ["creff", "fedavg"]
    assert results["final/global_accuracy"].between(0, 100).all()
    specs = [RunSpec(method=method, backbone="convnet") for method in ("fedavg", "creff")]
    assert set(results["code_hash"]) == {Codes().of_run(spec).hash for spec in specs}
    check_the_parent(server)

    again = fedbench(*command)
    assert "2 of 2 runs are in the store already and are skipped" in again.out
    assert "start " not in again.out

    by_method = results.set_index("method")["run_id"]
    monkeypatch.setenv("FEDBENCH_CACHE", "cache")
    evaluated = fedbench("evaluate", str(by_method["creff"]))
    assert evaluated.code == 0, evaluated.err
    assert "equal: every metric and all 30 predictions are as recorded" in evaluated.out
    assert {spec.run_id for spec in load(server, "remote").specs} == set(by_method)


def check_the_parent(server: str) -> None:
    client: Any = store.open_store(server, create=False)
    filed = [run for _, run in store.filed(client, "remote")]
    (parent,) = [run for run in filed if run.data.tags["fedbench.kind"] == "invocation"]
    assert parent.info.status == "FINISHED"
    assert {"runs_finished": 2, "runs_failed": 0}.items() <= parent.data.metrics.items()
    assert parent.data.tags["fedbench.command"] == "fedbench run --suite remote.yaml"
    children = [run for run in filed if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert len(children) == 2


@pytest.mark.slow
def test_a_server_has_its_web_interface_already(server: str, fedbench: Callable[..., Ended]) -> None:
    ended = fedbench("ui")
    assert ended.code == 2
    assert f"the store {server} is an MLflow server already; open that address in a browser" in ended.err
