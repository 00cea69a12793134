"""A disk that is full during a run, and has space again later: nothing is lost, nothing is counted twice."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from fedbench.core.errors import FedbenchError
from fedbench.core.method.hooks import hookimpl
from fedbench.runs.checkpoint import Checkpointing
from fedbench.runs.job import run_spec
from fedbench.runs.prepare import Settings
from fedbench.suites.expand import expand
from fedbench.suites.resolve import Overrides
from fedbench.suites.suite import parse_suite
from fedbench.tracking.recording import HURRY, Patience, StoreUnavailable, patient
from fedbench.tracking.schema import store_uri
from fedbench.tracking.store import open_store, runs_of

# isort: split
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, TEMPORARILY_UNAVAILABLE

COMMAND = [sys.executable, "-c", "from fedbench.cli.app import command; command()"]
SUITE = """
name: full
dataset: "embedded?train=240&test=40"
scenario: {preset: iid, clients: 4, participation: 0.5}
training: {rounds: 150}
seeds: [0, 1]
rows: [{method: fedavg}]
"""


@dataclass
class Disk:
    """A small disk of its own."""

    folder: Path

    def fill(self) -> None:
        with (self.folder / "ballast").open("ab", buffering=0) as ballast:
            for size in (2**16, 2**10, 1):
                try:
                    while True:
                        ballast.write(bytes(size))
                except OSError as error:
                    assert error.errno == errno.ENOSPC

    def free(self) -> None:
        (self.folder / "ballast").unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a small disk can't be mounted here: {mounted.stderr.strip()}")
    yield Disk(folder)
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def test_checkpoints_are_left_out_while_the_disk_is_full_and_written_again_after(disk, cache):
    (spec, _) = expand(parse_suite(SUITE, "full"), Overrides(sets=(("rounds", 6),)))
    settings = Settings(cache, cache, checkpoints=Checkpointing(disk.folder / "kept", {spec.run_id: "code"}, 1))
    warnings = []

    class Full:
        @hookimpl
        def round_finished(self, record) -> None:
            if record.round == 2:
                disk.fill()
            if record.round == 4:
                disk.free()

        @hookimpl
        def run_warned(self, warning) -> None:
            warnings.append(warning)

    result = run_spec(spec, settings, [Full()])
    assert [warning[:30] for warning in warnings] == [f"no checkpoint after round {n}: ca"[:30] for n in (2, 3)]
    assert "No space left on device" in warnings[0] and "free space" in warnings[0]
    kept = sorted(file.name for file in (disk.folder / "kept" / spec.run_id).iterdir())
    assert kept == ["round-000005.safetensors", "round-000006.safetensors"]
    assert result.predictions == run_spec(spec, replace(settings, checkpoints=None)).predictions


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    (folder / "suite.yaml").write_text(SUITE)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("MLFLOW_TRACKING_URI", None)
    command = [*COMMAND, "run", "--suite", "suite.yaml", "--jobs", "1", "--checkpoint-every", "5", *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def statuses(store: Path) -> Counter[str]:
    client = open_store(store_uri(str(store)), create=False)
    assert client is not None
    return Counter(run.info.status for _, run in runs_of(client, "full"))


@pytest.mark.slow
def test_a_full_cache_is_told_before_anything_runs(disk, tmp_path):
    disk.fill()
    process = start(tmp_path, "--cache-dir", str(disk.folder))
    _, err = process.communicate(timeout=200)
    assert process.returncode == 2 and "No space left on device" in err and "free space" in err
    assert "Traceback" not in err and not (tmp_path / "fedbench-store").exists()
    disk.free()
    process = start(tmp_path, "--cache-dir", str(disk.folder), "--set", "rounds=2")
    assert process.wait(timeout=200) == 0
    assert statuses(tmp_path / "fedbench-store") == {"FINISHED": 2}


@pytest.mark.slow
def test_a_full_store_stops_the_command_and_the_same_one_goes_on(disk, cache, tmp_path):
    arguments = ("--store", str(disk.folder / "store"), "--cache-dir", str(cache))
    process = start(tmp_path, *arguments, "--patience", "2")
    for line in process.stdout:
        if line.startswith("round") and "seed 1" in line:
            disk.fill()
            break
    out, err = process.communicate(timeout=200)
    assert process.returncode == 1 and "Traceback" not in err, err
    assert "warning: the store can't be written: " in err and "stopped: the store" in err
    disk.free()
    left = statuses(disk.folder / "store")
    assert left == {"FINISHED": 1, "RUNNING": 1}
    process = start(tmp_path, *arguments)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0 and "1 of 2 runs are in the store already" in out, err
    assert "goes on from its checkpoint after round" in out
    assert statuses(disk.folder / "store") == {"FINISHED": 2, "KILLED": 1}
    client = open_store(store_uri(str(disk.folder / "store")), create=False)
    for _, run in runs_of(client, "full", "attributes.status = 'FINISHED'"):
        steps = [metric.step for metric in client.get_metric_history(run.info.run_id, "global_accuracy")]
        assert steps == list(range(151))


@pytest.mark.slow
def test_with_patience_the_same_command_waits_for_space(disk, cache, tmp_path):
    process = start(tmp_path, "--store", str(disk.folder / "store"), "--cache-dir", str(cache), "--patience", "100")
    for line in process.stdout:
        if line.startswith("round") and "seed 0" in line:
            disk.fill()
            break
    assert "warning: the store can't be written: " in process.stderr.readline()
    time.sleep(1)
    disk.free()
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert statuses(disk.folder / "store") == {"FINISHED": 2}


class Failing:
    """A store whose calls fail so many times."""

    def __init__(self, times: int, error: Exception) -> None:
        self.times, self.error, self.calls = times, error, 0

    def set_tag(self, *_: object) -> str:
        self.calls += 1
        if self.calls <= self.times:
            raise self.error
        return "written"


@pytest.mark.parametrize("error", [MlflowException("locked", TEMPORARILY_UNAVAILABLE), OSError(errno.ENOSPC, "full")])
def test_a_store_is_tried_again_and_told_of_once(error, monkeypatch):
    monkeypatch.setattr("fedbench.tracking.recording._FIRST", 0.01)
    told: list[str] = []
    client = patient(Failing(3, error), Patience("uri", told.append, 5))
    assert client.set_tag("run", "key", "value") == "written" and len(told) == 1
    hopeless = patient(Failing(10**9, error), Patience("uri", told.append, 0.05))
    with pytest.raises(StoreUnavailable, match="the same command goes on"):
        hopeless.set_tag("run", "key", "value")


def test_nobody_who_is_in_a_hurry_waits_for_a_store():
    failing = Failing(10**9, OSError(errno.ENOSPC, "full"))
    threading.Timer(0.3, HURRY.set).start()
    began = time.monotonic()
    try:
        with pytest.raises(StoreUnavailable):
            patient(failing, Patience("uri", print, 60)).set_tag("run", "key", "value")
    finally:
        HURRY.clear()
    assert time.monotonic() - began < 10


def test_what_will_not_pass_is_not_tried_again():
    error = MlflowException("no such run", RESOURCE_DOES_NOT_EXIST)
    failing = Failing(1, error)
    with pytest.raises(MlflowException, match="no such run"):
        patient(failing, Patience("uri", print, 5)).set_tag("run", "key", "value")
    assert failing.calls == 1 and issubclass(StoreUnavailable, FedbenchError)
