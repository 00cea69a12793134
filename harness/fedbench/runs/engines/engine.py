"""Run many specs: which begins when, what is tried again, what has taken too long, what is reported; and two engines.

The same spec gives the same numbers on every engine, whatever happened on the way.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from types import MappingProxyType

from fedbench.core.errors import FedbenchError
from fedbench.core.spec import RunSpec
from fedbench.runs.engines import Engine
from fedbench.runs.engines.cards import NO_CARD, Cards, Forecast, places_of
from fedbench.runs.engines.claims import Claims
from fedbench.runs.engines.events import (
    Emit,
    Event,
    Forward,
    Lost,
    RoundFinished,
    RunFailed,
    RunFinished,
    RunRetried,
    RunSkipped,
    failure_of,
)
from fedbench.runs.engines.worker import Stopped, Work, Worker, exit_text
from fedbench.runs.job import run_spec
from fedbench.runs.prepare import NOTHING, Loaded, Settings

RUN_THREAD = "fedbench-run"
_LEFT: list[threading.Thread] = []
"""Runs of this process that were left under way: until their next event they use generators of the whole process."""
"""Name of the thread that runs a spec in this process."""
_LOOK_SECONDS = 0.5
"""Between two looks at what takes too long, and at runs that others have claimed. Events themselves are waited for."""
_STALLED = 5.0
"""Seconds between two looks after which this process was held up, and no run is to blame."""


@dataclass(frozen=True)
class Policy:
    """What becomes of runs that go wrong."""

    timeout: float | None = None
    """Seconds that an attempt may take; it is ended then."""
    retries: int = 2
    """Further attempts at a run whose process died, or that found the machine short of something."""
    pause: float = 10.0
    """Seconds before the second attempt, and three times as many before each further one: what was full may not be."""
    fail_fast: bool = False
    """Whether the first failure ends everything."""


@dataclass(eq=False)
class _Attempt:
    spec: RunSpec
    number: int = 1
    is_alone: bool = False
    """Whether it has a card to itself, since another attempt found too little memory left on one."""
    not_before: float = 0.0
    """On the monotonic clock."""
    began: float | None = None
    """When the engine gave it a process, likewise."""


def execute(
    specs: Sequence[RunSpec],
    settings: Settings,
    workers: int,
    *,
    engine: Engine | None = None,
    policy: Policy | None = None,
    claims: Claims | None = None,
) -> Generator[Event, None, None]:
    """The events of all runs as they happen; runs interleave.

    Without an ``engine`` they are carried out in this process, where a run may change those after it, or, with several
    ``workers``, in worker processes.
    Workers beyond the number of runs train clients of a run side by side. A run that fails yields `RunFailed` and the
    others go on. ``claims`` are held from before a run begins until its last event was taken. Closing the generator
    ends the engine.
    """
    if engine is None:
        engine = engine_for(len(specs), settings, workers)
    schedule = RunQueue(specs, engine, policy or Policy(), claims)
    try:
        yield from schedule.events()
    finally:
        engine.close()
        if claims is not None:
            claims.close()


def engine_for(runs: int, settings: Settings, workers: int) -> Engine:
    """This process, which isolates nothing, for a single worker or run; else worker processes."""
    settings = with_cores(settings, runs, workers)
    return InProcess(settings) if workers <= 1 or runs <= 1 else Processes(settings, min(workers, runs))


def with_cores(settings: Settings, runs: int, workers: int) -> Settings:
    """Cores that no other run needs train clients of a run side by side."""
    return replace(settings, cores=max(workers // max(runs, 1), 1))


def default_workers(cards: Cards = MappingProxyType({})) -> int:
    """One worker a core that this process may use; on ``cards`` each has its share of them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(cores // places_of(cards), 1)


class RunQueue:
    """The runs that wait, those under way, and those that other processes have.

    Where none waits and there is room for one, ``more`` is asked for further runs.
    """

    def __init__(
        self,
        specs: Iterable[RunSpec],
        engine: Engine,
        policy: Policy,
        claims: Claims | None = None,
        more: Callable[[], Sequence[RunSpec]] = tuple,
    ) -> None:
        self._waiting = deque(_Attempt(spec) for spec in specs)
        self._again: deque[_Attempt] = deque()
        self._elsewhere: deque[_Attempt] = deque()
        self._running: dict[str, _Attempt] = {}
        self._engine = engine
        self._policy = policy
        self._claims = claims
        self._more = more

    def events(self) -> Generator[Event, None, None]:
        """What happens until every run has ended, and there are no more."""
        looked = time.monotonic()
        yield from self._begin()
        while self._waiting or self._again or self._elsewhere or self._running:
            self._forgive(time.monotonic() - looked)
            reported = self._engine.wait(_LOOK_SECONDS)
            looked = time.monotonic()
            for message in [*reported, *self._overdue()]:
                event = self._handed_on(message)
                if event is None:
                    continue
                yield event
                if isinstance(event, RunFinished | RunFailed) and self._claims is not None:
                    self._claims.release(event.spec.run_id)  # only now: whoever listens has stored it
                if isinstance(event, RunFailed) and self._policy.fail_fast:
                    return
            yield from self._begin()

    def drop(self, specs: Iterable[RunSpec]) -> None:
        """Stop what is under way of these runs and begin no other of them; there are no further events of any."""
        dropped = {spec.run_id: spec for spec in specs}
        self._waiting = deque(attempt for attempt in self._waiting if attempt.spec.run_id not in dropped)
        self._again = deque(attempt for attempt in self._again if attempt.spec.run_id not in dropped)
        for run_id in self._running.keys() & dropped.keys():
            del self._running[run_id]
            self._engine.stop(dropped[run_id], gently=True)

    def _begin(self) -> Generator[Event, None, None]:
        elsewhere = len(self._elsewhere)
        while len(self._running) < self._engine.slots() and not self._is_one_alone():
            if not self._waiting and not self._again:
                more = self._more()  # first, since whoever is asked may drop others
                self._waiting.extend(map(_Attempt, more))
            attempt = next(filter(self._has_room, self._waiting), None)
            if attempt is not None:
                self._waiting.remove(attempt)
            elif self._again and self._may_go_again(self._again[0]):
                attempt = self._again.popleft()
                self._engine.clear()  # idle workers hold memory as well
            elif elsewhere and self._has_room(self._elsewhere[0]):
                attempt, elsewhere = self._elsewhere.popleft(), elsewhere - 1
            else:
                return
            taken = "ours" if self._claims is None else self._claims.take(attempt.spec)
            if taken == "finished":
                yield RunSkipped(attempt.spec)
            elif taken == "elsewhere":
                self._elsewhere.append(attempt)
            else:
                self._running[attempt.spec.run_id] = attempt
                self._engine.begin(attempt.spec, alone=attempt.is_alone)

    def _has_room(self, attempt: _Attempt) -> bool:
        return self._engine.has_room(attempt.spec, alone=attempt.is_alone)

    def _is_one_alone(self) -> bool:
        """Whether a run is tried again under way that is to have the machine to itself."""
        again = [attempt for attempt in self._running.values() if attempt.number > 1]
        return self._engine.is_one_machine and not all(attempt.is_alone for attempt in again)

    def _may_go_again(self, attempt: _Attempt) -> bool:
        is_free = not (self._running and self._engine.is_one_machine)
        return is_free and time.monotonic() >= attempt.not_before

    def _handed_on(self, message: Event | Lost) -> Event | None:
        """The event to hand on for one of an engine; None for an event of a run that has ended already."""
        attempt = self._running.get(message.spec.run_id)
        if attempt is None:
            return None
        if isinstance(message, RunFinished):
            del self._running[message.spec.run_id]
        if not isinstance(message, Lost | RunFailed):
            return message
        del self._running[message.spec.run_id]
        if isinstance(message, Lost):
            message = RunFailed(message.spec, message.reason, may_pass=True, is_unworkable=True)
        if message.is_card_full and attempt.is_alone:
            return replace(message, reason=f"{message.reason} (with a card to itself)", is_unworkable=True)
        if message.is_card_full and attempt.number <= self._policy.retries:
            self._waiting.append(_Attempt(attempt.spec, attempt.number + 1, is_alone=True))
            reason = f"its card was full, so it is repeated with one to itself: {message.reason}"
            return RunRetried(message.spec, reason, attempt.number)
        if message.may_pass and attempt.number <= self._policy.retries:
            # after all others and, on one machine, alone: with what was short, it may have enough then
            pause = self._policy.pause * 3 ** (attempt.number - 1)
            self._again.append(_Attempt(attempt.spec, attempt.number + 1, not_before=time.monotonic() + pause))
            return RunRetried(message.spec, message.reason, attempt.number)
        if attempt.number > 1:
            return replace(message, reason=f"{message.reason} (attempt {attempt.number} of {self._policy.retries + 1})")
        return message

    def _overdue(self) -> list[Event | Lost]:
        """End the runs that have taken too long. One that had ended by itself did so in time."""
        limit = self._policy.timeout
        if limit is None:
            return []
        now, late = time.monotonic(), []
        for attempt in self._running.values():
            if attempt.began is None and self._engine.has_begun(attempt.spec):
                attempt.began = now
            if attempt.began is not None and now - attempt.began > limit:
                late.append(attempt)
        reason = f"timed out: took more than {limit:g} s (--run-timeout)"
        return [
            event for attempt in late for event in self._engine.stop(attempt.spec) or [RunFailed(attempt.spec, reason)]
        ]

    def _forgive(self, away: float) -> None:
        """Runs waited while whoever listens was ``away`` for long, for a store that could not be written, say."""
        if away > _STALLED:
            for attempt in self._running.values():
                attempt.began = None if attempt.began is None else attempt.began + away


def attempt(spec: RunSpec, settings: Settings, loaded: Loaded, emit: Emit) -> bool:
    """Carry out ``spec`` from its newest checkpoint on; the last event says how it ended, whatever the method does.

    What is in ``loaded`` it need not load itself. Whether it ended well.
    """
    try:
        run_spec(spec, settings, [Forward(emit)], loaded)
    except Stopped:
        raise
    except BaseException as error:  # a method may raise SystemExit or KeyboardInterrupt as well
        emit(failure_of(spec, error))
        return False
    return True


class InProcess:
    """Runs in this process, one after another, for debuggers: what a run changes or leaves behind meets those after it.

    Each is in a thread, so that its events are seen while it goes on.
    """

    is_one_machine = True

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._events: queue.Queue[Event] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._is_leaving = self._is_closed = False

    def slots(self) -> int:
        return 1

    def has_room(self, spec: RunSpec, *, alone: bool = False) -> bool:
        return True

    def begin(self, spec: RunSpec, *, alone: bool = False) -> None:
        while _LEFT:
            _LEFT[-1].join(60)
            if _LEFT[-1].is_alive():
                raise FedbenchError(
                    "a run that was interrupted still goes on in this process, and would disturb this one; wait until "
                    "it has ended, or start a new process."
                )
            _LEFT.pop()
        self._thread = threading.Thread(target=self._attempt, args=(spec,), name=RUN_THREAD, daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> list[Event | Lost]:
        try:
            event = self._events.get(timeout=seconds)
        except queue.Empty:
            return []
        if isinstance(event, RunFinished | RunFailed) and self._thread is not None:
            self._thread.join()
        return [event]

    def has_begun(self, spec: RunSpec) -> bool:
        return True

    def stop(self, spec: RunSpec, *, gently: bool = False) -> list[Event | Lost]:
        """Have it leave the run at the next event. Raises FedbenchError where that is too late: it can't be ended."""
        if not gently or self._thread is None:
            raise FedbenchError("a run in this process can't be stopped; use --engine processes with --run-timeout.")
        if not self._is_closed:
            self._is_leaving = True
            self._thread.join()
            self._is_leaving = False
            self._events = queue.Queue()  # the next run's end must not be taken for this one's
        return []

    def clear(self) -> None: ...

    def close(self) -> None:
        """A run under way goes on until its next event."""
        self._is_leaving = self._is_closed = True
        if self._thread is not None and self._thread.is_alive():
            _LEFT.append(self._thread)

    def _attempt(self, spec: RunSpec) -> None:
        with suppress(Stopped):
            attempt(spec, self._settings, NOTHING, self._emit)

    def _emit(self, event: Event) -> None:
        if self._is_leaving:
            raise Stopped
        self._events.put(event)


@dataclass(eq=False)
class _Worker:
    process: Worker
    card: int
    """Where it is, or `NO_CARD`."""
    device: str
    """Of the runs that it is for."""
    spec: RunSpec | None = None
    """The run it has."""
    is_alone: bool = False
    """Whether no other run may go to its card meanwhile."""
    end: Event | None = None
    """How that ended; reported once its process is done with it."""


class Processes:
    """Up to ``workers`` runs side by side on this machine, each in a process that has one thread (`Worker`).

    Whatever a run does to its process (dies, hangs, fills the memory, changes what all code in it shares) meets nobody
    else. On ``cards`` there are up to ``workers`` on each, as far as they fit (`Forecast`): a run goes to the one with
    the fewest.

    ``memory`` is how many bytes a run may take beyond what its process begins with, data and backbone included; more is
    a MemoryError in the run.
    """

    is_one_machine = True

    def __init__(
        self, settings: Settings, workers: int, memory: int | None = None, cards: Cards = MappingProxyType({})
    ) -> None:
        if memory is not None and sys.platform != "linux":
            raise FedbenchError("a memory limit for runs needs Linux; leave --memory-limit out.")
        self._settings = settings
        self._each = workers
        self._memory = memory
        self._cards = cards
        self._forecast = Forecast()
        self._workers: list[_Worker] = []
        self._unbegun: list[Event | Lost] = []

    def slots(self) -> int:
        return self._each * places_of(self._cards)

    def has_room(self, spec: RunSpec, *, alone: bool = False) -> bool:
        return self._place(spec, alone) is not None

    def _place(self, spec: RunSpec, alone: bool) -> int | None:
        """The card for the run, or `NO_CARD`; None where there is no room now."""
        fitting = [card for card in self._cards.get(spec.device) or (NO_CARD,) if self._fits(spec, card, alone)]
        return min(fitting, key=lambda card: len(self._under_way(card)), default=None)

    def _under_way(self, card: int) -> list[_Worker]:
        return [worker for worker in self._workers if worker.card == card and worker.spec]

    def _fits(self, spec: RunSpec, card: int, alone: bool) -> bool:
        others = self._under_way(card)
        if not others:
            return True
        if alone or len(others) >= self._each or any(worker.is_alone for worker in others):
            return False
        specs = [spec, *(worker.spec for worker in others if worker.spec)]
        workers = max(sum(worker.card == card for worker in self._workers), len(others) + 1)
        return card == NO_CARD or self._forecast.fits(card, specs, workers)

    def begin(self, spec: RunSpec, *, alone: bool = False) -> None:
        card = self._place(spec, alone)
        assert card is not None
        try:
            worker = (None if alone else self._free(spec, card)) or self._new(spec, card)
            worker.process.begin(Work(attempt, spec, spec))
        except (OSError, EOFError) as error:  # no further process, or no server of forks; `wait` says so
            reason = f"no process could be started for it: {type(error).__name__} {error}"
            self._unbegun.append(RunFailed(spec, reason, may_pass=True))
            return
        worker.spec, worker.is_alone = spec, alone

    def wait(self, seconds: float) -> list[Event | Lost]:
        events: list[Event | Lost] = [*self._unbegun]
        self._unbegun.clear()
        signs = {sign: worker for worker in self._workers if worker.spec for sign in worker.process.signs()}
        if not signs and not events:
            time.sleep(seconds)
        ready = wait(list(signs), 0 if events else seconds) if signs else []
        for worker in dict.fromkeys(signs[sign] for sign in ready):
            events += self._events_of(worker)
        return events

    def _events_of(self, worker: _Worker) -> list[Event | Lost]:
        """What a process has emitted, or that it is gone."""
        progress = worker.process.look()
        events: list[Event | Lost] = []
        if worker.process.on_card is not None:
            self._forecast.learn_free(worker.card, worker.process.on_card.free)
        for emitted in progress.events:
            # a method may have written to its own spec, by which events are matched to runs
            event = emitted if worker.spec is None else replace(emitted, spec=worker.spec)
            has_trained = isinstance(event, RunFinished) or (isinstance(event, RoundFinished) and event.record.round)
            if has_trained and worker.process.on_card is not None:
                self._forecast.learn_peak(event.spec, worker.process.on_card.peak)
            if isinstance(event, RunFinished | RunFailed):
                worker.end = event
            else:
                events.append(event)
        if progress.is_over and worker.spec is not None:
            events.append(worker.end or Lost(worker.spec, exit_text(progress.code)))
            self._freed(worker)
        return events

    def has_begun(self, spec: RunSpec) -> bool:
        return True

    def stop(self, spec: RunSpec, *, gently: bool = False) -> list[Event | Lost]:
        unreported: list[Event | Lost] = []
        for worker in [w for w in self._workers if w.spec is not None and w.spec.run_id == spec.run_id]:
            events = self._events_of(worker)
            if worker.spec is None:  # it has been done with the run since the last look
                return events
            unreported = [*events, worker.end] if worker.end else []
            worker.process.stop(gently=gently)
            self._freed(worker)
        return unreported

    def clear(self, card: int | None = None) -> None:
        for worker in [w for w in self._workers if w.spec is None and card in (None, w.card)]:
            worker.process.close()
            self._workers.remove(worker)

    def close(self) -> None:
        for worker in self._workers:
            worker.process.close()
        self._workers.clear()

    def _free(self, spec: RunSpec, card: int) -> _Worker | None:
        for worker in [w for w in self._workers if w.spec is None and (w.card, w.device) == (card, spec.device)]:
            if worker.process.can_begin():
                return worker
            self._freed(worker)
        return None

    def _new(self, spec: RunSpec, card: int) -> _Worker:
        self.clear(card)  # what is idle there is of no use for this run, and holds memory
        seen = card if spec.device == "cuda" and card != NO_CARD else None
        self._workers.append(_Worker(Worker(self._settings, self._memory, seen), card, spec.device))
        return self._workers[-1]

    def _freed(self, worker: _Worker) -> None:
        """Let the worker have another run, or go."""
        worker.spec, worker.end, worker.is_alone = None, None, False
        if not worker.process.can_begin():
            worker.process.close()
            self._workers.remove(worker)
