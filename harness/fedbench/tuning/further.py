"""Carrying out a run on further seeds: a trial of a study that is over, with its values, on seeds it has not seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import optuna
from optuna.exceptions import TrialPruned
from optuna.trial import FrozenTrial, TrialState

from fedbench.tuning.nested import BROKEN, FurtherRun, take
from fedbench.tuning.studies import record_of
from fedbench.tuning.trial import Surplus, TrialReports, Tuned, score, trial_specs
from fedbench.tuning.trial_process import TrialDied, TrialProcess


@dataclass(frozen=True)
class Confirmed:
    """A trial whose study is over was run on further seeds; see `fedbench.tuning.nested`."""

    row: Tuned
    number: int
    step: str
    seeds: tuple[int, ...]
    values: tuple[float, ...]
    """Of the objectives, means over ``seeds``; empty for values that do not work there, for the ``reason`` given."""
    reason: str = ""


def further_run(
    row: Tuned,
    study: optuna.Study,
    further: optuna.Study,
    process: TrialProcess,
    emit: Callable[[Confirmed], None],
) -> None:
    """Carry out the next run on further seeds that is due for ``study``, as a trial of ``further``.

    One whose process dies is due again. Errors that are no outcome pass, as those of trials do.
    """
    taken: list[FurtherRun] = []

    def objective(trial: optuna.Trial) -> Sequence[float]:
        run = take(study, trial)
        if run is None:
            raise Surplus("all further runs are done or under way")
        taken.append(run)
        budget = replace(record_of(study).budget, seeds=run.seeds)
        try:
            return score(
                trial, trial_specs(row.spec, run.trial.params, budget), budget, process, TrialReports(trial, budget)
            )
        except (TrialPruned, TrialDied):
            raise
        except Exception:
            trial.set_user_attr(BROKEN, True)
            raise

    def over(_: optuna.Study, trial: FrozenTrial) -> None:
        if trial.state is TrialState.FAIL:
            return
        values = tuple(trial.values) if trial.state is TrialState.COMPLETE else ()
        run = taken[-1]
        emit(Confirmed(row, run.trial.number, run.step, run.seeds, values, str(trial.user_attrs.get("reason", ""))))

    try:
        further.optimize(objective, n_trials=1, callbacks=[over], catch=(Surplus, TrialDied))
    except ValueError as error:
        # as for a trial: held up beyond the grace period, it has failed meanwhile and is due again
        if "Cannot tell a" not in str(error):
            raise
