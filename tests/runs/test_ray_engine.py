"""What the Ray engine makes of what Ray tells it, on a fake of Ray; `test_ray.py` has a real cluster."""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from optuna.trial import TrialState

from fedbench.core.errors import FedbenchError
from fedbench.core.spec import RunSpec
from fedbench.runs.checkpoint import Checkpointing
from fedbench.runs.engines import ray as ray_engine
from fedbench.runs.engines.engine import InProcess, Policy, execute
from fedbench.runs.engines.events import RunFailed, RunRetried
from fedbench.runs.engines.ray import RayCluster, Shipped, ship
from fedbench.runs.prepare import Settings
from fedbench.suites.expand import expand
from fedbench.suites.resolve import Overrides
from fedbench.suites.suite import parse_suite
from fedbench.tuning.search import TrialBegan, TrialEnded
from tests.runs.fake_ray import FakeRay, installed
from tests.runs.kit import outcomes
from tests.tuning.toys import budget, opened, recorded, search

SUITE = """
name: ray
dataset: "embedded?train=60&test=20"
scenario: {preset: iid, clients: 2}
training: {rounds: 2}
seeds: [0, 1]
rows: [{method: fedprox}]
"""
TWO = {"10.0.0.1": {"CPU": 1.0}, "10.0.0.2": {"CPU": 1.0, "GPU": 2.0}}


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Shipped:
    return ship(tmp_path_factory.mktemp("shipped"), ())


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch, shipped: Shipped) -> FakeRay:
    """Joined by this process, the first of two machines."""
    monkeypatch.setattr(ray_engine, "ship", lambda folder, plugin_files: shipped)
    monkeypatch.setattr("socket.create_connection", lambda *_, **__: SimpleNamespace(close=lambda: None))
    return installed(monkeypatch, TWO)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(tmp_path, tmp_path / "cache")


def specs_of(count: int) -> list[RunSpec]:
    return expand(parse_suite(SUITE, "ray"), Overrides())[:count]


def test_runs_are_those_of_this_process_and_one_that_is_lost_is_begun_anew(ray: FakeRay, settings: Settings) -> None:
    specs = specs_of(2)
    kept = Checkpointing(settings.cache_dir / "kept", {spec.run_id: "code" for spec in specs}, every=1)
    engine = RayCluster(replace(settings, checkpoints=kept), "10.0.0.1:6379", 1, 0, workers=1)
    assert engine.slots() == 1 and not engine.is_one_machine
    ray.lose("NodeDiedError")
    events = list(execute(specs, settings, 1, engine=engine, policy=Policy(pause=0.0)))
    assert outcomes(events) == outcomes(execute(specs, settings, 1, engine=InProcess(settings)))
    (retried,) = [event for event in events if isinstance(event, RunRetried)]
    assert retried.spec == specs[0]
    assert "Ray lost its process on 10.0.0.1 (process" in retried.reason and "NodeDiedError" in retried.reason
    assert not ray.is_initialized()
    assert ray.options[0]["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("WorkerCrashedError", "Ray lost its process on 10.0.0.1 .*: WorkerCrashedError: boom"),
        ("RayTaskError", "it can't be run on its worker: boom"),
    ],
)
def test_why_a_run_was_lost_is_said(ray: FakeRay, settings: Settings, kind: str, reason: str) -> None:
    ray.lose(kind, "boom")
    engine = RayCluster(settings, "auto", 1, 0)
    events = list(execute(specs_of(1), settings, 1, engine=engine, policy=Policy(retries=0)))
    (failed,) = [event for event in events if isinstance(event, RunFailed)]
    assert re.search(reason, failed.reason)


def test_what_is_stopped_is_cancelled_and_heard_of_no_more(ray: FakeRay, settings: Settings) -> None:
    (spec,) = specs_of(1)
    ray.lose("NodeDiedError", after=0)
    engine = RayCluster(settings, "auto", 1, 0, workers=1)
    assert engine.slots() == 1
    engine.begin(spec)
    engine.stop(spec)
    assert len(ray.cancelled) == 1 and not engine.has_begun(spec)
    assert engine.wait(0.01) == []
    engine.close()


@pytest.mark.parametrize(
    ("cpus", "gpus", "message"),
    [
        (1, 1.5, "--run-gpus 1.5: above 1, it must be a whole number"),
        (0, 0, "--run-cpus and --run-gpus are both 0"),
        (2, 0, "asks for 2 CPUs .*10.0.0.1 with 1 CPUs and 0 GPUs; 10.0.0.2 with 1 CPUs and 2 GPUs"),
        (1, 3, "asks for 1 CPUs and 3 GPUs"),
    ],
)
def test_what_fits_on_no_node_is_refused(
    ray: FakeRay, settings: Settings, cpus: float, gpus: float, message: str
) -> None:
    with pytest.raises(FedbenchError, match=message):
        RayCluster(settings, "auto", cpus, gpus)
    assert not ray.is_initialized()


def test_a_gpu_is_shared_by_as_many_as_it_holds(ray: FakeRay, settings: Settings) -> None:
    for gpus, room in ((0.3, 6), (0.5, 4), (1, 2), (2, 1)):
        with closing(RayCluster(settings, "auto", 0, gpus)) as held:
            assert held.slots() == room and held.machines() == {"10.0.0.2"}
            ray.lose("NodeDiedError", after=0)
            held.begin(specs_of(1)[0], alone=True)
            assert ray.options[-1]["num_gpus"] == max(gpus, 1)


def test_a_cluster_that_cannot_be_joined_or_would_be_open_to_others_is_refused(
    ray: FakeRay, settings: Settings
) -> None:
    with pytest.raises(FedbenchError, match=r"ray://x: Ray's client protocol is not supported"):
        RayCluster(settings, "ray://x", 1, 0)
    with pytest.raises(FedbenchError, match="no Ray cluster can be joined there .nobody there."):
        RayCluster(settings, "nobody:1", 1, 0)
    with pytest.raises(FedbenchError, match="Ray would listen on 10.0.0.1, where others can reach it"):
        RayCluster(settings, "", 1, 0)
    assert not ray.is_initialized()
    ray.here = "127.0.0.1"
    RayCluster(settings, "", 1, 0, workers=3).close()
    assert ray.options[-1]["address"] == "local" and ray.options[-1]["num_cpus"] == 3
    ray.init(address="auto")
    with pytest.raises(FedbenchError, match="has joined a Ray cluster already"):
        RayCluster(settings, "auto", 1, 0)


def test_a_trial_whose_run_is_lost_on_the_cluster_is_run_again(
    ray: FakeRay, settings: Settings, tmp_path: Path
) -> None:
    studied = recorded(specs_of(1)[0], budget(2))
    (study,) = opened(tmp_path, studied)
    ray.lose("WorkerCrashedError")
    events = search(tmp_path, settings, studied, engine=RayCluster(settings, "auto", 1, 0, 1))
    assert [type(event) for event in events] == [TrialBegan, TrialEnded] * 2
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 2
    assert not ray.lost
