"""Nested validation of a study: each choice is checked on seeds that had no part in it.

1. A trial's value is the mean over the tuning seeds. The best `FINALISTS` trials go on. Their values are optimistic,
   since the luck of these seeds has chosen them.
2. Run-off: every finalist is run on the run-off seeds. The best mean over tuning and run-off seeds is chosen, and is
   what ``--tuned`` takes.
3. Confirmation: the chosen trial is run on the confirming seeds, which have chosen nothing. That value is reported.

These runs see validation data only, as trials do. They are trials of a second Optuna study beside the first, which the
first one's sampler and pruner never see: its trials are the same with and without them. Whatever a stopped command left
out is found again from the two studies. More trials may give other finalists; then only what is missing is run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import optuna
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from fedbench.tuning.objectives import Objective
from fedbench.tuning.studies import PLACE, RETRIES, Record, record_of

FINALISTS = 3
"""Trials that the run-off is among."""
_OF, _STEP, _SEEDS = "of", "step", "seeds"
"""User attributes of a further trial: the trial whose values it has, what it is for, and its seeds."""
BROKEN = "broken"
"""User attribute of a further trial that met an error which is no outcome."""
Step = Literal["run-off", "confirmation"]


@dataclass(frozen=True)
class FurtherRun:
    """A trial of the study to be run on further seeds."""

    trial: FrozenTrial
    step: Step
    seeds: tuple[int, ...]


def further_name(record: Record) -> str:
    """What Optuna calls the study with the further runs."""
    return f"{record.study_name} · further seeds"


def open_further(storage: BaseStorage, record: Record) -> optuna.Study | None:
    """The study with the further runs, made if it is new; None where the budget has none."""
    if not record.budget.runoff and not record.budget.confirming:
        return None
    directions = [Objective(metric).direction for metric in record.budget.objectives]
    return optuna.create_study(
        storage=storage,
        study_name=further_name(record),
        directions=directions,
        load_if_exists=True,
        # these trials are measured to their end
        pruner=optuna.pruners.NopPruner(),
    )


def finalists(study: optuna.Study) -> list[FrozenTrial]:
    """The best trials by the mean over the tuning seeds, best first; of equals the first, of equal values one.

    With several objectives those of the Pareto front that are best in the first one.
    """
    record = record_of(study)
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    candidates = complete if len(record.budget.objectives) == 1 else study.best_trials
    own = [trial for trial in candidates if "same_as" not in trial.user_attrs]
    return sorted(own, key=lambda t: (_cost(record, t.values[0]), t.user_attrs.get(PLACE, t.number)))[:FINALISTS]


def chosen(study: optuna.Study) -> FrozenTrial | None:
    """The best finalist by the mean over tuning and run-off seeds; None as long as no trial is complete.

    As long as the run-off is not over, and where there is none, the best by the tuning seeds.
    """
    best = finalists(study)
    if not best:
        return None
    means = _means(study, best)
    return best[0] if means is None else min(best, key=lambda t: means[t.number])


def _means(study: optuna.Study, best: list[FrozenTrial]) -> dict[int, float] | None:
    """By trial the mean of the first objective over tuning and run-off seeds, as a cost; infinite for one that failed.

    None as long as the run-off is not over, and where all failed or there is none.
    """
    record = record_of(study)
    budget, outcomes = record.budget, _outcomes(study)
    if not budget.runoff or len(best) < 2:
        return None
    means = {}
    for trial in best:
        outcome = outcomes.get((trial.number, "run-off", budget.runoff))
        if outcome is None:
            return None
        tuned, further = len(budget.seeds), len(budget.runoff)
        total = tuned * trial.values[0] + further * outcome[0] if outcome else float("inf")
        means[trial.number] = _cost(record, total / (tuned + further)) if outcome else total
    return means if min(means.values()) < float("inf") else None


def is_improved(study: optuna.Study, best: FrozenTrial, before: FrozenTrial) -> bool:
    """Whether trial ``best`` is better than ``before``: by all seeds that chose, where both were run on them."""
    if best.number == before.number:
        return False
    record, means = record_of(study), _means(study, finalists(study)) or {}
    if best.number in means and before.number in means:
        return means[best.number] < means[before.number]
    return _cost(record, best.values[0]) < _cost(record, before.values[0])


def confirmed(study: optuna.Study, trial: FrozenTrial) -> tuple[float, ...] | None:
    """The objectives of ``trial`` on the confirming seeds, means over them; None where there is no such value."""
    return _outcomes(study).get((trial.number, "confirmation", record_of(study).budget.confirming)) or None


def due(study: optuna.Study, before: int | None = None) -> list[FurtherRun]:
    """What is to be run next of a study whose trials are over, and is neither done nor under way.

    ``before`` is the number of a further trial: those from it on don't count as under way.
    """
    budget, outcomes = record_of(study).budget, _outcomes(study)
    best = finalists(study)
    runs = [FurtherRun(trial, "run-off", budget.runoff) for trial in best if budget.runoff and len(best) > 1]
    missing = [run for run in runs if _key(run) not in outcomes]
    if not missing and budget.confirming and (choice := chosen(study)) is not None:
        last = FurtherRun(choice, "confirmation", budget.confirming)
        missing = [last] if _key(last) not in outcomes else []
    running = [
        _key_of(trial)
        for trial in _trials(study)
        if trial.state is TrialState.RUNNING and _OF in trial.user_attrs and (before is None or trial.number < before)
    ]
    return [run for run in missing if _key(run) not in running]


def take(study: optuna.Study, trial: optuna.Trial) -> FurtherRun | None:
    """What the further ``trial`` is to run; None where nothing is left to begin.

    Two processes that begin at the same moment may take the same run, which gives the same numbers twice.
    """
    left = due(study, trial.number)
    # those that have begun before and are about to take theirs
    earlier = sum(
        t.state is TrialState.RUNNING and t.number < trial.number and _OF not in t.user_attrs for t in _trials(study)
    )
    if earlier >= len(left):
        return None
    run = left[earlier]
    trial.set_user_attr(_STEP, run.step)
    trial.set_user_attr(_SEEDS, list(run.seeds))
    trial.set_user_attr(_OF, run.trial.number)
    return run


def _outcomes(study: optuna.Study) -> dict[tuple[int, str, tuple[int, ...]], tuple[float, ...]]:
    """The objectives by trial, step and seeds of the further runs that are over; () for values that do not work there.

    Values whose process died again and again don't either.
    """
    outcomes: dict[tuple[int, str, tuple[int, ...]], tuple[float, ...]] = {}
    deaths: dict[tuple[int, str, tuple[int, ...]], int] = {}
    for trial in _trials(study):
        if _OF not in trial.user_attrs:
            continue
        key = _key_of(trial)
        if trial.state is TrialState.COMPLETE:
            outcomes.setdefault(key, tuple(trial.values))
        elif trial.state is TrialState.PRUNED:
            outcomes.setdefault(key, ())
        elif trial.state is TrialState.FAIL and BROKEN not in trial.user_attrs:
            deaths[key] = deaths.get(key, 0) + 1
    return {key: () for key, number in deaths.items() if number > RETRIES} | outcomes


def _trials(study: optuna.Study) -> Iterator[FrozenTrial]:
    record = record_of(study)
    try:
        of = study._storage.get_study_id_from_name(further_name(record))
    except KeyError:  # of a budget without further seeds
        return
    yield from study._storage.get_all_trials(of, deepcopy=False)


def _key(run: FurtherRun) -> tuple[int, str, tuple[int, ...]]:
    return run.trial.number, run.step, run.seeds


def _key_of(trial: FrozenTrial) -> tuple[int, str, tuple[int, ...]]:
    return trial.user_attrs[_OF], trial.user_attrs[_STEP], tuple(trial.user_attrs[_SEEDS])


def _cost(record: Record, value: float) -> float:
    """``value`` of the first objective with the sign under which less is better."""
    return value if Objective(record.budget.objectives[0]).direction == "minimize" else -value
