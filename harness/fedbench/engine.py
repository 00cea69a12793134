"""Run many specs, in this process or in a pool of them; the same spec gives the same numbers either way."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import traceback
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from fedbench.errors import FedbenchError
from fedbench.hookspecs import Hooks, RoundRecord, RunInfo, RunResult, hookimpl
from fedbench.prepare import Settings
from fedbench.runs import run_spec
from fedbench.spec import RunSpec

RUN_THREAD = "fedbench-run"
"""Name of the thread that runs a spec in this process."""


@dataclass(frozen=True)
class RunStarted:
    """A run is assembled."""

    spec: RunSpec
    info: RunInfo


@dataclass(frozen=True)
class RoundFinished:
    """A round of a run is done."""

    spec: RunSpec
    record: RoundRecord


@dataclass(frozen=True)
class RunFinished:
    """A run is done."""

    spec: RunSpec
    info: RunInfo
    result: RunResult


@dataclass(frozen=True)
class RunFailed:
    """A run ended early. ``reason`` is one line; ``details`` the traceback, empty for bad input."""

    spec: RunSpec
    reason: str
    details: str = ""


Event = RunStarted | RoundFinished | RunFinished | RunFailed


class _Forward:
    """A listener inside a run that hands every notification on as an event."""

    def __init__(self, emit: Any) -> None:
        self.emit = emit

    @hookimpl
    def run_started(self, spec: RunSpec, info: RunInfo) -> None:
        """Forward."""
        self.emit(RunStarted(spec, info))

    @hookimpl
    def round_finished(self, spec: RunSpec, record: RoundRecord) -> None:
        """Forward."""
        self.emit(RoundFinished(spec, record))

    @hookimpl
    def run_finished(self, spec: RunSpec, info: RunInfo, result: RunResult) -> None:
        """Forward."""
        self.emit(RunFinished(spec, info, result))


def execute(specs: Sequence[RunSpec], settings: Settings, workers: int) -> Generator[Event, None, None]:
    """The events of all runs as they happen; with more than one worker, runs interleave.

    A run that fails yields `RunFailed` and the others go on. Closing the generator ends the workers.
    """
    if workers <= 1 or len(specs) <= 1:
        yield from _in_process(specs, settings)
    else:
        yield from _in_pool(specs, settings, min(workers, len(specs)))


def notify(hooks: Hooks, event: Event) -> None:
    """Call the notification hook of ``event`` on the listeners behind ``hooks``."""
    if isinstance(event, RunStarted):
        hooks.run_started(spec=event.spec, info=event.info)
    elif isinstance(event, RoundFinished):
        hooks.round_finished(spec=event.spec, record=event.record)
    elif isinstance(event, RunFinished):
        hooks.run_finished(spec=event.spec, info=event.info, result=event.result)
    else:
        hooks.run_failed(spec=event.spec, reason=event.reason)


def default_workers() -> int:
    """One worker a core that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _in_process(specs: Sequence[RunSpec], settings: Settings) -> Iterator[Event]:
    # A thread feeds the queue, so that events are seen while the run goes on.
    for spec in specs:
        events: queue.Queue[Event | None] = queue.Queue()

        def work(spec: RunSpec = spec, events: queue.Queue[Event | None] = events) -> None:
            try:
                _attempt(spec, settings, events.put)
            finally:
                events.put(None)

        thread = threading.Thread(target=work, name=RUN_THREAD, daemon=True)
        thread.start()
        while (event := events.get()) is not None:
            yield event
        thread.join()


def _in_pool(specs: Sequence[RunSpec], settings: Settings, workers: int) -> Iterator[Event]:
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        events = manager.Queue()
        pool = ProcessPoolExecutor(workers, mp_context=context, initializer=quiet_worker)
        try:
            futures: dict[Future[None], RunSpec] = {
                pool.submit(_attempt_remotely, spec, settings, events): spec for spec in specs
            }
            running = set(futures)
            while running:
                done, running = wait(running, timeout=0.05)
                yield from _drain(events)
                for future in done:
                    error = future.exception()
                    if isinstance(error, BrokenProcessPool):
                        reason = "its worker process died (killed, or out of memory); try --workers 1"
                        yield RunFailed(futures[future], reason)
                    elif error is not None:
                        raise error
            yield from _drain(events)
        except BaseException:
            for process in list((pool._processes or {}).values()):
                process.terminate()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _drain(events: Any) -> Iterator[Event]:
    while True:
        try:
            yield events.get_nowait()
        except queue.Empty:
            return


def _attempt(spec: RunSpec, settings: Settings, emit: Any) -> None:
    try:
        run_spec(spec, settings, [_Forward(emit)])
    except FedbenchError as error:
        emit(RunFailed(spec, str(error)))
    except Exception as error:
        notes = "; ".join(getattr(error, "__notes__", []))
        where = f" ({notes})" if notes else ""
        emit(RunFailed(spec, f"{type(error).__name__}: {error}{where}", traceback.format_exc()))


def _attempt_remotely(spec: RunSpec, settings: Settings, events: Any) -> None:
    _attempt(spec, settings, events.put)


def quiet_worker() -> None:
    """To be called first in a worker process: Ctrl-C is the parent's to answer, and the worker ends with it."""
    # Ctrl-C reaches the whole process group; only the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    # A parent that is killed outright can't stop its workers, and they would train on for nobody.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
