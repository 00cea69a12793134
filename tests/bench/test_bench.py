"""The benchmark: fedbench and the plain loop learn the same, peers are skipped aloud, memory counts children."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
HOLD = "import sys, time; held = bytearray(b'x') * (64 * 2**20); print('held', flush=True); time.sleep(60)"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HOLD!r}])"


def module(name: str) -> ModuleType:
    """A module of the benchmark, which is run from the repository root and no part of the package."""
    location = importlib.util.spec_from_file_location(f"bench_{name}", ROOT / "tests" / "bench" / f"{name}.py")
    assert location is not None and location.loader is not None
    loaded = importlib.util.module_from_spec(location)
    sys.modules[loaded.__name__] = loaded  # dataclasses look their module up there
    location.loader.exec_module(loaded)
    return loaded


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.bench", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The tiny head once by every system that needs no peer, and by one that is not there; by row."""
    file = tmp_path_factory.mktemp("bench") / "results.json"
    done = bench("tiny-head", "--repeats", "1", "--systems", "plain", "fedbench", "pfl", "--python", "pfl=/no/python",
                 "--json", str(file), "--markdown", str(file.with_suffix(".md")))  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pfl: skipped: /no/python can't be run: No such file or directory" in done.stdout
    assert "- pfl: skipped: /no/python" in file.with_suffix(".md").read_text()
    return {run["row"]: run for run in json.loads(file.read_text())["runs"]}


@pytest.mark.slow
def test_fedbench_learns_what_the_plain_loop_learns(tiny: dict[str, Any]) -> None:
    plain, ours = tiny["plain"]["report"], tiny["fedbench"]["report"]
    assert len(plain["rounds"]) == len(ours["rounds"]) == 8
    assert plain["accuracy"] > 60  # five classes
    assert abs(plain["accuracy"] - ours["accuracy"]) < 6  # 400 test samples: two standard errors of the difference


@pytest.mark.slow
def test_an_absent_peer_is_skipped_with_its_reason(tiny: dict[str, Any]) -> None:
    assert tiny["pfl"]["problem"].startswith("skipped: /no/python can't be run")
    assert tiny["pfl"]["report"] is None


def test_a_wrong_workload_is_refused_by_name() -> None:
    done = bench("w9")
    assert done.returncode == 2
    assert "unknown workload 'w9'" in done.stderr


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")
def test_memory_of_a_process_counts_its_children() -> None:
    measure = module("measure")
    process = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        watch = measure.Watch(process.pid)
        watch.look()
        assert len(watch.members()) == 2
        assert measure.pss(process.pid) < 64 * 2**20 < watch.peak
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux")
def test_a_process_that_merely_has_the_old_id_of_the_command_is_left_alone() -> None:
    measure = module("measure")
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        watch = measure.Watch(process.pid)
        assert list(watch.members()) == [process.pid]
        ((pid, start),) = watch.ticks
        watch.ticks = {(pid, start - 1): 0}
        watch.end_members()
        assert watch.members() == {} and process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_jobs_share_data_only_where_it_is_the_same(tmp_path: Path) -> None:
    workloads = module("workloads")
    tiny = replace(workloads.TINY_HEAD, train=60, test=20, clients=3, samples=20)
    shared, many = (replace(tiny, clients=clients, shared_samples=True) for clients in (3, 900))
    folder = workloads.make_data(shared, tmp_path)
    assert workloads.make_data(many, tmp_path) == folder
    assert not (folder / "clients.npy").exists()
    assert np.load(workloads.make_data(tiny, tmp_path) / "clients.npy").shape == (3, 20)
    fewer = workloads.make_data(replace(tiny, clients=2), tmp_path)
    assert np.load(fewer / "clients.npy").shape == (2, 20)


def test_a_finished_command_tells_its_status_and_last_words(tmp_path: Path) -> None:
    code = "import sys; print('words'); sys.exit(7)"
    cost = module("measure").measure([sys.executable, "-c", code], cwd=tmp_path)
    assert (cost.code, cost.output) == (7, "words\n")


def test_ratios_are_taken_within_a_repeat_and_without_the_first_round() -> None:
    table = module("table")

    def result(row: str, repeat: int, *rounds: float) -> object:
        report = {"version": "1", "rounds": list(rounds), "startup": 1.0, "accuracy": 50.0, "note": ""}
        return table.Result("w", row, repeat, 9.0, None, None, report)

    plain = [result("plain", 0, 100.0, 2.0, 2.0), result("plain", 1, 100.0, 4.0, 4.0)]
    ours = [result("ours", 0, 100.0, 1.0, 1.0), result("ours", 1, 100.0, 1.0, 1.0)]
    assert table.ratio(ours, plain) == "0.38 [0.25-0.50]"  # 1/2 and 1/4; of the medians it would be 1/3
    (first, second) = table.rows([*plain, *ours], ["plain", "ours"])
    assert first[2:4] == ["3", "1.00 [1.00-1.00]"]
    assert second[6:8] == ["n/a", "n/a"]
