"""One trial: values that were tried before, its place in the budget, who takes it, what prunes it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState

from fedbench.core.spec import RunSpec
from fedbench.tuning.storage import open_storage
from fedbench.tuning.trial import Surplus, claim, pruner, twin_of
from tests.tuning.toys import budget, opened, recorded


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
    trial = asked(study, lr=1.0)
    twin = twin_of(trial)
    assert twin is not None and twin.values == [7.0]
    assert trial.user_attrs["same_as"] == 0
    assert twin_of(asked(study, lr=2.0)) is None


def test_values_that_are_being_tried_or_were_queued_twice_take_no_place() -> None:
    study = optuna.create_study(direction="maximize")
    asked(study, lr=1.0)
    with pytest.raises(Surplus, match="trial 0 tries the same"):
        twin_of(asked(study, lr=1.0))
    add(study, 2, {"lr": 3.0}, TrialState.COMPLETE, 7.0)
    study.enqueue_trial({"lr": 3.0})
    with pytest.raises(Surplus, match="trial 2 tries the same"):
        twin_of(asked(study, lr=3.0))


def test_a_pruned_twin_is_pruned_again_with_its_reports() -> None:
    study = optuna.create_study(direction="maximize")
    first = asked(study, lr=1.0)
    first.report(5.0, 1)
    study.tell(first, state=TrialState.PRUNED)
    twin = twin_of(asked(study, lr=1.0))
    assert twin is not None and twin.state is TrialState.PRUNED
    assert study.trials[1].intermediate_values == {1: 5.0}


def test_a_trial_beyond_the_budget_is_surplus_whoever_runs_the_others() -> None:
    study = optuna.create_study()
    row, spent = recorded(RunSpec(), budget(2))[0], budget(2)
    add(study, 0, {}, TrialState.FAIL)
    study.ask()
    add(study, 2, {"x": 1.0}, TrialState.COMPLETE)
    with pytest.raises(Surplus, match="the budget of 2 trials was spent"):
        claim(study.ask(), row, spent)
    assert set(claim(study.ask(), row, budget(4))) == {"lr"}


def test_the_suites_own_values_are_queued_again_if_their_trial_failed(tmp_path: Path) -> None:
    studied = recorded(RunSpec(), budget(2))
    (study,) = opened(tmp_path, studied)
    study.tell(study.ask(), state=TrialState.FAIL)
    opened(tmp_path, studied)
    opened(tmp_path, studied)
    assert [trial.state.name for trial in study.trials] == ["FAIL", "WAITING"]


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
