"""What a study has found: the chosen trial, its value on validation data, and on seeds that chose nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import optuna
from optuna.trial import TrialState

from fedbench.tuning.nested import chosen, confirmed, is_improved
from fedbench.tuning.studies import COUNTED, DEFAULTS, Record, record_of


@dataclass(frozen=True)
class Found:
    """What a study has found so far."""

    record: Record
    values: dict[str, Any]
    """The chosen trial's, by key; with several objectives, of a trial on the Pareto front, by the first one."""
    trial: int
    best: tuple[float, ...]
    """Of the chosen trial, by objective: means over the tuning seeds, which have chosen it."""
    defaults: tuple[float, ...] | None
    """Of the suite's own values, likewise; None where that trial did not get to its end."""
    states: dict[str, int]
    """How many trials are complete, pruned, running or waiting."""
    improved: bool | None
    """Whether the first objective is better than with the suite's values; None where those got to no end."""
    front: tuple[tuple[int, tuple[float, ...], dict[str, Any]], ...] = ()
    """Number, objectives and values of the trials that none beats in all objectives, the chosen one first."""
    confirmed: tuple[float, ...] | None = None
    """Of the chosen trial on the confirming seeds, which have chosen nothing; None where it was not run on any."""

    @property
    def spent(self) -> int:
        """Trials that are over, of the record's budget."""
        return self.states.get("complete", 0) + self.states.get("pruned", 0)


def found(study: optuna.Study) -> Found | None:
    """What ``study`` has found; None as long as no trial has got to its end."""
    record = record_of(study)
    best = chosen(study)
    if best is None:
        return None
    several = len(record.budget.objectives) > 1
    front = [t for t in study.best_trials if t.number != best.number] if several else []
    front.sort(key=lambda t: (t.values[0] if study.directions[0].name == "MINIMIZE" else -t.values[0], t.number))
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    defaults = [trial for trial in complete if trial.user_attrs.get(DEFAULTS)]
    states = {state.name.lower(): len(study.get_trials(deepcopy=False, states=(state,))) for state in COUNTED}
    return Found(
        record,
        dict(best.params),
        best.number,
        tuple(best.values),
        tuple(defaults[0].values) if defaults else None,
        {state: number for state, number in states.items() if number},
        is_improved(study, best, defaults[0]) if defaults else None,
        tuple((trial.number, tuple(trial.values), dict(trial.params)) for trial in (best, *front)),
        confirmed(study, best),
    )
