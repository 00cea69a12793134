"""Tuning: workers take trials from the rows' studies until each has spent its budget.

Any number of processes may work on the same studies, also from several commands; the studies' database is all they
share. Trials are carried out in a process below their worker (`fedbench.tuning.trial_process`): one that dies is tried
again at once. A worker that dies leaves a trial without signs of life, which another takes over.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.exceptions import StorageInternalError, TrialPruned
from optuna.storages import fail_stale_trials
from optuna.trial import FrozenTrial, TrialState

from fedbench.core.errors import FedbenchError
from fedbench.runs.engines.worker import Worker, last_line
from fedbench.runs.prepare import Settings
from fedbench.tuning.further import Confirmed, further_run
from fedbench.tuning.nested import open_further
from fedbench.tuning.shares import Share
from fedbench.tuning.storage import SignsOfLife, open_storage
from fedbench.tuning.studies import record_of, try_again
from fedbench.tuning.tracking import TrialTracking
from fedbench.tuning.trial import (
    Surplus,
    TrialReports,
    Tuned,
    claim,
    outcome_of_twin,
    pruner,
    sampler,
    score,
    trial_specs,
)
from fedbench.tuning.trial_process import LocalWorkers, TrialBroke, TrialDied, TrialProcess, Workers

_POLL = 1.0
"""Seconds between looks at workers, and at trials that others run."""
_LOSSES = 5
"""Workers that may be lost, for each that there can be, without any trial having ended in between."""


@dataclass(frozen=True)
class Job:
    """All that a worker needs."""

    url: str
    """Of the studies' database."""
    rows: tuple[Tuned, ...]
    settings: Settings
    suite: str
    store: str
    """MLflow tracking URI."""


@dataclass(frozen=True)
class TrialBegan:
    """A worker runs a trial."""

    row: Tuned
    number: int
    values: Mapping[str, Any]


@dataclass(frozen=True)
class TrialEnded:
    """A trial is over."""

    row: Tuned
    number: int
    values: tuple[float, ...]
    """Of the objectives; empty for a trial that was pruned, for the ``reason`` given."""
    reason: str
    ended: int
    """Trials of the study that are over, of ``budget``."""
    budget: int


@dataclass(frozen=True)
class WorkerFailed:
    """A worker met an error that is no trial's outcome. ``details`` is the traceback, empty for bad input."""

    reason: str
    details: str = ""


Told = TrialBegan | TrialEnded | Confirmed
Event = Told | WorkerFailed


def tune(job: Job, workers: int) -> Generator[Event, None, None]:
    """The events of ``workers`` processes on this machine until every study has spent its budget.

    One worker still is a process of its own, so that Ctrl-C never stops a trial half-way through a record. Closing the
    generator ends the processes.
    """
    with closing(LocalWorkers(job.settings, workers)) as local:
        yield from supervise(local, lambda: local.begin(_search, job), workers)


def supervise(workers: Workers, begin: Callable[[], Any], most: int) -> Generator[Event, None, None]:
    """The events of up to ``most`` tasks of ``workers``, each one started by ``begin``, until all budgets are spent.

    A worker that is lost is replaced, and its trial handed on once its signs of life have ceased. Closing the
    generator ends the workers.
    """
    under_way: set[Any] = set()
    lost, is_ending = 0, False
    try:
        while not (is_ending and not under_way):
            while not is_ending and len(under_way) < min(most, workers.slots()):
                under_way.add(begin())
            for notice in workers.wait(_POLL):
                for event in notice.events:
                    lost = 0 if isinstance(event, TrialEnded | Confirmed) else lost
                    is_ending |= isinstance(event, WorkerFailed)
                    yield event
                if not notice.is_over:
                    continue
                under_way.discard(notice.task)
                lost += bool(notice.lost)
                if notice.broken:
                    is_ending = True
                    yield WorkerFailed(f"a worker can't work: {last_line(notice.broken)}", notice.broken)
                elif not notice.lost:
                    is_ending = True  # there is nothing left to do
                elif lost > _LOSSES * most and not is_ending:
                    is_ending = True
                    yield WorkerFailed(
                        f"{lost} workers were lost without a trial having ended in between, the last one since "
                        f"{notice.lost}. The same command goes on where they stopped."
                    )
    finally:
        for task in under_way:
            workers.stop(task)


def work(job: Job, emit: Callable[[Event], None], worker: Worker | None = None) -> None:
    """One worker: take a trial of the study with the fewest, until all budgets are spent and nobody runs a trial.

    Then the best trials of each study are run on its further seeds.

    ``worker`` carries out the trials, where it is there, else a new one; it is closed in the end.
    """
    with closing(TrialProcess(job.settings, worker)) as process:
        _work(job, process, emit)


def _work(job: Job, process: TrialProcess, emit: Callable[[Event], None]) -> None:
    tracking = TrialTracking(job.store, job.suite)
    rows = {row.study_name: row for row in job.rows}

    def abandoned(study: optuna.Study, trial: FrozenTrial) -> None:
        if study.study_name not in rows:
            return  # a run on further seeds, which is due again by itself
        tracking.abandoned(trial)
        again = try_again(study, trial)
        if again.state is TrialState.PRUNED:
            tracking.catch_up(study)
            emit(_ended(rows[study.study_name], study, again))

    storage = open_storage(job.url, create=False, abandoned=abandoned)
    studies = [(row, optuna.load_study(study_name=row.study_name, storage=storage)) for row in job.rows]
    shares = [Share(row, study, open_further(storage, record_of(study))) for row, study in studies]
    for share in shares:
        share.study.sampler = sampler(share.budget, 0)
        share.study.pruner = pruner(share.budget.pruner, share.row.spec.training.rounds)
    signs = SignsOfLife(storage)
    while True:
        for share in shares:
            for study in share.studies():
                fail_stale_trials(study)
        # what a dead process left is tried again before anything new: the next values depend on it
        unfinished = [share for share in shares if not signs.are_missing(share.study) and share.is_open()]
        if unfinished:
            _one_trial(min(unfinished, key=Share.taken), process, tracking, abandoned, emit)
        elif further := next((share for share in shares if share.has_further_run(signs)), None):
            assert further.further is not None
            further_run(further.row, further.study, further.further, process, emit)
        elif any(share.is_open() or share.has(TrialState.RUNNING) for share in shares):
            time.sleep(_POLL)  # another process has them, or had them and died
        elif all(tracking.catch_up(share.study) for share in shares):
            return
        else:
            time.sleep(_POLL)  # another process is writing down its last trial, or died just then


def _one_trial(
    share: Share,
    process: TrialProcess,
    tracking: TrialTracking,
    abandoned: Callable[[optuna.Study, FrozenTrial], None],
    emit: Callable[[Event], None],
) -> None:
    row, budget = share.row, share.budget
    has_died = False

    def objective(trial: optuna.Trial) -> Sequence[float]:
        nonlocal has_died
        values = claim(trial, row, budget)
        known = outcome_of_twin(trial)
        emit(TrialBegan(row, trial.number, values))
        tracking.began(trial, values)
        if known is not None:
            return known
        reports = TrialReports(trial, budget)
        try:
            return score(trial, trial_specs(row.spec, values, budget), budget, process, reports)
        except TrialPruned:
            raise
        except TrialDied:
            has_died = True
            raise
        except Exception:
            tracking.broken(trial)
            raise
        finally:
            tracking.measured(trial, reports.by_round)

    def over(study: optuna.Study, trial: FrozenTrial) -> None:
        if has_died:
            abandoned(study, trial)
            return
        if trial.state is TrialState.FAIL:
            time.sleep(_POLL / 4)  # surplus: whoever has the values, or the budget, is about to say so
            return
        tracking.ended(study, trial)
        emit(_ended(row, study, trial))

    try:
        # `optimize` sends the signs of life, and takes over what dead processes ran
        share.study.optimize(objective, n_trials=1, callbacks=[over], catch=(Surplus, TrialDied))
    except ValueError as error:
        # held up beyond the grace period (a suspended machine): the trial is somebody else's now
        if "Cannot tell a" not in str(error):
            raise


def _ended(row: Tuned, study: optuna.Study, trial: FrozenTrial) -> TrialEnded:
    over = len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)))
    values = tuple(trial.values) if trial.state is TrialState.COMPLETE else ()
    reason = str(trial.user_attrs.get("reason", ""))
    return TrialEnded(row, trial.number, values, reason, over, record_of(study).budget.trials)


def _search(job: Job, worker: Worker, emit: Callable[[Event], None]) -> None:
    search_with(lambda: job, emit, worker)


def search_with(job: Callable[[], Job], emit: Callable[[Event], None], worker: Worker | None = None) -> None:
    """`work` as a process of its own does it: what is wrong becomes an event."""
    try:
        work(job(), emit, worker)
    except FedbenchError as error:
        emit(WorkerFailed(str(error)))
    except TrialBroke as broken:
        emit(WorkerFailed(broken.reason, broken.details))
    except StorageInternalError as error:
        reason = " ".join(str(error.__cause__ or error).partition("[SQL:")[0].split())[:300]
        emit(WorkerFailed(f"the studies' database can't be written: {reason} When it can, the same command goes on."))
    except Exception as error:
        emit(WorkerFailed(f"{type(error).__name__}: {error}", traceback.format_exc()))
