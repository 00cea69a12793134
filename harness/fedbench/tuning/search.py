"""Carrying out studies: trials are asked for, run seed by seed on an engine, pruned by their rounds, and told.

Any number of commands may work on the same studies; the studies' database is all they share. A command that dies leaves
trials without signs of life (Optuna's heartbeat), which the others, or the next command, try again. Once the trials of
a study are over, the best are run on further seeds (`fedbench.tuning.results`).
"""

from __future__ import annotations

import os
import platform
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import optuna
from optuna.exceptions import StorageInternalError, TrialPruned, UpdateFinishedTrialError
from optuna.storages import fail_stale_trials
from optuna.storages._heartbeat import BaseHeartbeatThread, get_heartbeat_thread
from optuna.trial import FrozenTrial, TrialState

from fedbench.core.errors import FedbenchError, Unworkable
from fedbench.core.spec import RunSpec
from fedbench.runs.engines import Engine
from fedbench.runs.engines.engine import Policy, RunQueue
from fedbench.runs.engines.events import Event, RoundFinished, RunFailed, RunFinished
from fedbench.tracking.recording import HURRY
from fedbench.tuning.results import FurtherRun, due, enqueue, open_further, run_of
from fedbench.tuning.storage import GRACE, open_storage
from fedbench.tuning.studies import Budget, counted, record_of, try_again
from fedbench.tuning.tracking import TrialTracking
from fedbench.tuning.trial import Surplus, TrialReports, Tuned, claim, pruner, score, trial_specs, twin_of

RETRIES = 3
"""How often a run whose process died is tried again: some values need more memory than there is."""
_POLL = 1.0
"""Seconds between looks at trials that others run."""


@dataclass(frozen=True)
class TrialBegan:
    """A trial is about to be run."""

    row: Tuned
    number: int
    values: Mapping[str, Any]


@dataclass(frozen=True)
class TrialEnded:
    """A trial is over."""

    row: Tuned
    number: int
    values: tuple[float, ...]
    """Values of the objectives; empty for a trial that was pruned, for the ``reason`` given."""
    reason: str
    ended: int
    """Trials of the study that are over, of ``budget``."""
    budget: int


@dataclass(frozen=True)
class Confirmed:
    """A trial whose study is over was run on further seeds."""

    row: Tuned
    number: int
    step: str
    seeds: tuple[int, ...]
    values: tuple[float, ...]
    """Means of the objectives over ``seeds``; empty for values that do not work there, for the ``reason`` given."""
    reason: str = ""


TrialEvent = TrialBegan | TrialEnded | Confirmed


class SearchFailed(Exception):
    """An error that is no trial's outcome: ``reason`` in words, ``details`` the traceback, empty for bad input."""

    def __init__(self, reason: str, details: str = "") -> None:
        super().__init__(reason, details)
        self.reason = reason
        self.details = details


class _Row:
    """A row, its two studies, and whether anything of them is left to be run."""

    def __init__(self, row: Tuned, study: optuna.Study) -> None:
        self.row, self.study = row, study
        self.budget = record_of(study).budget
        self.further = open_further(study._storage, record_of(study))
        study.pruner = pruner(self.budget.pruner, row.spec.training.rounds)

    def studies(self) -> list[optuna.Study]:
        return [self.study, self.further] if self.further is not None else [self.study]

    def taken(self) -> int:
        return sum(trial.state is not TrialState.WAITING for trial in counted(self.study))

    def has(self, state: TrialState) -> bool:
        return any(study.get_trials(deepcopy=False, states=(state,)) for study in self.studies())

    def is_open(self) -> bool:
        """Whether there is a trial to be asked for."""
        is_waiting = bool(self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,)))
        return is_waiting or len(counted(self.study)) < self.budget.trials

    def has_further(self) -> bool:
        """Whether its trials are over and a run on further seeds waits, or is due and made to wait here."""
        if self.further is None or self.is_open():
            return False
        if self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            return False
        for run in due(self.study):
            enqueue(self.further, run)
        return bool(self.further.get_trials(deepcopy=False, states=(TrialState.WAITING,)))


@dataclass(eq=False)
class _UnderWay:
    """A trial of one of a row's studies."""

    row: _Row
    study: optuna.Study
    trial: optuna.Trial
    beat: BaseHeartbeatThread
    budget: Budget
    reports: TrialReports
    run: FurtherRun | None
    """What a trial of the second study is for."""
    specs: Sequence[RunSpec] = ()
    waiting: list[RunSpec] = field(default_factory=list)
    """Runs that have not begun."""
    summaries: dict[str, Mapping[str, float]] = field(default_factory=dict)
    """Results of runs that are over, by run id."""
    began: float = field(default_factory=time.monotonic)

    def begin(self, values: Mapping[str, Any]) -> None:
        self.specs = trial_specs(self.row.row.spec, values, self.budget)
        self.waiting = list(self.specs)
        self.trial.set_user_attr("process", f"{platform.node()}:{os.getpid()}")
        self.trial.set_user_attr("run_ids", {str(spec.seed): spec.run_id for spec in self.specs})

    def in_flight(self) -> list[RunSpec]:
        """Its runs that have begun and are not over."""
        return [spec for spec in self.specs if spec not in self.waiting and spec.run_id not in self.summaries]

    def hear(self, event: Event) -> tuple[float, ...]:
        """The values of the objectives once all runs are over, () until then.

        Raises TrialPruned and Unworkable where the trial is given up, and whatever else a run met.
        """
        if isinstance(event, RoundFinished):
            self.reports.round_finished(event.spec, event.record)
        elif isinstance(event, RunFinished):
            self.summaries[event.spec.run_id] = event.result.summary
            if len(self.summaries) == len(self.specs):
                return score(self.trial, self.specs, self.summaries, self.budget)
        elif isinstance(event, RunFailed) and event.is_unworkable:
            self.reports.run_failed(event.spec, event.reason)
        elif isinstance(event, RunFailed):
            raise SearchFailed(event.reason, event.details)
        return ()


class Search:
    """The trials of some rows, as they are carried out by this command until all budgets are spent."""

    def __init__(
        self,
        url: str,
        rows: Sequence[Tuned],
        engine: Engine,
        tracking: TrialTracking,
        emit: Callable[[TrialEvent], None],
    ) -> None:
        """``url`` is that of the studies' database. The ``engine`` is closed in the end."""
        self._storage = open_storage(url, create=False, abandoned=self._abandoned)
        studies = [optuna.load_study(study_name=row.study_name, storage=self._storage) for row in rows]
        self._rows = [_Row(row, study) for row, study in zip(rows, studies, strict=True)]
        self._engine, self._tracking, self._emit = engine, tracking, emit
        self._schedule = RunQueue((), engine, Policy(retries=RETRIES, pause=0.0), more=self._more)
        self._under_way: list[_UnderWay] = []
        self._left_behind = self._running()
        """Trials that ran when this command came: if theirs has died, they have no sign of life after this one."""
        self._signed: set[int] = set()
        self._settled_at = time.monotonic() + GRACE + 3
        self._look_again = 0.0

    def carry_out(self) -> None:
        """Carry out trials, and runs on further seeds, until there are none left, here or in other commands.

        Raises SearchFailed for errors that are no trial's outcome.
        """
        HURRY.clear()
        try:
            while True:
                for event in self._schedule.events():
                    self._hear(event)
                if not any(row.is_open() or row.has(TrialState.RUNNING) or row.has_further() for row in self._rows):
                    return
                time.sleep(_POLL)  # other commands have the rest, or had it and died
        except KeyboardInterrupt:
            HURRY.set()
            raise
        except FedbenchError as error:
            HURRY.set()  # a store that can't be written is not waited for once more
            raise SearchFailed(str(error)) from error
        except StorageInternalError as error:
            reason = " ".join(str(error.__cause__ or error).partition("[SQL:")[0].split())[:300]
            text = f"the studies' database can't be written: {reason} When it can, the same command goes on."
            raise SearchFailed(text) from error
        finally:
            self._engine.close()
            self._hand_back()

    def _more(self) -> list[RunSpec]:
        """The next run, of a trial under way or of one that is asked for now; none where there is nothing to begin."""
        while True:
            # trials of rows that differ in what is searched may draw the same values, and so have the same runs
            busy = {spec.run_id for under in self._under_way for spec in under.in_flight()}
            for under in self._under_way:
                for spec in under.waiting:
                    if spec.run_id not in busy:
                        under.waiting.remove(spec)
                        return [spec]
            if time.monotonic() < self._look_again:
                return []
            if not self._is_settled() or not self._ask():
                self._look_again = time.monotonic() + _POLL

    def _is_settled(self) -> bool:
        """Whether no command may have died whose trial is to be tried again: the values of the next depend on it."""
        for row in self._rows:
            for study in row.studies():
                fail_stale_trials(study)
        running = self._running()
        for trial in running - self._signed - {under.trial._trial_id for under in self._under_way}:
            self._storage.record_heartbeat(trial)  # of a trial without any, Optuna never says that it has stopped
        self._signed |= running
        return time.monotonic() > self._settled_at or not running & self._left_behind

    def _running(self) -> set[int]:
        states = (TrialState.RUNNING,)
        trials = [study.get_trials(deepcopy=False, states=states) for row in self._rows for study in row.studies()]
        return {trial._trial_id for of_study in trials for trial in of_study}

    def _ask(self) -> bool:
        """Begin another trial, of the row with the fewest, or else a run on further seeds. Whether there was one."""
        rows = [row for row in self._rows if row.is_open()]
        if rows:
            return self._begin_trial(min(rows, key=_Row.taken))
        return any(self._begin_further(row) for row in self._rows if row.has_further())

    def _begin_trial(self, row: _Row) -> bool:
        under = self._asked(row, row.study)
        try:
            values = claim(under.trial, row.row, row.budget)
            twin = twin_of(under.trial)
            self._emit(TrialBegan(row.row, under.trial.number, values))
            self._tracking.began(under.trial, values)
            if twin is None:
                under.begin(values)
            elif twin.state is TrialState.COMPLETE:
                self._end(under, tuple(twin.values))
            else:
                self._end(under, (), f"as trial {twin.number}")
        except Surplus:
            self._over(under, TrialState.FAIL)
            return False
        except UpdateFinishedTrialError:
            self._leave(under)
        return True

    def _begin_further(self, row: _Row) -> bool:
        assert row.further is not None
        under = self._asked(row, row.further)
        if under.run is None:  # another command has taken it meanwhile
            self._over(under, TrialState.FAIL)
            return False
        under.begin(row.study.get_trials(deepcopy=False)[under.run.number].params)
        return True

    def _asked(self, row: _Row, study: optuna.Study) -> _UnderWay:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # it knows of no signs of life but those of `optimize`
            trial = study.ask()
        beat = get_heartbeat_thread(trial._trial_id, self._storage)
        run = run_of(trial)
        budget = row.budget if run is None else replace(row.budget, seeds=run.seeds)
        self._under_way.append(_UnderWay(row, study, trial, beat, budget, TrialReports(trial, budget), run))
        beat.start()
        return self._under_way[-1]

    def _hear(self, event: Event) -> None:
        under = next(under for under in self._under_way if event.spec in under.specs)
        values: tuple[float, ...] = ()
        reason = ""
        try:
            try:
                values = under.hear(event)
            except (TrialPruned, Unworkable) as error:
                reason = str(error)
            except (FedbenchError, SearchFailed):
                if under.run is None:
                    self._tracking.stopped(under.trial, "FAILED")
                self._over(under, TrialState.FAIL)
                raise
            if values or reason:
                self._end(under, values, reason)
        except UpdateFinishedTrialError:  # held up beyond the grace period: others have taken the trial over
            self._leave(under)

    def _end(self, under: _UnderWay, values: tuple[float, ...], reason: str = "") -> None:
        """Write down what became of a trial, and tell its study."""
        if reason:
            under.trial.set_user_attr("reason", reason)
        if under.specs:
            under.trial.set_user_attr("seconds", round(time.monotonic() - under.began, 1))
        if under.run is None:
            self._tracking.ended(under.trial, values, reason, under.reports.by_round)
        if self._over(under, TrialState.COMPLETE if values else TrialState.PRUNED, values) is None:
            return
        row = under.row
        if under.run is not None:
            self._emit(Confirmed(row.row, under.run.number, under.run.step, under.run.seeds, values, reason))
            return
        self._tracking.tell_best(row.study)
        ended = len(row.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)))
        self._emit(TrialEnded(row.row, under.trial.number, values, reason, ended, row.budget.trials))

    def _over(self, under: _UnderWay, state: TrialState, values: tuple[float, ...] = ()) -> FrozenTrial | None:
        """The trial as its study has it from now on; None where others have taken it over."""
        is_taken = self._storage.get_trial(under.trial._trial_id).state.is_finished()
        told = under.study.tell(under.trial, values or None, state, skip_if_finished=True)
        self._leave(under)
        return None if is_taken else told

    def _leave(self, under: _UnderWay) -> None:
        under.beat.join()  # first, since it is a thread for which Python waits, whatever interrupts the rest
        self._under_way.remove(under)
        self._schedule.drop(under.in_flight())

    def _hand_back(self) -> None:
        """Have what is under way tried again, by whoever is first: this command ends early."""
        for under in list(self._under_way):
            with suppress(Exception):  # without signs of life it is tried again all the same, but later
                under.beat.join()
                told = self._over(under, TrialState.FAIL)
                if told is not None:
                    self._abandoned(under.study, told)

    def _abandoned(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Have a trial tried again whose command has died; a run on further seeds is due again by itself."""
        if run_of(trial) is None:
            try_again(study, trial)
            self._tracking.stopped(trial, "KILLED")
