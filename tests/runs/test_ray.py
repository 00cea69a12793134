"""The Ray engine on a real cluster of two nodes: what is sent there, what comes back, and what is lost on the way.

What starts a cluster is `slow`; `test_ray_engine.py` has the engine on a fake of Ray.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedbench.cli.app import main
from fedbench.core.errors import FedbenchError
from fedbench.core.spec import RunSpec
from fedbench.plugins.provenance import code_hash
from fedbench.runs.checkpoint import Checkpointing
from fedbench.runs.engines.engine import InProcess, execute
from fedbench.runs.engines.events import Event, RoundFinished, RunFailed, RunFinished, RunRetried, RunStarted
from fedbench.runs.engines.ray import RayCluster, check_device, environment, ship
from fedbench.runs.prepare import Settings
from fedbench.suites.expand import expand
from fedbench.suites.resolve import Overrides
from fedbench.suites.suite import parse_suite
from fedbench.tuning.search import TrialBegan, TrialEnded
from tests.runs.kit import outcomes
from tests.tuning.toys import budget, by_place, opened, recorded, search

THIRD_PARTY = Path(__file__).parents[1] / "third_party_package" / "example_median.py"
SUITE = """
name: ray
dataset: "embedded?train=240&test=40"
scenario: {preset: iid, clients: 4, participation: 0.5}
training: {rounds: 3}
seeds: [0, 1]
rows: [{method: fedavg}, {method: waiting}, {method: example-median}]
"""
WAITING = '''
"""Averages; where the environment says so, its first attempt waits in round 2 until its process is killed."""
import os
import time
from dataclasses import dataclass
from pathlib import Path

import fedbench
from fedbench.core.method.hooks import hookimpl
from ours.averaging import average

SCALE = float(Path(__file__).with_name("scale.txt").read_text())


@dataclass(frozen=True, kw_only=True)
class P:
    """None."""


class Waiting:
    name, citation, Params, recipe = "waiting", "nobody", P, {}

    def __init__(self, params):
        pass

    @hookimpl
    def aggregate(self, task):
        """Waits for the first to come here, in round 2."""
        folder = os.environ.get("FEDBENCH_TEST_FOLDER")
        if folder and task.round == 2:
            try:
                (Path(folder) / "waits").open("x").close()
            except FileExistsError:
                return average(task)
            (Path(folder) / "writing").write_text(f"{os.getpid()} {fedbench.__file__}")
            (Path(folder) / "writing").rename(Path(folder) / "process")
            time.sleep(600)
        return {name: SCALE * tensor for name, tensor in average(task).items()}
'''
FAULTY = (
    WAITING.replace("waiting", "faulty").replace("task.round == 2", "1 / 0").replace('"FEDBENCH_TEST_FOLDER"', '"PATH"')
)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A head and another node with a CPU each, as processes of this machine."""
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # read on import: Ray listens on loopback alone
    pytest.importorskip("ray", reason="Ray is not installed; it comes with fedbench-harness[ray]")
    from ray.cluster_utils import Cluster

    node: dict[str, Any] = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    cluster.add_node(**node)
    yield cluster.address
    cluster.shutdown()
    patch.undo()


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """With two plugin files that import and read what is theirs, and a third party's package: here only, not there."""
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "scale.txt").write_text("1.0")
    (tmp_path / "plugins" / "waiting.py").write_text(WAITING)
    (tmp_path / "plugins" / "faulty.py").write_text(FAULTY)
    site = tmp_path / "site"
    metadata = site / "fedbench_example_median-1.0.dist-info"
    metadata.mkdir(parents=True)
    shutil.copy(THIRD_PARTY, site)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: fedbench-example-median\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[fedbench.methods]\nexample-median = example_median:FedMedian\n")
    (tmp_path / "plugins" / "ours").mkdir()
    (tmp_path / "plugins" / "ours" / "averaging.py").write_text("from fedbench.toolkit.fedavg import average\n")
    monkeypatch.syspath_prepend(str(tmp_path / "plugins"))
    monkeypatch.syspath_prepend(str(site))
    plugins = tuple(tmp_path / "plugins" / name for name in ("waiting.py", "faulty.py"))
    return Settings(tmp_path, tmp_path / "cache", plugins)


def specs_of(settings: Settings, **given: Any) -> list[RunSpec]:
    return expand(parse_suite(SUITE, "ray"), Overrides(plugin_files=settings.plugin_files, **given))


def wait_for(file: Path, seconds: float = 600) -> str:
    until = time.monotonic() + seconds
    while not file.exists() and time.monotonic() < until:
        time.sleep(0.05)
    return file.read_text()


# --- runs


@pytest.mark.slow
def test_a_cluster_with_a_killed_worker_gives_the_numbers_of_this_process(
    address: str, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = [*specs_of(settings), *specs_of(settings, methods=("faulty",), seeds=(0,))]
    alone = list(execute(specs, settings, 1, engine=InProcess(settings)))
    monkeypatch.setenv("FEDBENCH_TEST_FOLDER", str(tmp_path))
    kept = Checkpointing(tmp_path / "checkpoints", {spec.run_id: "code" for spec in specs}, every=1)
    killed: list[str] = []

    def kill() -> None:
        process, code = wait_for(tmp_path / "process").split()
        os.kill(int(process), signal.SIGKILL)
        killed.append(code)

    threading.Thread(target=kill, daemon=True).start()
    engine = RayCluster(replace(settings, checkpoints=kept), address, 1, 0)
    assert engine.slots() == 2
    clustered = list(execute(specs, settings, 1, engine=engine))

    assert outcomes(clustered) == outcomes(alone)
    assert len(outcomes(alone)) == 6
    (retried,) = [event for event in clustered if isinstance(event, RunRetried)]
    assert retried.spec.method == "waiting" and "was killed by SIGKILL" in retried.reason
    # it went on after the round before the one it was killed in, from the checkpoint of another process
    starts = [e.info.resumed_round for e in clustered if isinstance(e, RunStarted) and e.spec == retried.spec]
    assert starts == [0, 1]
    # the worker ran what it was sent, not what is installed here
    assert killed and Path(killed[0]) != Path(sys.modules["fedbench"].__file__ or "")
    for events in (alone, clustered):
        (failed,) = [event for event in events if isinstance(event, RunFailed)]
        assert failed.reason.startswith("ZeroDivisionError") and "seed 0" in failed.reason
        assert "1 / 0" in failed.details and "faulty.py" in failed.details
    # whoever stores the results deletes the checkpoints
    assert (kept.folder / retried.spec.run_id).is_dir()


@pytest.mark.slow
def test_a_run_that_is_stopped_ends_with_its_process_and_is_not_heard_of_again(
    address: str, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDBENCH_TEST_FOLDER", str(tmp_path))
    (spec,) = specs_of(settings, methods=("waiting",), seeds=(0,))
    engine = RayCluster(settings, address, 1, 0, workers=1)
    try:
        assert engine.slots() == 1 and engine.is_one_machine
        engine.begin(spec)
        process = int(wait_for(tmp_path / "process").split()[0])
        engine.stop(spec)
        until = time.monotonic() + 30
        while psutil.pid_exists(process) and time.monotonic() < until:
            time.sleep(0.1)
        assert not psutil.pid_exists(process)
        assert engine.wait(1.0) == []
        # its CPU is free again
        engine.begin(spec)
        ends: list[object] = []
        while not ends:
            ends = [event for event in engine.wait(10) if isinstance(event, RunFinished | RunFailed)]
        assert isinstance(ends[0], RunFinished)
    finally:
        engine.close()


def test_a_worker_with_other_code_refuses_the_run(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "sent").mkdir()
    shipped = ship(tmp_path / "sent", settings.plugin_files)
    assert list((tmp_path / "sent").rglob("__pycache__")) == []
    # each plugin file with what lies beside it, so that its code is the same there
    for number, name in enumerate(("waiting", "faulty")):
        sent = tmp_path / "sent" / "fedbench_plugin_files" / str(number)
        assert {file.name for file in sent.iterdir()} == {f"{name}.py", "scale.txt", "ours"}
    assert (tmp_path / "sent" / "ours" / "averaging.py").is_file()
    copies = tuple(tmp_path / "sent" / file for file in shipped.plugin_files)
    assert code_hash(copies) == shipped.code
    plain = replace(shipped, plugin_files=(), code="0" * 64)
    with pytest.raises(FedbenchError, match="its sources differ; install the same versions"):
        plain.unpacked(settings)
    parts = dict(shipped.parts) | {"torch": "0.1"}
    del parts["package example_median"]
    differences = r"package example_median registers methods here and missing there, torch \d\S* here and 0.1 there"
    with pytest.raises(FedbenchError, match=differences):
        replace(plain, parts=tuple(parts.items())).unpacked(settings)


def test_workers_get_settings_from_the_environment_but_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FEDBENCH_DATA", "HF_HOME", "HF_TOKEN", "FEDBENCH_PASSWORD", "AWS_REGION"):
        monkeypatch.setenv(name, "x")
    sent = environment()
    assert {"FEDBENCH_DATA", "HF_HOME"} <= set(sent) and sent["OMP_NUM_THREADS"] == "1"
    assert not {"HF_TOKEN", "FEDBENCH_PASSWORD", "AWS_REGION"} & set(sent)


@pytest.mark.slow
def test_the_runs_of_a_node_that_is_lost_are_done_on_another(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("FEDBENCH_TEST_FOLDER", str(tmp_path))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    first = cluster.add_node(num_cpus=1)

    events: list[Event] = []
    try:
        engine = RayCluster(settings, cluster.address, 1, 0)
        for event in execute(specs_of(settings, methods=("waiting",)), settings, 1, engine=engine):
            events.append(event)
            if isinstance(event, RoundFinished) and event.record.round == 1 and first in cluster.worker_nodes:
                wait_for(tmp_path / "process")
                cluster.add_node(num_cpus=1)
                cluster.remove_node(first, allow_graceful=False)
    finally:
        cluster.shutdown()
    assert len(outcomes(events)) == 2
    assert [event.attempt for event in events if isinstance(event, RunRetried)] == [1]


# --- what is refused


def test_without_ray_the_command_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "suite.yaml").write_text(SUITE)
    monkeypatch.setitem(sys.modules, "ray", None)
    asked = ["run", "--suite", str(tmp_path / "suite.yaml"), "--method", "fedavg", "--engine", "ray"]
    where = ["--store", str(tmp_path / "store"), "--cache-dir", str(tmp_path / "cache")]
    monkeypatch.setattr(sys, "argv", ["fedbench", *asked, *where])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert 'pip install "fedbench-harness[ray]"' in " ".join(capsys.readouterr().err.split())


def test_a_run_on_a_gpu_needs_one_set_aside_for_it(settings: Settings) -> None:
    (spec,) = specs_of(settings, methods=("fedavg",), seeds=(0,))
    check_device(spec, 0)
    on_gpu = spec.model_copy(update={"device": "cuda"})
    check_device(on_gpu, 0.25)
    with pytest.raises(FedbenchError, match="--run-gpus 1"):
        check_device(on_gpu, 0)
    with pytest.raises(FedbenchError, match="numbered from 0"):
        check_device(spec.model_copy(update={"device": "cuda:1"}), 1)


@pytest.mark.slow
def test_a_cluster_that_is_not_there_is_an_error(settings: Settings, address: str) -> None:
    with pytest.raises(FedbenchError, match="ray start --head"):
        RayCluster(settings, "127.0.0.1:1", 1, 0)
    with pytest.raises(FedbenchError, match="client protocol"):
        RayCluster(settings, "ray://127.0.0.1:10001", 1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [False, True])
def test_trials_on_a_cluster_are_those_of_this_process_and_a_lost_run_is_begun_anew(
    address: str, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    (spec,) = specs_of(settings, methods=("waiting",), seeds=(0,))
    studied = recorded(spec, budget(2), plugins=settings.plugin_files)
    (alone,), (study,) = opened(tmp_path / "here", studied), opened(tmp_path / "there", studied)
    search(tmp_path / "here", settings, studied)
    if is_killed:
        monkeypatch.setenv("FEDBENCH_TEST_FOLDER", str(tmp_path))

        def kill() -> None:
            os.kill(int(wait_for(tmp_path / "process").split()[0]), signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()
    events = search(tmp_path / "there", settings, studied, engine=RayCluster(settings, address, 1, 0, 1))
    assert [type(event) for event in events] == [TrialBegan, TrialEnded] * 2
    assert len(by_place(alone)) == 2
    assert by_place(study) == by_place(alone)
