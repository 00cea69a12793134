"""The process of a trial: its runs, one a seed, go on in a `fedbench.runs.engines.worker.Worker` of their own.

A trial whose process dies leaves the study's process alive. The runs of one trial share a process. Rounds are sent to
the study's process, which alone speaks with the studies' database.

Nothing here imports Optuna or MLflow, which start threads: a worker is forked before they are imported.
"""

from __future__ import annotations

import atexit
import pickle
import signal
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from fedbench.core.errors import REASON, FedbenchError, Unworkable, reason_of, shortened, text_of, traceback_of
from fedbench.core.main_program import without_main
from fedbench.core.method.hooks import hookimpl
from fedbench.core.records import RoundRecord, RunResult
from fedbench.core.spec import RunSpec
from fedbench.runs.engines import context
from fedbench.runs.engines.worker import Apart, Stopped, Work, Worker, exit_text, quiet_worker
from fedbench.runs.job import run_rounds
from fedbench.runs.prepare import Loaded, Settings


class TrialDied(Exception):
    """The process of a trial ended before its runs did: killed, out of memory, or left by the method."""


class TrialBroke(Exception):
    """A run of a trial met an error that is no outcome: ``reason`` on one line, and the traceback as ``details``."""

    def __init__(self, reason: str, details: str) -> None:
        super().__init__(reason, details)
        self.reason = reason
        self.details = details


@dataclass(frozen=True)
class _Round:
    position: int
    """Of the run among those of the trial; a method may have written to its own description."""
    record: RoundRecord


class TrialProcess:
    """Where trials are carried out, one after another; ``worker`` is a process for them that is there already."""

    def __init__(self, settings: Settings, worker: Worker | None = None) -> None:
        self._apart = Apart(settings, worker)

    def run(
        self, specs: Sequence[RunSpec], on_round: Callable[[RunSpec, RoundRecord], None]
    ) -> list[Mapping[str, float]]:
        """The summaries of ``specs``, run side by side; ``on_round`` is called with each round in order.

        Whatever ``on_round`` raises ends the runs and passes. Raises Unworkable and FedbenchError as a run did,
        TrialBroke for any other error of a run, TrialDied, and OSError or EOFError where no further process can be
        started.
        """
        ends: list[Exception | list[Mapping[str, float]]] = []

        def on_event(event: _Round | Exception | list[Mapping[str, float]]) -> None:
            if isinstance(event, _Round):
                on_round(specs[event.position], event.record)
            else:
                ends.append(event)

        code = self._apart.carry_out(Work(_measure, tuple(specs), specs[0]), on_event)
        if not ends:
            raise TrialDied(exit_text(code))
        if isinstance(ends[-1], Exception):
            raise ends[-1]
        return ends[-1]

    def close(self) -> None:
        """End the process, and a trial under way with it."""
        self._apart.close()


def _measure(specs: Sequence[RunSpec], settings: Settings, loaded: Loaded, emit: Callable[[Any], None]) -> bool:
    """What the process of a trial does: a `_Round` for each, then the summaries, or the exception to be raised."""
    try:
        streams = [run_rounds(spec, settings, [_Tell(at, emit)], loaded) for at, spec in enumerate(specs)]
        summaries = [dict(result.summary) for result in _side_by_side(streams)]
    except Stopped:
        raise
    except BaseException as error:  # a method may raise SystemExit or KeyboardInterrupt as well
        emit(_failure(error))
        return False
    emit(summaries)
    return True


class _Tell:
    """A listener of one of the runs."""

    def __init__(self, position: int, emit: Callable[[Any], None]) -> None:
        self._position = position
        self._emit = emit

    @hookimpl
    def round_finished(self, spec: RunSpec, record: RoundRecord) -> None:
        """Tell the worker."""
        self._emit(_Round(self._position, record))


def _failure(error: BaseException) -> Exception:
    """``error`` as one of those that the worker knows: a method's own may not even be importable there."""
    if isinstance(error, FedbenchError):
        kind = Unworkable if isinstance(error, Unworkable) else FedbenchError
        return kind(shortened(text_of(error), REASON))
    return TrialBroke(reason_of(error), traceback_of(error))


def _side_by_side(streams: Sequence[Generator[RoundRecord, None, RunResult]]) -> list[RunResult]:
    """Run all streams, a round of each in turn; their results."""
    results: dict[int, RunResult] = {}
    while len(results) < len(streams):
        for position, stream in enumerate(streams):
            if position not in results:
                try:
                    next(stream)
                except StopIteration as end:
                    results[position] = end.value
    return [results[position] for position in range(len(streams))]


@dataclass(frozen=True)
class Notice:
    """What became of a task since the last look."""

    task: Any
    events: tuple[Any, ...] = ()
    """That it has emitted, in order."""
    is_over: bool = False
    lost: str = ""
    """Why its process ended before the work did."""
    broken: str = ""
    """The traceback of an error that the work itself did not answer for."""


class Workers(Protocol):
    """Processes, here or on a cluster, that carry out tasks side by side."""

    def slots(self) -> int:
        """How many tasks there may be at the same time."""
        ...

    def wait(self, seconds: float) -> list[Notice]:
        """What has happened since the last call; waits up to ``seconds`` for something."""
        ...

    def stop(self, task: Any) -> None:
        """End a task's process; there is no further notice of it."""
        ...


class LocalWorkers:
    """Up to ``most`` processes on this machine that each have a worker of their own. They end with this one.

    A cluster has some of the same interface (`fedbench.tuning.on_ray`), so that one supervisor serves both.
    """

    def __init__(self, settings: Settings, most: int) -> None:
        self._settings = settings
        self._most = most
        self._context = context()
        # a pipe for each: one that is killed while it writes holds nobody else up
        self._processes: dict[Connection, BaseProcess] = {}
        atexit.register(self.close)  # multiprocessing would wait for them where nobody has closed this

    def slots(self) -> int:
        """``most``."""
        return self._most

    def begin(self, body: Callable[..., None], *arguments: Any) -> Connection:
        """Call ``body(*arguments, worker, emit)`` in a new process; ``worker`` is its `Worker`. The task."""
        here, there = self._context.Pipe(duplex=False)
        # as bytes, since what unpickling imports must not be imported when the worker begins
        pickled = pickle.dumps(partial(body, *arguments))
        # not a daemon, which may have no children
        process = self._context.Process(target=_begin, args=(self._settings, pickled, there))
        with there, without_main():
            process.start()
        self._processes[here] = process
        return here

    def wait(self, seconds: float) -> list[Notice]:
        """The next event of each process, or its end."""
        ready = wait(list(self._processes), seconds)
        return [self._look(task) for task in list(self._processes) if task in ready]

    def stop(self, task: Connection) -> None:
        """Terminate the task's process."""
        process = self._processes.pop(task, None)
        if process is not None:
            process.terminate()
            process.join()
            task.close()

    def close(self) -> None:
        """Terminate all processes."""
        atexit.unregister(self.close)
        for process in self._processes.values():
            process.terminate()
        for task in list(self._processes):
            self.stop(task)

    def _look(self, task: Connection) -> Notice:
        try:
            return Notice(task, (task.recv(),))
        except (EOFError, OSError):
            process = self._processes.pop(task)
            process.join()
            task.close()
            return Notice(task, is_over=True, lost=exit_text(process.exitcode) if process.exitcode else "")


def _begin(settings: Settings, pickled: bytes, events: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # before the imports that unpickling brings, and before any thread: neither belongs in a process that is forked
    worker = Worker(settings, fork_without=(events,))
    quiet_worker()
    pickle.loads(pickled)(worker, events.send)
