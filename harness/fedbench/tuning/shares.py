"""What a worker knows of a row: its studies, what they may still spend, and whether anything is left to be run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import optuna
from optuna.trial import TrialState

from fedbench.tuning.nested import due
from fedbench.tuning.storage import SignsOfLife
from fedbench.tuning.studies import Budget, counted, record_of
from fedbench.tuning.trial import Tuned


@dataclass(frozen=True)
class Share:
    """A row, its studies and what they may spend."""

    row: Tuned
    study: optuna.Study
    further: optuna.Study | None
    """With the runs on further seeds."""

    def studies(self) -> list[optuna.Study]:
        """Both, if there are two."""
        return [self.study, self.further] if self.further is not None else [self.study]

    @cached_property
    def budget(self) -> Budget:
        """That of the study."""
        return record_of(self.study).budget

    def spent(self) -> int:
        """How many trials use up the budget."""
        return len(counted(self.study))

    def taken(self) -> int:
        """How many of these do not wait."""
        return sum(trial.state is not TrialState.WAITING for trial in counted(self.study))

    def has(self, state: TrialState) -> bool:
        """Whether there is a trial in that ``state``, on whichever seeds."""
        return any(study.get_trials(deepcopy=False, states=(state,)) for study in self.studies())

    def has_further_run(self, signs: SignsOfLife) -> bool:
        """Whether its trials are over and there is a run on further seeds to begin."""
        if (
            self.further is None
            or self.is_open()
            or self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        ):
            return False
        return not signs.are_missing(self.further) and bool(due(self.study))

    def is_open(self) -> bool:
        """Whether there is a trial to be run."""
        return self.spent() < self.budget.trials or self.has(TrialState.WAITING)
