"""Tuning: what a trial measures and never sees; a budget survives crashes and is shared without doubles."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState
from PIL import Image

from fedbench.core.errors import FedbenchError
from fedbench.core.spec import RunSpec
from fedbench.runs.job import run_spec
from fedbench.runs.prepare import Settings
from fedbench.suites.expand import expand
from fedbench.suites.resolve import Overrides
from fedbench.suites.suite import parse_suite
from fedbench.tracking.schema import store_uri
from fedbench.tracking.store import open_store
from fedbench.tuning.best import best_of, tuned_otherwise, with_best
from fedbench.tuning.figures import importances
from fedbench.tuning.found import found
from fedbench.tuning.objectives import Objective, UnknownObjective
from fedbench.tuning.space import defaults_of, space_of
from fedbench.tuning.storage import SignsOfLife, open_storage, storage_url
from fedbench.tuning.studies import (
    RETRIES,
    Budget,
    Record,
    counted,
    open_study,
    record_of,
    studies_named,
    try_again,
)
from fedbench.tuning.tracking import TrialTracking
from fedbench.tuning.trial import Surplus, Tuned, claim, outcome_of_twin, pruner, trial_specs
from fedbench.tuning.trial_process import TrialBroke
from fedbench.tuning.worker import Job, TrialBegan, TrialEnded, work
from fedbench.workflow.studies import unused_seeds

SUITE = """
name: toy
dataset: imagefolder:toy
scenario: {imbalance: none, partition: iid, clients: 3, participation: 1.0}
backbone: clip:embedded
training: {rounds: 3, local_epochs: 1, batch_size: 16, lr: 0.01}
rows:
  - method: fedavg
  - method: fedprox
"""
CLASSES = ("bird", "boat", "car", "tree")


def write_images(folder: Path, *, poisoned: bool = False) -> None:
    """128 training and 40 test images of 32 pixels; poisoned: noise under wrong labels in the test split."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 32), ("test", 10)):
        for label, name in enumerate(CLASSES):
            wrong = poisoned and split == "test"
            target = folder / "toy" / split / (CLASSES[(label + 1) % 4] if wrong else name)
            target.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                shade = 40 + 50 * label + rng.integers(0, 60, size=(32, 32, 3))
                noise = np.random.default_rng(number).integers(0, 255, size=(32, 32, 3))
                Image.fromarray((noise if wrong else shade).astype(np.uint8)).save(target / f"{number}.png")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_images(folder)
    return folder


@pytest.fixture(scope="module")
def settings(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return Settings(data, tmp_path_factory.mktemp("cache"))


def rows() -> list[RunSpec]:
    return expand(parse_suite(SUITE, "toy.yaml"), Overrides())


def budget(trials: int = 6, **given: Any) -> Budget:
    return Budget(**{"trials": trials, "seeds": (5,), "objectives": ("global_accuracy",), "pruner": "none", **given})


def recorded(
    row: RunSpec, spent: Budget, name: str = "toy", plugins: Sequence[Path] = (), **given: Any
) -> tuple[Tuned, Record]:
    space = space_of(row, plugins)
    record = Record(
        **{
            **{"name": name, "suite": "toy", "scale": "", "setting": "", "row": row.row, "title": row.title},
            **{"spec": row.model_dump(mode="json"), "space": tuple(d.as_json() for d in space), "budget": spent},
            **{"code_hash": "c", "data_hash": "d", "weights_hash": "w", "commit": "", "method_code": '[{"hash": "m"}]'},
            **given,
        }
    )
    return Tuned(row, space, record.study_name), record


def tuned(
    folder: Path, settings: Settings, spent: Budget, specs: Sequence[RunSpec] | None = None
) -> list[optuna.Study]:
    """The studies of the rows, after one worker in this process has spent their budgets."""
    uri = store_uri(str(folder))
    url = storage_url(None, uri)
    chosen = [recorded(spec, spent, plugins=settings.plugin_files) for spec in specs or rows()[1:]]
    storage = open_storage(url, create=True)
    opened = [open_study(storage, record, defaults_of(row.spec, row.space)) for row, record in chosen]
    work(Job(url, tuple(row for row, _ in chosen), settings, "toy", uri), lambda event: None)
    return opened


def outcome(study: optuna.Study) -> list[tuple[Any, ...]]:
    return [(t.number, t.state, t.params, t.values, t.intermediate_values) for t in study.trials]


# --- what a trial measures


def test_a_trials_value_is_the_mean_over_seeds_of_the_metric_on_validation_data(
    tmp_path: Path, settings: Settings
) -> None:
    (study,) = tuned(tmp_path, settings, budget(1, seeds=(5, 9)))
    (trial,) = study.trials
    spec = rows()[1]
    by_hand = []
    for seed in (5, 9):
        scenario = spec.scenario.model_copy(update={"validation": 0.2})
        by_hand.append(run_spec(spec.model_copy(update={"scenario": scenario, "seed": seed}), settings).summary)
    assert trial.values == [pytest.approx(sum(s["global_accuracy"] for s in by_hand) / 2)]
    assert trial.params == {"lr": 0.01, "fedprox.mu": 0.01}
    assert trial.user_attrs["by_seed"] == {"5": [by_hand[0]["global_accuracy"]], "9": [by_hand[1]["global_accuracy"]]}
    assert sorted(trial.intermediate_values) == [1, 2, 3]
    assert trial.intermediate_values[3] == trial.value


@pytest.mark.slow
def test_poisoned_test_images_and_labels_change_nothing_in_the_study(tmp_path: Path, settings: Settings) -> None:
    write_images(tmp_path / "poisoned", poisoned=True)
    poisoned = Settings(tmp_path / "poisoned", tmp_path / "cache")
    pruned = budget(7, pruner="median")
    (honest,) = tuned(tmp_path / "a", settings, pruned)
    (other,) = tuned(tmp_path / "b", poisoned, pruned)
    assert outcome(honest) == outcome(other)
    # and the poison is strong: on the test split the same run scores worse by far
    scores = [run_spec(rows()[1], given).summary["global_accuracy"] for given in (settings, poisoned)]
    assert scores[0] - scores[1] > 20


def test_one_worker_gives_the_same_study_again(tmp_path: Path, settings: Settings) -> None:
    assert outcome(*tuned(tmp_path / "a", settings, budget(6))) == outcome(*tuned(tmp_path / "b", settings, budget(6)))


@pytest.mark.slow
def test_hopeless_trials_are_pruned_and_count(tmp_path: Path, settings: Settings) -> None:
    (study,) = tuned(tmp_path, settings, budget(9, pruner="halving"))
    states = [trial.state for trial in study.trials]
    assert len(states) == 9
    assert set(states) == {TrialState.COMPLETE, TrialState.PRUNED}
    pruned = [trial for trial in study.trials if trial.state is TrialState.PRUNED]
    assert all("pruned at round" in trial.user_attrs["reason"] for trial in pruned)
    assert all(trial.last_step is not None and trial.last_step < 3 for trial in pruned)


def test_a_trial_that_diverges_counts_as_pruned_with_the_reason(tmp_path: Path, settings: Settings) -> None:
    wild = rows()[0].model_copy(update={"training": rows()[0].training.model_copy(update={"lr": 100.0, "rounds": 6})})
    wild = wild.model_copy(update={"backbone": "convnet"})
    (study,) = tuned(tmp_path, settings, budget(1), [wild])
    (trial,) = study.trials
    assert trial.state is TrialState.PRUNED
    assert "diverged" in trial.user_attrs["reason"]
    assert found(study) is None


def test_several_objectives_give_a_front_and_the_first_decides_the_best(tmp_path: Path, settings: Settings) -> None:
    spent = budget(4, objectives=("worst_client", "bytes"))
    (study,) = tuned(tmp_path, settings, spent, [rows()[0]])
    assert [d.name for d in study.directions] == ["MAXIMIZE", "MINIMIZE"]
    result = found(study)
    assert result is not None
    assert result.best[0] == max(trial.values[0] for trial in study.trials)
    sent = run_spec(trial_specs(rows()[0], {}, spent)[0], settings).summary
    assert {trial.values[1] for trial in study.trials} == {sent["bytes_up"] + sent["bytes_down"]}


def test_every_row_gets_the_same_budget(tmp_path: Path, settings: Settings) -> None:
    opened = tuned(tmp_path, settings, budget(2), rows())
    assert [len(counted(study)) for study in opened] == [2, 2]
    assert len({str(record_of(study).budget) for study in opened}) == 1
    assert [trial.params["lr"] for study in opened for trial in study.trials][::2] == [0.01, 0.01]


def test_an_unknown_objective_stops_before_anything_is_trained(tmp_path: Path, settings: Settings) -> None:
    with pytest.raises(UnknownObjective, match=r"'tail'.*global_accuracy"):
        tuned(tmp_path, settings, budget(2, objectives=("tail",)))


def test_trials_are_child_runs_of_their_study_in_an_experiment_that_no_leaderboard_reads(
    tmp_path: Path, settings: Settings
) -> None:
    (study,) = tuned(tmp_path, settings, budget(2))
    client = open_store(store_uri(str(tmp_path)), create=False)
    assert client is not None
    assert [e.name for e in client.search_experiments() if "fedbench" in e.name] == ["fedbench-tuning/toy"]
    runs = client.search_runs([client.get_experiment_by_name("fedbench-tuning/toy").experiment_id])
    parents = [run for run in runs if run.data.tags["fedbench.kind"] == "study"]
    trials = [run for run in runs if run.data.tags["fedbench.kind"] == "trial"]
    assert [run.info.run_name for run in parents] == ["toy · fedprox · clip:embedded"]
    assert {run.data.tags["mlflow.parentRunId"] for run in trials} == {parents[0].info.run_id}
    assert {run.data.tags["fedbench.method_code"] for run in runs} == {'[{"hash": "m"}]'}
    assert sorted(run.info.run_name for run in trials) == ["trial 0 · defaults", "trial 1"]
    first = next(run for run in trials if run.info.run_name == "trial 0 · defaults")
    assert first.data.params == {"lr": "0.01", "fedprox.mu": "0.01"}
    assert first.data.metrics["objective/global_accuracy"] == study.trials[0].value
    assert first.data.metrics["validation/global_accuracy"] == study.trials[0].value
    assert not any(name.startswith("final/") for name in first.data.metrics)
    assert parents[0].data.metrics["best/global_accuracy"] == max(trial.value for trial in study.trials)


# --- budgets under crashes and company


def add(
    study: optuna.Study, number: int, values: dict[str, float], state: TrialState, value: float = 0.0
) -> FrozenTrial:
    distributions = {key: optuna.distributions.FloatDistribution(0.0, 10.0) for key in values}
    trial = optuna.trial.create_trial(
        state=state, params=values, distributions=distributions, value=value if state is TrialState.COMPLETE else None
    )
    study.add_trial(trial)
    assert study.trials[-1].number == number
    return study.trials[-1]


def asked(study: optuna.Study, **values: float) -> optuna.Trial:
    """A trial of the sampler's with these values."""
    trial = study.ask()
    for key, value in values.items():
        trial.suggest_float(key.replace("__", "."), value, value)
    return trial


def test_the_same_values_are_not_run_twice() -> None:
    study = optuna.create_study(direction="maximize")
    add(study, 0, {"lr": 1.0}, TrialState.COMPLETE, 7.0)
    twin = asked(study, lr=1.0)
    assert outcome_of_twin(twin) == (7.0,)
    assert twin.user_attrs["same_as"] == 0
    assert outcome_of_twin(asked(study, lr=2.0)) is None


def test_values_that_are_being_tried_or_were_queued_twice_take_no_place() -> None:
    study = optuna.create_study(direction="maximize")
    asked(study, lr=1.0)
    with pytest.raises(Surplus, match="trial 0 tries the same"):
        outcome_of_twin(asked(study, lr=1.0))
    add(study, 2, {"lr": 3.0}, TrialState.COMPLETE, 7.0)
    study.enqueue_trial({"lr": 3.0})
    with pytest.raises(Surplus, match="trial 2 tries the same"):
        outcome_of_twin(asked(study, lr=3.0))


def test_a_pruned_twin_is_pruned_again_with_its_reports() -> None:
    study = optuna.create_study(direction="maximize")
    first = asked(study, lr=1.0)
    first.report(5.0, 1)
    study.tell(first, state=TrialState.PRUNED)
    twin = asked(study, lr=1.0)
    with pytest.raises(optuna.TrialPruned, match="as trial 0"):
        outcome_of_twin(twin)
    assert study.trials[1].intermediate_values == {1: 5.0}


def test_a_trial_beyond_the_budget_is_surplus_whoever_runs_the_others() -> None:
    study = optuna.create_study()
    row, spent = recorded(rows()[0], budget(2))[0], budget(2)
    add(study, 0, {}, TrialState.FAIL)
    study.ask()
    add(study, 2, {"x": 1.0}, TrialState.COMPLETE)
    with pytest.raises(Surplus, match="the budget of 2 trials was spent"):
        claim(study.ask(), row, spent)
    assert set(claim(study.ask(), row, budget(4))) == {"lr"}


def test_a_worker_takes_the_row_with_the_fewest_trials(tmp_path: Path, settings: Settings) -> None:
    uri = store_uri(str(tmp_path))
    url = storage_url(None, uri)
    storage, spent = open_storage(url, create=True), budget(2)
    chosen = [recorded(spec, spent) for spec in rows()]
    for row, record in chosen:
        open_study(storage, record, defaults_of(row.spec, row.space))
    began: list[str] = []
    events = lambda event: began.append(event.row.spec.method) if isinstance(event, TrialBegan) else None  # noqa: E731
    work(Job(url, tuple(row for row, _ in chosen), settings, "toy", uri), events)
    assert began == ["fedavg", "fedprox", "fedavg", "fedprox"]


def short_of_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that shows no sign of life for a second is dead."""
    for module in ("fedbench.tuning.storage", "fedbench.tuning.tracking"):
        monkeypatch.setattr(f"{module}.GRACE", 1)


def by_place(study: optuna.Study) -> list[tuple[Any, ...]]:
    return [(t.state, t.params, t.values, t.intermediate_values) for t in counted(study)]


def children(folder: Path) -> list[tuple[str, str]]:
    """Trial and status of the trials' MLflow runs."""
    client = open_store(store_uri(str(folder)), create=False)
    assert client is not None
    runs = client.search_runs([client.get_experiment_by_name("fedbench-tuning/toy").experiment_id])
    return sorted((r.data.tags["fedbench.trial"], r.info.status) for r in runs if "fedbench.trial" in r.data.tags)


@pytest.fixture(scope="module")
def undisturbed(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> optuna.Study:
    """Of eight trials."""
    (study,) = tuned(tmp_path_factory.mktemp("undisturbed"), settings, budget(8, pruner="halving"))
    return study


@pytest.mark.slow
@pytest.mark.parametrize("drawn", [0, 1, 2])
def test_trials_that_died_at_any_point_leave_the_study_as_it_would_have_been(
    tmp_path: Path, settings: Settings, undisturbed: optuna.Study, monkeypatch: pytest.MonkeyPatch, drawn: int
) -> None:
    short_of_patience(monkeypatch)
    for trials in (3, 6):  # among the random ones, and among those that are modelled on the earlier
        (study,) = tuned(tmp_path, settings, budget(trials, pruner="halving"))
        dead = study.ask()
        if drawn == 2:
            claim(dead, recorded(rows()[1], budget(8))[0], budget(8))
            TrialTracking(store_uri(str(tmp_path)), "toy").began(dead, dead.params)
            dead.report(99.0, 1)  # which no other trial could beat, if it counted
            study._storage.set_trial_system_attr(dead._trial_id, "completed_rung_0", 99.0)
        elif drawn == 1:
            dead.suggest_float("lr", 1e-4, 1.0, log=True)
    (disturbed,) = tuned(tmp_path, settings, budget(8, pruner="halving"))
    assert [t.number for t in disturbed.trials if t.state is TrialState.FAIL] == [3, 7]
    assert by_place(disturbed) == by_place(undisturbed)
    kept = {(str(trial.number), "FINISHED") for trial in counted(disturbed)}
    assert set(children(tmp_path)) == kept | ({("3", "KILLED"), ("7", "KILLED")} if drawn == 2 else set())


def test_values_whose_processes_die_again_and_again_count_as_pruned_with_the_reason(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    (study,) = tuned(tmp_path, settings, budget(1))
    storage = open_storage(storage_url(None, store_uri(str(tmp_path))), create=False)
    spent = budget(2)
    for _ in range(RETRIES):
        dead = study.ask()
        claim(dead, recorded(rows()[1], spent)[0], spent)
        study.tell(dead, state=TrialState.FAIL)
        assert try_again(study, study.trials[-1]).state is TrialState.WAITING
    last = study.ask()
    assert last.params == dead.params
    short_of_patience(monkeypatch)
    storage.record_heartbeat(last._trial_id)
    ended: list[str] = []
    uri = store_uri(str(tmp_path))
    job = Job(storage_url(None, uri), (recorded(rows()[1], spent)[0],), settings, "toy", uri)
    open_study(storage, recorded(rows()[1], spent)[1], {})
    work(job, lambda event: ended.append(event.reason) if isinstance(event, TrialEnded) else None)
    given_up = study.trials[-1]
    assert given_up.state is TrialState.PRUNED
    assert given_up.params == dead.params
    assert ended == [given_up.user_attrs["reason"]]
    assert "died 4 times" in ended[0]
    assert len(counted(study)) == 2
    assert children(tmp_path) == [("0", "FINISHED"), (str(given_up.number), "FINISHED")]


def test_nothing_new_begins_before_what_may_be_dead_is_settled(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    (study,) = tuned(tmp_path, settings, budget(1))
    storage = open_storage(storage_url(None, store_uri(str(tmp_path))), create=False)
    running = study.ask()
    storage.record_heartbeat(running._trial_id)
    signs = SignsOfLife(storage)
    assert signs.are_missing(study)  # that sign may have been its last
    time.sleep(1.1)
    storage.record_heartbeat(running._trial_id)
    assert not signs.are_missing(study)
    later = study.ask()
    assert not signs.are_missing(study)  # it has just begun
    storage.record_heartbeat(later._trial_id)
    monkeypatch.setattr("fedbench.tuning.storage._LATE", 1)
    time.sleep(2.1)
    storage.record_heartbeat(running._trial_id)
    assert signs.are_missing(study)


def test_the_record_of_a_trial_whose_process_died_right_behind_it_is_made_up_for(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    (study,) = tuned(tmp_path, settings, budget(2))
    client = open_store(store_uri(str(tmp_path)), create=False)
    assert client is not None
    behind, between = study.trials[0].user_attrs["mlflow_run"], study.trials[1].user_attrs["mlflow_run"]
    client.update_run(behind, status="RUNNING")
    stray = client.create_run(client.get_run(between).info.experiment_id, tags=client.get_run(between).data.tags)
    tracking = TrialTracking(store_uri(str(tmp_path)), "toy")
    assert not tracking.catch_up(study)  # its process may be about to
    short_of_patience(monkeypatch)
    time.sleep(1.1)
    assert tracking.catch_up(study)
    assert client.get_run(behind).info.status == "FINISHED"
    assert len(client.get_metric_history(behind, "objective/global_accuracy")) == 1
    assert client.get_run(stray.info.run_id).info.status == "KILLED"
    assert client.get_run(between).info.status == "FINISHED"


RAISING = """
from dataclasses import dataclass
from fedbench.core.errors import FedbenchError
from fedbench.core.method.hooks import hookimpl

@dataclass(frozen=True, kw_only=True)
class P:
    "None."

class Raising:
    name, citation, Params, recipe = "raising", "nobody", P, {}

    def __init__(self, params):
        pass

    @hookimpl
    def aggregate(self, task):
        raise ERROR
"""


def raising(folder: Path, settings: Settings, error: str) -> tuple[Settings, list[RunSpec]]:
    """A row of a method whose first aggregation raises."""
    plugins = (folder / "raising.py",)
    plugins[0].write_text(RAISING.replace("ERROR", error), encoding="utf-8")
    overrides = Overrides(methods=("raising",), plugin_files=plugins)
    return replace(settings, plugin_files=plugins), expand(parse_suite(SUITE, "toy.yaml"), overrides)


def test_an_error_ends_the_record_of_its_trial(tmp_path: Path, settings: Settings) -> None:
    given, specs = raising(tmp_path, settings, "ZeroDivisionError('division by zero')")
    with pytest.raises(TrialBroke, match="ZeroDivisionError: division by zero"):
        tuned(tmp_path, given, budget(1), specs)
    assert children(tmp_path) == [("0", "FAILED")]


@pytest.mark.slow
def test_a_trial_whose_process_died_before_its_first_sign_of_life_is_taken_over(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_of_patience(monkeypatch)
    uri = store_uri(str(tmp_path))
    row, record = recorded(rows()[1], budget(2))
    storage = open_storage(storage_url(None, uri), create=True)
    study = open_study(storage, record, defaults_of(row.spec, row.space))
    study.ask()
    time.sleep(1.1)
    work(Job(storage_url(None, uri), (row,), settings, "toy", uri), lambda event: None)
    assert sorted(trial.state.name for trial in study.trials) == ["COMPLETE", "COMPLETE", "FAIL"]
    assert [t.params["fedprox.mu"] for t in study.trials[1:] if t.user_attrs.get("defaults")] == [0.01]


@pytest.mark.slow
def test_two_processes_never_take_the_same_waiting_trial(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'studies.db'}"
    study = optuna.create_study(storage=open_storage(url, create=True), study_name="s")
    for _ in range(60):
        study.enqueue_trial({})
    code = (
        "import sys, optuna; from optuna.trial import TrialState as S\n"
        "from fedbench.tuning.storage import open_storage\n"
        "study = optuna.load_study(study_name='s', storage=open_storage(sys.argv[1], create=False))\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "while study.get_trials(deepcopy=False, states=(S.WAITING,)): print(study.ask().number)\n"
    )
    pair = [
        subprocess.Popen([sys.executable, "-c", code, url], stdin=-1, stdout=-1, stderr=-1, text=True) for _ in range(2)
    ]
    for process in pair:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in pair:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    taken = [number for process in pair for number in process.communicate(timeout=120)[0].split()]
    assert sorted(int(number) for number in taken)[:60] == list(range(60))
    assert len(set(taken)) == len(taken) <= 61  # both may have seen the last one wait


def test_the_suites_own_values_are_queued_again_if_their_trial_failed(tmp_path: Path) -> None:
    storage = open_storage(storage_url(None, store_uri(str(tmp_path))), create=True)
    row, record = recorded(rows()[1], budget(2))
    study = open_study(storage, record, defaults_of(row.spec, row.space))
    study.tell(study.ask(), state=TrialState.FAIL)
    open_study(storage, record, defaults_of(row.spec, row.space))
    open_study(storage, record, defaults_of(row.spec, row.space))
    assert [trial.state.name for trial in study.trials] == ["FAIL", "WAITING"]


def test_an_error_that_is_nobodys_hyper_parameter_stops_and_counts_for_nothing(
    tmp_path: Path, settings: Settings
) -> None:
    given, specs = raising(tmp_path, settings, "FedbenchError('the weights are gone')")
    with pytest.raises(FedbenchError, match="the weights are gone"):
        tuned(tmp_path, given, budget(2), specs)
    (study,) = studies_named(open_storage(storage_url(None, store_uri(str(tmp_path))), create=False), "toy")
    assert not [trial for trial in counted(study) if trial.state is not TrialState.WAITING]


def test_the_median_pruner_waits_for_the_second_half() -> None:
    study = optuna.create_study(direction="maximize", pruner=pruner("median", 10))
    for number in range(5):
        trial = study.ask()
        for step in range(1, 11):
            trial.report(50.0 + number, step)
        study.tell(trial, 50.0)
    hopeless = study.ask()
    decisions = []
    for step in range(1, 7):
        hopeless.report(10.0, step)
        decisions.append(hopeless.should_prune())
    assert decisions == [False, False, False, False, True, True]


def test_a_failed_trial_gives_its_place_back(tmp_path: Path, settings: Settings) -> None:
    (study,) = tuned(tmp_path, settings, budget(2))
    add(study, 2, {}, TrialState.FAIL)
    (again,) = tuned(tmp_path, settings, budget(3))
    assert [trial.state.name for trial in again.trials] == ["COMPLETE", "COMPLETE", "FAIL", "COMPLETE"]


def test_more_trials_extend_a_study_and_fewer_leave_it(tmp_path: Path, settings: Settings) -> None:
    tuned(tmp_path, settings, budget(2))
    (longer,) = tuned(tmp_path, settings, budget(4))
    assert (len(longer.trials), record_of(longer).budget.trials) == (4, 4)
    (same,) = tuned(tmp_path, settings, budget(1))
    assert (len(same.trials), record_of(same).budget.trials) == (4, 4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"budget": budget(seeds=(6,))}, r"another seeds \(\(5,\), now \(6,\)\)"),
        ({"budget": budget(pruner="median")}, "another pruner"),
        ({"budget": budget(validation=0.3)}, "another validation"),
        ({"code_hash": "e"}, "another code_hash"),
        ({"data_hash": "e"}, "another data_hash"),
        ({"weights_hash": "e"}, "another weights_hash"),
        ({"space": ()}, "another space"),
        ({"spec": {**rows()[1].model_dump(mode="json"), "backbone": "convnet"}}, "another backbone"),
    ],
)
def test_trials_under_other_conditions_need_another_study(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    storage = open_storage(storage_url(None, store_uri(str(tmp_path))), create=True)
    open_study(storage, recorded(rows()[1], budget())[1], {})
    with pytest.raises(FedbenchError, match=message):
        open_study(storage, recorded(rows()[1], budget(), **given)[1], {})


def command(folder: Path, data: Path, *arguments: str) -> list[str]:
    (folder / "toy.yaml").write_text(SUITE, encoding="utf-8")
    suite = ["--suite", str(folder / "toy.yaml"), "--store", str(folder / "store"), "--data-dir", str(data)]
    return [
        sys.executable,
        "-c",
        "from fedbench.cli.app import main; main()",
        *arguments,
        *suite,
        "--cache-dir",
        str(folder / "cache"),
    ]


def finished(folder: Path) -> list[FrozenTrial]:
    (study,) = studies_named(open_storage(f"sqlite:///{folder / 'store' / 'studies.db'}", create=False), "toy")
    return [trial for trial in study.trials if trial.state is not TrialState.FAIL]


@pytest.mark.slow
def test_a_study_survives_kill_9_and_two_processes_share_the_rest(tmp_path: Path, data: Path) -> None:
    asked = command(tmp_path, data, "tune", "--method", "fedprox", "--trials", "9", "--jobs", "1", "--set", "rounds=25")
    first = subprocess.Popen(asked, start_new_session=True, stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    for line in first.stdout:
        if "trial 2" in line and line.startswith("start"):
            break
    time.sleep(0.2)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    before = finished(tmp_path)
    assert TrialState.RUNNING in {trial.state for trial in before}
    both = [subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    ends = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], ends
    trials = finished(tmp_path)
    assert len(trials) == 9
    assert {trial.state for trial in trials} <= {TrialState.COMPLETE, TrialState.PRUNED}
    # what was finished is still there, the cut-off trial was tried again with its values, and no values came twice
    kept = {trial.number: trial.params for trial in trials}
    assert all(kept[t.number] == t.params for t in before if t.state is TrialState.COMPLETE)
    cut_off = next(trial for trial in before if trial.state is TrialState.RUNNING)
    assert cut_off.number not in kept
    assert any(cut_off.params.items() <= params.items() for params in kept.values())
    assert len({json.dumps(trial.params, sort_keys=True) for trial in trials}) == 9
    assert len({trial.user_attrs["process"] for trial in trials}) == 3
    assert all("9/9" in out or "complete" in out for out, _ in ends)


# --- what was found, and runs with it


def with_trials(folder: Path, values: Sequence[tuple[float, float, TrialState]], **given: Any) -> optuna.Study:
    """A study of fedprox with handmade trials: μ, objective, state; the first has the row's own values."""
    storage = open_storage(storage_url(None, store_uri(str(folder))), create=True)
    row, record = recorded(rows()[1], budget(len(values), **given))
    study = open_study(storage, record, defaults_of(row.spec, row.space))
    study.ask()
    for number, (mu, value, state) in enumerate(values):
        if number:
            add(study, number, {"fedprox.mu": mu}, state, value)
        else:
            study.tell(0, value if state is TrialState.COMPLETE else None, state)
    return study


@pytest.mark.parametrize(
    ("trials", "best", "trial", "improved"),
    [
        ([(0.01, 60.0, TrialState.COMPLETE), (0.5, 61.0, TrialState.COMPLETE)], 61.0, 1, True),
        ([(0.01, 60.0, TrialState.COMPLETE), (0.5, 59.0, TrialState.COMPLETE)], 60.0, 0, False),
        ([(0.01, 60.0, TrialState.COMPLETE), (0.5, 60.0, TrialState.COMPLETE)], 60.0, 0, False),
        ([(0.01, 0.0, TrialState.PRUNED), (0.5, 59.0, TrialState.COMPLETE)], 59.0, 1, None),
    ],
)
def test_it_says_whether_the_best_beats_the_suites_own_values(
    tmp_path: Path, trials: list[tuple[float, float, TrialState]], best: float, trial: int, improved: bool | None
) -> None:
    result = found(with_trials(tmp_path, trials))
    assert result is not None
    assert (result.best, result.trial, result.improved) == ((best,), trial, improved)


def test_of_a_cost_less_is_better(tmp_path: Path) -> None:
    trials = [(0.01, 60.0, TrialState.COMPLETE), (0.5, 59.0, TrialState.COMPLETE)]
    result = found(with_trials(tmp_path, trials, objectives=("seconds",)))
    assert result is not None
    assert (result.best, result.improved) == ((59.0,), True)


def test_runs_take_the_best_values_and_say_what_they_cost(tmp_path: Path) -> None:
    with_trials(tmp_path, [(0.01, 60.0, TrialState.COMPLETE), (0.5, 61.0, TrialState.COMPLETE)])
    best = best_of(storage_url(None, store_uri(str(tmp_path))), "toy")
    untouched, changed = with_best(rows(), best)
    assert untouched == rows()[0]
    assert changed.params["fedprox"]["mu"] == 0.5
    assert changed.row == "fedprox · clip:embedded (tuned)"
    assert changed.tuning["trial"] == "1"
    assert changed.tuning["trials"] == "2"
    assert changed.run_id not in {spec.run_id for spec in rows()}
    # equal values by tuning still are a row of their own
    same = best["fedprox · clip:embedded"]
    unmoved = replace(same, values={"fedprox.mu": 0.01}, trial=0)
    assert with_best(rows()[1:], {"fedprox · clip:embedded": unmoved})[0].run_id != rows()[1].run_id


def test_a_setting_of_the_command_line_does_not_silently_beat_what_was_tuned(tmp_path: Path) -> None:
    with_trials(tmp_path, [(0.01, 60.0, TrialState.COMPLETE), (0.5, 61.0, TrialState.COMPLETE)])
    best = best_of(storage_url(None, store_uri(str(tmp_path))), "toy")
    with pytest.raises(FedbenchError, match="--set fedprox.mu: the study 'toy' has tuned it"):
        with_best(rows(), best, ["rounds", "fedprox.mu"])
    with pytest.raises(FedbenchError, match="none of these rows was tuned; the study has 'fedprox"):
        with_best(rows()[:1], best)


def test_it_tells_under_which_other_settings_a_row_was_tuned(tmp_path: Path) -> None:
    with_trials(tmp_path, [(0.01, 60.0, TrialState.COMPLETE), (0.5, 61.0, TrialState.COMPLETE)])
    best = best_of(storage_url(None, store_uri(str(tmp_path))), "toy")["fedprox · clip:embedded"]
    spec = rows()[1].model_copy(update={"seed": 3})
    assert tuned_otherwise(spec, best) == []
    longer = spec.model_copy(update={"training": spec.training.model_copy(update={"rounds": 50, "lr": 0.3})})
    assert tuned_otherwise(longer, best) == ["rounds=3"]  # the learning rate was searched
    assert tuned_otherwise(spec.model_copy(update={"dataset": "cifar10"}), best) == ["dataset=imagefolder:toy"]


def test_rows_of_one_tuning_have_one_budget(tmp_path: Path) -> None:
    storage = open_storage(storage_url(None, store_uri(str(tmp_path))), create=True)
    open_study(storage, recorded(rows()[0], budget(2))[1], {})
    with pytest.raises(FedbenchError, match="'fedavg · clip:embedded' was tuned with another objectives"):
        open_study(storage, recorded(rows()[1], budget(2, objectives=("seconds",)))[1], {})
    open_study(storage, recorded(rows()[1], budget(9))[1], {})  # further trials are told, not refused
    open_study(storage, recorded(rows()[1], budget(2, seeds=(9,)), name="other")[1], {})


def test_a_row_whose_name_has_quotes_is_tracked(tmp_path: Path, settings: Settings) -> None:
    quoted = rows()[0].model_copy(update={"label": 'fedavg at CLIP\'s "scale"'})
    (study,) = tuned(tmp_path, settings, budget(1), [quoted])
    assert study.trials[0].state is TrialState.COMPLETE


def test_an_importance_explains_what_leads_to_good_values(tmp_path: Path) -> None:
    storage = open_storage(storage_url(None, store_uri(str(tmp_path))), create=True)
    study = open_study(storage, recorded(rows()[1], budget(40))[1], {})
    generator = np.random.default_rng(0)
    for number in range(1, 61):
        mu, lr = generator.uniform(0, 10, size=2)
        # only the best third depends on μ, and only the worst on the learning rate
        value = 80.0 + mu if mu > 6.6 else 10.0 + lr if lr < 3.3 else 50.0
        add(study, number, {"fedprox.mu": float(mu), "lr": float(lr)}, TrialState.COMPLETE, float(value))
    assert next(iter(importances(study))) == "fedprox.mu"


def test_tuning_looks_at_no_seed_of_the_suite() -> None:
    assert unused_seeds(parse_suite(SUITE, "toy.yaml"), 1) == (1,)
    scales = "scales: {small: {seeds: [4, 2], settings: [{name: a}]}}\n"
    assert unused_seeds(parse_suite(SUITE + scales, "toy.yaml"), 3, (6,)) == (7, 8, 9)


def test_names_and_places_that_are_not_there_are_told(tmp_path: Path) -> None:
    url = storage_url(None, store_uri(str(tmp_path)))
    with pytest.raises(FedbenchError, match="there are no studies"):
        best_of(url, "toy")
    with_trials(tmp_path, [(0.01, 0.0, TrialState.PRUNED)])
    with pytest.raises(FedbenchError, match="'toi'.*toy"):
        best_of(url, "toi")
    with pytest.raises(FedbenchError, match="no finished trial"):
        best_of(url, "toy")
    with pytest.raises(FedbenchError, match="--storage"):
        storage_url(None, "http://127.0.0.1:5000")
    assert storage_url("postgresql://x/y", "http://a") == "postgresql://x/y"
    with pytest.raises(FedbenchError, match="cannot be used"):
        open_storage("nonsense://x", create=True)


def test_objectives_are_metrics_by_name_or_costs() -> None:
    tail, sent = Objective("tail"), Objective("bytes")
    summary = {"tail_accuracy": 3.0, "bytes_up": 2.0, "bytes_down": 5.0, "train_seconds": 9.0}
    assert (tail.of(summary), tail.direction) == (3.0, "maximize")
    assert (sent.of(summary), sent.direction) == (7.0, "minimize")
    assert Objective("seconds").of(summary) == 9.0
    metrics = {"global_accuracy": 1.0, "tail_accuracy": 3.0}
    tail.check(metrics)
    sent.check(metrics)
    Objective("last10").check(metrics)  # of the summary, not of a round
    with pytest.raises(UnknownObjective, match="tial.*tail_accuracy"):
        Objective("tial_accuracy").check(metrics)
