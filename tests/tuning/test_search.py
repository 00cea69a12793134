"""Studies carried out: what a trial measures and never sees; budgets survive crashes and are shared."""

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

import numpy as np
import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState
from PIL import Image

from fedbench.core.spec import RunSpec
from fedbench.runs.engines.engine import InProcess, Policy, Processes, RunQueue
from fedbench.runs.engines.events import Event, RoundFinished, RunFinished
from fedbench.runs.job import run_spec
from fedbench.runs.prepare import Settings
from fedbench.suites.expand import expand
from fedbench.suites.resolve import Overrides
from fedbench.suites.suite import parse_suite
from fedbench.tracking.schema import store_uri
from fedbench.tracking.store import open_store
from fedbench.tuning.results import result_of
from fedbench.tuning.search import RETRIES, SearchFailed, TrialBegan, TrialEnded
from fedbench.tuning.storage import open_storage
from fedbench.tuning.studies import Budget, counted, record_of, studies_named
from fedbench.tuning.tracking import TrialTracking
from fedbench.tuning.trial import claim, trial_specs
from tests.tuning.toys import budget, by_place, children, opened, recorded, search, search_telling, url_of

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
METHODS = '''
"""Each answers `aggregate` as FedAvg does, and in round 2 does something besides."""
import os, signal
from dataclasses import dataclass
from pathlib import Path

import torch

import fedbench.toolkit.fedavg
from fedbench.toolkit.fedavg import average
from fedbench.core.errors import FedbenchError, Unworkable
from fedbench.core.method.hooks import hookimpl

HERE = Path(__file__).parent


class Own(Exception):
    def __init__(self, first, second):
        pass


@dataclass(frozen=True, kw_only=True)
class P:
    """None."""


class Hostile:
    citation, Params, recipe = "nobody", P, {}

    def __init__(self, params):
        pass

    @hookimpl
    def aggregate(self, task):
        answer = average(task)
        if task.round == 2:
            self.spoil(task)
        return answer
'''
SPOILING = {
    "spoils": "fedbench.toolkit.fedavg.average = lambda task: {name: 0 * value for name, value in task.weights.items()}"
    "; torch.set_default_dtype(torch.float64); task.spec.params.setdefault('mut', {})['mu'] = task.round",
    "dies-once": "(HERE / 'died').exists() or ((HERE / 'died').touch(), os.kill(os.getpid(), signal.SIGKILL))",
    "leaves": "os._exit(0)",
    "unworkable": "raise Unworkable('too large')",
    "unworkable-on-9": "task.spec.seed == 9 and (_ for _ in ()).throw(Unworkable('too large'))",
    "refused": "raise FedbenchError('the weights are gone')",
    "broken": "raise Own(1, 2)",
    "exits": "raise SystemExit(3)",
}


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


@pytest.fixture
def hostile(tmp_path: Path, settings: Settings) -> Settings:
    """With the methods of `SPOILING`."""
    classes = [
        f"class C{number}(Hostile):\n    name = {name!r}\n\n    def spoil(self, task):\n        {code}\n"
        for number, (name, code) in enumerate(SPOILING.items())
    ]
    (tmp_path / "hostile.py").write_text("\n\n".join([METHODS, *classes]))
    return replace(settings, plugin_files=(tmp_path / "hostile.py",))


def rows(*methods: str, plugins: Sequence[Path] = ()) -> list[RunSpec]:
    return expand(parse_suite(SUITE, "toy.yaml"), Overrides(methods=methods, plugin_files=tuple(plugins)))


def tuned(
    folder: Path, settings: Settings, spent: Budget, specs: Sequence[RunSpec] | None = None, workers: int = 0
) -> list[optuna.Study]:
    """The studies of the rows, after one command has spent their budgets: in this process, or in ``workers``."""
    studied = [recorded(spec, spent, plugins=settings.plugin_files) for spec in specs or rows()[1:]]
    studies = opened(folder, *studied)
    search(folder, settings, *studied, engine=Processes(settings, workers) if workers else None)
    return studies


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
    assert by_place(honest) == by_place(other)
    # and the poison is strong: on the test split the same run scores worse by far
    scores = [run_spec(rows()[1], given).summary["global_accuracy"] for given in (settings, poisoned)]
    assert scores[0] - scores[1] > 20


def test_one_worker_gives_the_same_study_again_whatever_the_engine(tmp_path: Path, settings: Settings) -> None:
    spent = budget(7, pruner="halving", seeds=(5, 9))
    (here,) = tuned(tmp_path / "a", settings, spent)
    (there,) = tuned(tmp_path / "b", settings, spent, workers=1)
    assert [trial.number for trial in here.trials] == [trial.number for trial in there.trials] == list(range(7))
    assert by_place(here) == by_place(there)
    pruned = [trial for trial in here.trials if trial.state is TrialState.PRUNED]
    assert pruned and len(pruned) < 7
    assert all("pruned at round" in trial.user_attrs["reason"] for trial in pruned)
    assert all(trial.last_step is not None and trial.last_step < 3 for trial in pruned)


def test_a_trial_that_diverges_counts_as_pruned_with_the_reason(tmp_path: Path, settings: Settings) -> None:
    wild = rows()[0].model_copy(update={"training": rows()[0].training.model_copy(update={"lr": 100.0, "rounds": 6})})
    wild = wild.model_copy(update={"backbone": "convnet"})
    (study,) = tuned(tmp_path, settings, budget(1), [wild])
    (trial,) = study.trials
    assert trial.state is TrialState.PRUNED
    assert "diverged" in trial.user_attrs["reason"]
    assert result_of(study) is None


@pytest.mark.parametrize("seeds", [(5, 9), (9, 5)])
def test_what_is_reported_of_a_trial_that_fails_depends_on_no_order_of_its_runs(
    tmp_path: Path, hostile: Settings, seeds: tuple[int, int]
) -> None:
    (study,) = tuned(tmp_path, hostile, budget(1, seeds=seeds), rows("unworkable-on-9", plugins=hostile.plugin_files))
    (trial,) = study.trials
    assert (trial.state, trial.user_attrs["reason"]) == (TrialState.PRUNED, "too large")
    assert list(trial.intermediate_values) == [1]


def test_several_objectives_give_a_front_and_the_first_decides_the_best(tmp_path: Path, settings: Settings) -> None:
    spent = budget(4, objectives=("worst_client", "bytes"))
    (study,) = tuned(tmp_path, settings, spent, [rows()[0]])
    assert [d.name for d in study.directions] == ["MAXIMIZE", "MINIMIZE"]
    result = result_of(study)
    assert result is not None
    assert result.best[0] == max(trial.values[0] for trial in study.trials)
    sent = run_spec(trial_specs(rows()[0], {}, spent)[0], settings).summary
    assert {trial.values[1] for trial in study.trials} == {sent["bytes_up"] + sent["bytes_down"]}


def test_every_row_gets_the_same_budget_and_the_one_with_the_fewest_trials_is_next(
    tmp_path: Path, settings: Settings
) -> None:
    studied = [recorded(spec, budget(2)) for spec in rows()]
    studies = opened(tmp_path, *studied)
    events = search(tmp_path, settings, *studied)
    began = [event.row.spec.method for event in events if isinstance(event, TrialBegan)]
    assert began == ["fedavg", "fedprox", "fedavg", "fedprox"]
    assert [len(counted(study)) for study in studies] == [2, 2]
    assert len({str(record_of(study).budget) for study in studies}) == 1
    assert [trial.params["lr"] for study in studies for trial in study.trials][::2] == [0.01, 0.01]


def test_an_unknown_objective_stops_before_anything_is_trained(tmp_path: Path, settings: Settings) -> None:
    with pytest.raises(SearchFailed, match=r"'tail'.*global_accuracy"):
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


def test_a_row_whose_name_has_quotes_is_tracked(tmp_path: Path, settings: Settings) -> None:
    quoted = rows()[0].model_copy(update={"label": 'fedavg at CLIP\'s "scale"'})
    (study,) = tuned(tmp_path, settings, budget(1), [quoted])
    assert study.trials[0].state is TrialState.COMPLETE


def test_a_failed_trial_gives_its_place_back_and_more_trials_extend_a_study(tmp_path: Path, settings: Settings) -> None:
    (study,) = tuned(tmp_path, settings, budget(2))
    study.add_trial(optuna.create_trial(state=TrialState.FAIL))
    (longer,) = tuned(tmp_path, settings, budget(4))
    assert [trial.state.name for trial in longer.trials] == ["COMPLETE", "COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]
    assert record_of(longer).budget.trials == 4
    (same,) = tuned(tmp_path, settings, budget(1))  # fewer leave it
    assert (len(same.trials), record_of(same).budget.trials) == (5, 4)


# --- runs that fail, die or are given up


@pytest.mark.slow
def test_what_runs_do_to_their_process_meets_no_other_trial(tmp_path: Path, hostile: Settings) -> None:
    methods = ("spoils", "dies-once", "leaves", "fedavg")
    files = hostile.plugin_files
    studied = [recorded(spec, budget(3), plugins=files) for spec in rows(*methods, plugins=files)]
    spoiled, once, leaving, fedavg = opened(tmp_path / "a", *studied)
    events = search(tmp_path / "a", hostile, *studied, engine=Processes(hostile, 1))
    assert (tmp_path / "died").exists()
    calm, alone = tuned(tmp_path / "b", hostile, budget(3), [studied[1][0].spec, studied[3][0].spec], workers=1)

    assert by_place(fedavg) == by_place(alone)
    assert len({trial.value for trial in alone.trials}) > 1
    assert [trial.state for trial in spoiled.trials] == [TrialState.COMPLETE] * 3
    # the one whose process was killed was tried again
    assert by_place(once) == by_place(calm)
    # values whose process always ends are given up
    assert [trial.state for trial in leaving.trials] == [TrialState.PRUNED] * 3
    told = [event.reason for event in events if isinstance(event, TrialEnded) and event.row.spec.method == "leaves"]
    assert told == [trial.user_attrs["reason"] for trial in leaving.trials]
    assert set(told) == {f"its process ended with exit code 0 (attempt {RETRIES + 1} of {RETRIES + 1})"}
    assert {status for _, status in children(tmp_path / "a")} == {"FINISHED"}


@pytest.mark.parametrize(
    ("method", "message", "has_details"),
    [("refused", "the weights are gone", False), ("broken", "Own", True), ("exits", "SystemExit: 3", True)],
)
def test_an_error_that_is_nobodys_hyper_parameter_stops_and_counts_for_nothing(
    tmp_path: Path, hostile: Settings, method: str, message: str, has_details: bool
) -> None:
    with pytest.raises(SearchFailed) as caught:
        tuned(tmp_path, hostile, budget(2), rows(method, plugins=hostile.plugin_files))
    assert caught.value.reason.startswith(message)
    assert ("in spoil" in caught.value.details) == has_details
    assert children(tmp_path) == [("0", "FAILED")]
    (study,) = studies_named(open_storage(url_of(tmp_path), create=False), "toy")
    assert counted(study) == []


def test_a_run_that_was_left_under_way_has_ended_before_the_next_begins(settings: Settings) -> None:
    first, second = trial_specs(rows()[0], {}, budget(seeds=(5, 9)))
    interrupted, after = InProcess(settings), InProcess(settings)
    interrupted.begin(first)
    interrupted.close()
    after.begin(second)
    assert interrupted._thread is not None and not interrupted._thread.is_alive()
    while not any(isinstance(event, RunFinished) for event in after.wait(60)):
        pass


def test_a_run_that_is_given_up_is_heard_no_more_and_the_next_goes_on_in_the_same_process(settings: Settings) -> None:
    specs = trial_specs(rows()[0], {}, budget(seeds=(5, 9)))
    for engine in (InProcess(settings), Processes(settings, 1)):
        schedule = RunQueue(specs, engine, Policy())
        heard: list[Event] = []
        processes = []
        for event in schedule.events():
            heard.append(event)
            if isinstance(engine, Processes):
                processes.append(engine._workers[0].process)
            if isinstance(event, RoundFinished) and (event.spec.seed, event.record.round) == (5, 1):
                schedule.drop(specs[:1])
        engine.close()
        rounds = [(event.spec.seed, event.record.round) for event in heard if isinstance(event, RoundFinished)]
        assert rounds == [(5, 0), (5, 1), (9, 0), (9, 1), (9, 2), (9, 3)]
        assert [event.spec.seed for event in heard if isinstance(event, RunFinished)] == [9]
        assert len(set(map(id, processes))) <= 1


# --- commands that die, and share a study


def short_of_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that shows no sign of life for a second is dead."""
    for module in ("fedbench.tuning.storage", "fedbench.tuning.search"):
        monkeypatch.setattr(f"{module}.GRACE", 1)


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
            TrialTracking(store_uri(str(tmp_path)), "toy", print).began(dead, dead.params)
            dead.report(99.0, 1)  # which no other trial could beat, if it counted
            study._storage.set_trial_system_attr(dead._trial_id, "completed_rung_0", 99.0)
        elif drawn == 1:
            dead.suggest_float("lr", 1e-4, 1.0, log=True)
    (disturbed,) = tuned(tmp_path, settings, budget(8, pruner="halving"))
    assert [t.number for t in disturbed.trials if t.state is TrialState.FAIL] == [3, 7]
    assert by_place(disturbed) == by_place(undisturbed)
    kept = {(str(trial.number), "FINISHED") for trial in counted(disturbed)}
    assert set(children(tmp_path)) == kept | ({("3", "KILLED"), ("7", "KILLED")} if drawn == 2 else set())


def test_what_ctrl_c_cuts_off_is_handed_back_at_once_and_tried_again_in_its_place(
    tmp_path: Path, settings: Settings
) -> None:
    studied = recorded(rows()[1], budget(3))
    (study,) = opened(tmp_path, studied)

    def press(event: object) -> None:
        if isinstance(event, TrialBegan) and event.number == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search_telling(press, tmp_path, settings, studied)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "FAIL", "WAITING"]
    (resumed,), (alone,) = tuned(tmp_path, settings, budget(3)), tuned(tmp_path / "alone", settings, budget(3))
    assert by_place(resumed) == by_place(alone)


def test_a_trial_that_others_have_taken_over_is_left_to_them(tmp_path: Path, settings: Settings) -> None:
    studied = recorded(rows()[1], budget(2))
    (study,) = opened(tmp_path, studied)
    events: list[object] = []

    def take_over(event: object) -> None:
        events.append(event)
        if isinstance(event, TrialBegan) and event.number == 0:
            study.tell(0, state=TrialState.FAIL)
            study.add_trial(optuna.create_trial(state=TrialState.COMPLETE, value=7.0))

    search_telling(take_over, tmp_path, settings, studied)
    assert [trial.state.name for trial in study.trials] == ["FAIL", "COMPLETE", "COMPLETE"]
    assert [event.number for event in events if isinstance(event, TrialEnded)] == [2]


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


def test_rows_that_draw_the_same_values_run_one_after_the_other_where_their_runs_are_one(
    tmp_path: Path, settings: Settings
) -> None:
    row = rows()[1]
    twins = [row, row.model_copy(update={"label": "again", "row": "again"})]
    assert len({spec.run_id for spec in twins}) == 1
    studies = tuned(tmp_path, settings, budget(2, seeds=(5, 9), pruner="none"), twins, workers=2)
    first, second = map(by_place, studies)
    assert [len(first), len(second)] == [2, 2] and first == second
