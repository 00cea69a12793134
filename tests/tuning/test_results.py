"""What a study found: what chooses and confirms its values, runs with them, its conditions, the gap to test data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd
import pytest
from optuna.trial import TrialState

from fedbench.core.errors import FedbenchError
from fedbench.core.spec import BUDGET, RunSpec
from fedbench.runs.job import run_spec
from fedbench.runs.prepare import Settings
from fedbench.suites.expand import expand
from fedbench.suites.resolve import Overrides
from fedbench.suites.suite import parse_suite
from fedbench.tracking.tags import DEFAULTS, flat_params
from fedbench.tuning.figures import importances
from fedbench.tuning.objectives import Objective, UnknownObjective
from fedbench.tuning.results import (
    StudyResult,
    best_of,
    chosen,
    due,
    enqueue,
    finalists,
    open_further,
    result_of,
    run_of,
    tuned_otherwise,
    with_best,
    with_listed,
)
from fedbench.tuning.search import Confirmed, TrialEnded
from fedbench.tuning.space import defaults_of
from fedbench.tuning.storage import open_storage, storage_url
from fedbench.tuning.studies import Budget, open_study, record_of
from fedbench.tuning.trial import claim, trial_specs
from fedbench.workflow.screens import screen_for
from fedbench.workflow.studies import SEEDS, Wanted, budget_of, unused_seeds
from fedbench_boards.gaps import gap_of, write
from tests.tuning import toys
from tests.tuning.toys import budget, recorded

SUITE = """
name: toy
dataset: "embedded?train=240&test=40"
scenario: {imbalance: none, partition: iid, clients: 2, participation: 1.0}
training: {rounds: 1, local_epochs: 1, batch_size: 32, lr: 0.01}
seeds: [0, 4]
rows:
  - method: fedavg
  - method: fedprox
"""
FLOAT = optuna.distributions.FloatDistribution(0.0, 10.0)


def rows() -> list[RunSpec]:
    return expand(parse_suite(SUITE, "toy.yaml"), Overrides(seeds=(0,)))


def nested(trials: int = 4, **given: Any) -> Budget:
    return budget(trials, **{"seeds": (5, 6, 7), "runoff": (8,), "confirming": (9,), **given})


def url_of(folder: Path) -> str:
    """One database for all tests, since a new one takes long."""
    return storage_url(str(folder.parent / "results.db"), "")


def opened(folder: Path, spent: Budget) -> tuple[optuna.Study, optuna.Study | None]:
    """The study of fedprox that is called after ``folder``, and its further one."""
    storage = open_storage(url_of(folder), create=True)
    row, record = recorded(rows()[1], spent, folder.name)
    return open_study(storage, record, defaults_of(row.spec, row.space)), open_further(storage, record)


def with_values(folder: Path, values: list[float], **given: Any) -> tuple[optuna.Study, optuna.Study]:
    """A study whose trials have these ``values``, μ = 0.01 (the suite's), 1, 2, ...; and its further one."""
    study, further = opened(folder, nested(len(values), **given))
    assert further is not None
    study.tell(study.ask(), values[0])
    for number, value in enumerate(values[1:], 1):
        study.add_trial(
            optuna.create_trial(params={"fedprox.mu": float(number)}, distributions={"fedprox.mu": FLOAT}, value=value)
        )
    return study, further


def settle(study: optuna.Study, further: optuna.Study, value: float | None) -> tuple[int, str, tuple[int, ...]]:
    """End the next further run with ``value``, None for values that do not work; what it was."""
    enqueue(further, due(study)[0])
    trial = further.ask()
    run = run_of(trial)
    assert run is not None
    further.tell(trial, value, TrialState.PRUNED if value is None else TrialState.COMPLETE)
    return run.number, run.step, run.seeds


def found(study: optuna.Study) -> StudyResult:
    result = result_of(study)
    assert result is not None
    return result


# --- what chooses, and what confirms


@pytest.mark.parametrize(
    ("runoff", "choice", "improved"),
    [
        ([60.0, 60.0, 60.0], 2, True),  # (3 * 66 + 60) / 4 is the best
        ([40.0, 60.0, 60.0], 3, True),  # 59.5, 63.0, 60.75
        ([None, 40.0, 60.0], 0, False),  # what does not work there is out: 58.0, 60.75
        ([None, None, None], 2, True),  # nothing is known: by the tuning seeds
    ],
)
def test_the_best_three_are_run_off_and_the_mean_over_all_seeds_that_chose_decides(
    tmp_path: Path, runoff: list[float | None], choice: int, improved: bool
) -> None:
    study, further = with_values(tmp_path, [61.0, 55.0, 66.0, 64.0])
    assert [trial.number for trial in finalists(study)] == [2, 3, 0]
    for number, value in zip((2, 3, 0), runoff, strict=True):
        before = chosen(study)
        assert before is not None and before.number == 2  # until the run-off is over
        assert settle(study, further, value) == (number, "run-off", (8,))
    assert settle(study, further, 50.0) == (choice, "confirmation", (9,))
    assert due(study) == []
    result = found(study)
    assert (result.trial, result.improved, result.confirmed) == (choice, improved, (50.0,))
    assert result.best == ([61.0, 55.0, 66.0, 64.0][choice],)
    best = best_of(url_of(tmp_path), tmp_path.name)
    (run,) = with_best(rows()[1:], best)
    assert run.params["fedprox"]["mu"] == (choice or 0.01)
    tags = {name: run.tuning[name] for name in ("trial", "seeds", "run-off seeds", "confirming seeds")}
    assert tags == {"trial": str(choice), "seeds": "5 6 7", "run-off seeds": "8", "confirming seeds": "9"}


@pytest.mark.parametrize("value", [0.0, 100.0, None])
def test_the_confirmation_is_of_seeds_that_chose_nothing(tmp_path: Path, value: float | None) -> None:
    study, further = with_values(tmp_path, [61.0, 66.0])
    settle(study, further, 60.0)
    settle(study, further, 60.0)
    before = found(study)
    assert before.confirmed is None
    settle(study, further, value)
    after = found(study)
    assert (after.trial, after.values, after.best, after.improved) == (1, before.values, before.best, True)
    assert after.confirmed == (None if value is None else (value,))


def test_of_a_cost_the_least_goes_on(tmp_path: Path) -> None:
    study, _ = with_values(tmp_path, [61.0, 55.0, 66.0, 64.0], objectives=("seconds",))
    assert [trial.number for trial in finalists(study)] == [1, 0, 3]
    # of a metric that is not installed here the study knows which way is better
    record = record_of(study)
    absent = replace(record, budget=replace(record.budget, objectives=("absent",)))
    study.set_user_attr("fedbench", absent.dumped())
    assert [trial.number for trial in finalists(study)] == [1, 0, 3]


def test_a_further_run_that_was_cut_off_is_due_again_and_one_that_waits_or_runs_is_not(tmp_path: Path) -> None:
    study, further = with_values(tmp_path, [61.0, 66.0])
    assert [run.number for run in due(study)] == [1, 0]
    for run in due(study):
        enqueue(further, run)
    assert due(study) == []
    first, second = further.ask(), further.ask()
    assert [run and run.number for run in map(run_of, (first, second))] == [1, 0]
    assert due(study) == []
    further.tell(first, state=TrialState.FAIL)
    assert [run.number for run in due(study)] == [1]
    further.tell(second, 60.0)
    assert settle(study, further, 60.0) == (1, "run-off", (8,))
    assert [(run.number, run.step) for run in due(study)] == [(1, "confirmation")]


def test_more_trials_run_only_what_is_missing(tmp_path: Path) -> None:
    study, further = with_values(tmp_path, [61.0, 66.0])
    for value in (60.0, 60.0, 50.0):
        settle(study, further, value)
    study.add_trial(optuna.create_trial(params={"fedprox.mu": 5.0}, distributions={"fedprox.mu": FLOAT}, value=70.0))
    assert [(run.number, run.step) for run in due(study)] == [(2, "run-off")]
    settle(study, further, 0.0)
    assert due(study) == []  # the choice of before stays, and is confirmed
    assert (found(study).trial, found(study).confirmed) == (1, (50.0,))


# --- carried out


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return Settings(tmp_path_factory.mktemp("data"), tmp_path_factory.mktemp("cache"))


def worked(folder: Path, settings: Settings, spent: Budget) -> tuple[optuna.Study, list[Any]]:
    """The study of fedprox after one command has carried it out, and what that told."""
    studied = recorded(rows()[1], spent)
    (study,) = toys.opened(folder, studied)
    return study, toys.search(folder, settings, studied)


def by_hand(spec: RunSpec, params: dict[str, Any], budget: Budget, seeds: tuple[int, ...], settings: Settings) -> float:
    runs = trial_specs(spec, params, replace(budget, seeds=seeds))
    return sum(run_spec(run, settings).summary["global_accuracy"] for run in runs) / len(runs)


def test_a_command_carries_out_trials_run_off_and_confirmation_and_a_second_one_nothing(
    tmp_path: Path, settings: Settings
) -> None:
    spent = nested(2, seeds=(5, 6))
    study, events = worked(tmp_path, settings, spent)
    assert len(study.trials) == sum(isinstance(event, TrialEnded) for event in events) == 2  # the budget, not more
    further = [event for event in events if isinstance(event, Confirmed)]
    assert [(event.step, event.seeds) for event in further] == [("run-off", (8,))] * 2 + [("confirmation", (9,))]
    result = found(study)
    assert further[-1].number == result.trial
    for seeds, value in (((5, 6), result.best), ((9,), result.confirmed)):
        assert value == (pytest.approx(by_hand(rows()[1], result.values, spent, seeds, settings)),)
    again, events = worked(tmp_path, settings, spent)
    assert (events, found(again)) == ([], result)


def test_further_seeds_change_no_trial(tmp_path: Path) -> None:
    drawn = []
    for further in ({}, {"runoff": (), "confirming": ()}):
        spent = nested(8, seeds=(5,), **further)
        study, beside = opened(tmp_path / str(len(drawn)), spent)
        row, _ = recorded(rows()[1], spent)
        study.tell(study.ask(), 50.0)
        for number in range(6):  # random ones, then those that are modelled on the earlier
            trial = study.ask()
            drawn.append(claim(trial, row, spent))
            study.tell(trial, 51.0 + number)
            if beside is not None:
                beside.tell(beside.ask(), 99.0)
        assert trial_specs(row.spec, {}, spent)[0].seed == 5
    assert drawn[:6] == drawn[6:]


def test_a_study_of_one_seed_from_before_is_read_and_goes_on(tmp_path: Path) -> None:
    spent = nested(2, seeds=(5,), runoff=(), confirming=())
    study, further = opened(tmp_path, spent)
    assert further is None
    old = json.loads(record_of(study).dumped())
    for name in ("runoff", "confirming"):
        del old["budget"][name]
    study.set_user_attr("fedbench", json.dumps(old))
    assert record_of(study).budget == spent
    study.tell(study.ask(), 61.0)
    result = found(study)
    assert (result.trial, result.best, result.confirmed, due(study)) == (0, (61.0,), None, [])
    assert set(spent.as_tags()) & {"run-off seeds", "confirming seeds"} == set()
    opened(tmp_path, spent)
    with pytest.raises(FedbenchError, match=r"another seeds.*go on with this one by --seed 5 --confirm 0"):
        opened(tmp_path, nested(2))


# --- what was found, and runs with it


def with_trials(folder: Path, values: Sequence[tuple[float, float, TrialState]], **given: Any) -> optuna.Study:
    """A study of fedprox with handmade trials: μ, objective, state; the first has the row's own values."""
    study, _ = opened(folder, budget(len(values), **given))
    for mu, value, state in values:
        measured = value if state is TrialState.COMPLETE else None
        if study.trials[0].state is TrialState.WAITING:
            study.tell(study.ask(), measured, state)
        else:
            study.add_trial(
                optuna.create_trial(
                    state=state, params={"fedprox.mu": mu}, distributions={"fedprox.mu": FLOAT}, value=measured
                )
            )
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
    assert (result.best, result.trial, result.improved) == ((best,), trial, improved)


def test_of_a_cost_less_is_better(tmp_path: Path) -> None:
    trials = [(0.01, 60.0, TrialState.COMPLETE), (0.5, 59.0, TrialState.COMPLETE)]
    result = found(with_trials(tmp_path, trials, objectives=("seconds",)))
    assert (result.best, result.improved) == ((59.0,), True)


def test_runs_take_the_best_values_and_say_what_they_cost(tmp_path: Path) -> None:
    with_trials(tmp_path, [(0.01, 60.0, TrialState.COMPLETE), (0.5, 61.0, TrialState.COMPLETE)])
    best = best_of(url_of(tmp_path), tmp_path.name)
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
    best = best_of(url_of(tmp_path), tmp_path.name)
    with pytest.raises(FedbenchError, match="--set fedprox.mu: the study '.*' has tuned it"):
        with_best(rows(), best, ["rounds", "fedprox.mu"])
    with pytest.raises(FedbenchError, match="none of these rows was tuned; the study has 'fedprox"):
        with_best(rows()[:1], best)


def test_it_tells_under_which_other_settings_a_row_was_tuned(tmp_path: Path) -> None:
    with_trials(tmp_path, [(0.01, 60.0, TrialState.COMPLETE), (0.5, 61.0, TrialState.COMPLETE)])
    best = best_of(url_of(tmp_path), tmp_path.name)["fedprox · clip:embedded"]
    spec = rows()[1].model_copy(update={"seed": 3})
    assert tuned_otherwise(spec, best) == []
    longer = spec.model_copy(update={"training": spec.training.model_copy(update={"rounds": 50, "lr": 0.3})})
    assert tuned_otherwise(longer, best) == ["rounds=1"]  # the learning rate was searched
    assert tuned_otherwise(spec.model_copy(update={"dataset": "cifar10"}), best) == [
        "dataset=embedded?train=240&test=40"
    ]


def test_rows_of_one_tuning_have_one_budget(tmp_path: Path) -> None:
    storage = open_storage(toys.url_of(tmp_path), create=True)
    open_study(storage, recorded(rows()[0], budget(2))[1], {})
    with pytest.raises(FedbenchError, match="'fedavg · clip:embedded' was tuned with another objectives"):
        open_study(storage, recorded(rows()[1], budget(2, objectives=("seconds",)))[1], {})
    open_study(storage, recorded(rows()[1], budget(9))[1], {})  # further trials are told, not refused
    open_study(storage, recorded(rows()[1], budget(2, seeds=(9,)), name="other")[1], {})


def test_a_study_whose_trials_all_failed_takes_other_objectives(tmp_path: Path) -> None:
    study, _ = opened(tmp_path, budget(1, objectives=("bytes",)))
    study.tell(study.ask(), state=TrialState.FAIL)
    study, _ = opened(tmp_path, budget(1, objectives=("global_accuracy",)))
    assert [direction.name for direction in study.directions] == ["MAXIMIZE"]


def test_a_study_of_another_version_is_told_and_stops_no_other_tuning(tmp_path: Path) -> None:
    study, _ = opened(tmp_path / "old", budget(1))
    old = json.loads(record_of(study).dumped())
    old["budget"]["gone"] = 1
    study.set_user_attr("fedbench", json.dumps(old))
    with pytest.raises(FedbenchError, match="was made by another version of fedbench"):
        record_of(study)
    opened(tmp_path / "new", budget(2))


def test_an_importance_explains_what_leads_to_good_values(tmp_path: Path) -> None:
    storage = open_storage(toys.url_of(tmp_path), create=True)
    study = open_study(storage, recorded(rows()[1], budget(40))[1], {})
    generator = np.random.default_rng(0)
    for _ in range(60):
        mu, lr = generator.uniform(0, 10, size=2)
        # only the best third depends on μ, and only the worst on the learning rate
        value = 80.0 + mu if mu > 6.6 else 10.0 + lr if lr < 3.3 else 50.0
        values = {"fedprox.mu": float(mu), "lr": float(lr)}
        study.add_trial(
            optuna.create_trial(params=values, distributions=dict.fromkeys(values, FLOAT), value=float(value))
        )
    assert next(iter(importances(study))) == "fedprox.mu"


def test_tuning_looks_at_no_seed_of_the_suite() -> None:
    assert unused_seeds(parse_suite(SUITE, "toy.yaml"), 1) == (5,)
    scales = "scales: {small: {seeds: [4, 2], settings: [{name: a}]}}\n"
    assert unused_seeds(parse_suite(SUITE + scales, "toy.yaml"), 3, (6,)) == (7, 8, 9)


def test_names_and_places_that_are_not_there_are_told(tmp_path: Path) -> None:
    folder = tmp_path / "toy"
    with pytest.raises(FedbenchError, match="there are no studies"):
        best_of(url_of(folder), "toy")
    with_trials(folder, [(0.01, 0.0, TrialState.PRUNED)])
    with pytest.raises(FedbenchError, match="'toi'.*toy"):
        best_of(url_of(folder), "toi")
    with pytest.raises(FedbenchError, match="no finished trial"):
        best_of(url_of(folder), "toy")
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


# --- conditions


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
    storage = open_storage(toys.url_of(tmp_path), create=True)
    open_study(storage, recorded(rows()[1], budget())[1], {})
    with pytest.raises(FedbenchError, match=message):
        open_study(storage, recorded(rows()[1], budget(), **given)[1], {})


# --- seeds


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (Wanted(), ((5, 6, 7), (8,), (9,))),
        (Wanted(confirm=2), ((5, 6, 7), (8, 9), (10, 11))),
        (Wanted(seeds=(3,)), ((3,), (), ())),
        (Wanted(seeds=(3,), confirm=1), ((3,), (5,), (6,))),
        (Wanted(seeds=(20, 1)), ((1, 20), (21,), (22,))),
        (Wanted(confirm=0), ((5, 6, 7), (), ())),
    ],
)
def test_every_choice_has_seeds_of_its_own_and_none_of_the_suites(wanted: Wanted, expected: tuple[Any, ...]) -> None:
    suite = parse_suite(SUITE, "toy.yaml")
    budget = budget_of(suite, rows(), (), wanted, screen_for(False))
    assert (budget.seeds, budget.runoff, budget.confirming) == expected
    assert len(set(budget.every_seed)) == len(budget.every_seed)
    if not wanted.seeds:
        assert not {0, 4} & set(budget.every_seed)
    assert unused_seeds(suite, SEEDS, (9,)) == (10, 11, 12)


@pytest.mark.parametrize("confirm", [-1, True, 1.5])
def test_a_number_of_seeds_that_is_none_is_refused(confirm: Any) -> None:
    with pytest.raises(FedbenchError, match="no number of seeds"):
        budget_of(parse_suite(SUITE, "toy.yaml"), rows(), (), Wanted(confirm=confirm), screen_for(False))


# --- the gap


def line_of(seed: int, accuracy: float) -> dict[str, Any]:
    """A line of the store: a run with the values of trial 1."""
    spec = rows()[1]
    params = DEFAULTS | flat_params(spec)
    scenario = {k.removeprefix("scenario."): v for k, v in params.items() if k.startswith("scenario.")}
    line = {"tuned": "toy", "setting": "", "scale": "", "dataset": spec.dataset, "row": f"{spec.row} (tuned)"}
    line |= {"tuning": '{"trial": "1"}', "scenario_settings": json.dumps(scenario)}
    line |= {name: params[f"training.{name}"] for name in BUDGET}
    return {**line, "seed": seed, "final/global_accuracy": accuracy}


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 5},  # the trials had it
        {"seed": 9},  # the confirmation had it
        {"tuned": ""},
        {"tuned": "another"},
        {"tuning": '{"trial": "11"}'},  # of an earlier choice
        {"rounds": "7"},
        {"dataset": "cifar10"},
        {"row": "fedavg · clip:embedded (tuned)"},
        {"scenario_settings": '{"clients": "3"}'},
    ],
)
def test_the_gap_is_validation_minus_test_over_the_runs_with_the_chosen_values(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    _, record = recorded(rows()[1], nested(2))
    result = StudyResult(record, {"fedprox.mu": 1.0}, 1, (66.0,), (61.0,), {"complete": 2}, True, confirmed=(58.5,))
    runs = pd.DataFrame([line_of(0, 50.0), line_of(4, 55.0), line_of(1, 0.0) | other])
    gap = gap_of(result, runs)
    assert (gap.validation, gap.confirmation, gap.test, gap.seeds, gap.gap) == (66.0, 58.5, 52.5, (0, 4), 13.5)
    table = pd.read_csv(write([gap], tmp_path))
    assert table[["validation", "confirmation", "test", "gap"]].to_numpy().tolist() == [[66.0, 58.5, 52.5, 13.5]]
    assert table["seeds"].tolist() == ["0 4"]
    nothing = gap_of(result, pd.DataFrame())
    assert (nothing.confirmation, nothing.test, nothing.gap) == (58.5, None, None)
    assert gap_of(result, runs.iloc[2:]).test is None


def test_values_of_a_file_are_those_of_its_setting_and_row(tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text("setting,row,lr,fedprox.mu,trials\n,fedprox · clip:embedded,0.5,,3\n")
    untouched, changed = with_listed(rows(), file)
    assert untouched == rows()[0]
    assert (changed.training.lr, changed.params, changed.tuned) == (0.5, rows()[1].params, "mine")
    assert changed.tuning == {"study": "mine", "trials": "3"} and changed.row.endswith("(tuned)")
    file.write_text("setting,row,fedprox.mu\n,fedprox · clip:embedded,0.25\n")
    assert with_listed(rows(), file)[1].params["fedprox"]["mu"] == 0.25


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("row,lr\nfedavg · clip:embedded,1\n", "needs the columns setting and row"),
        ("setting,row,lr\n,a,1\n,a,2\n", "every pair of them once"),
        ("setting,row,lr\n,fedavg,1\n", "has none of these rows"),
        ("setting,row,lr\n,fedprox · clip:embedded,fast\n", "lr=fast: .*valid number"),
        ("setting,row,lr\n,fedprox · clip:embedded,nan\n", "lr=nan: .*less than or equal to 100"),
        ("setting,row,lr\n,fedprox · clip:embedded,-1\n", "lr=-1: .*greater than 0"),
        ("setting,row,fedprox.mu\n,fedprox · clip:embedded,-5\n", "fedprox.mu='-5' is out of range"),
        ("setting,row,mu\n,fedprox · clip:embedded,1\n", "unknown setting of"),
        ("setting,row,rounds\n,fedprox · clip:embedded,1\n", "leave one of them out"),
        (None, "can't be read"),
    ],
)
def test_a_file_of_values_that_does_not_fit_is_refused(tmp_path, text, says):
    file = tmp_path / "mine.csv"
    if text is not None:
        file.write_text(text)
    with pytest.raises(FedbenchError, match=says):
        with_listed(rows(), file, ["rounds"])
