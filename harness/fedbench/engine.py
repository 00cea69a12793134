"""Run many specs, in this process or in a pool of them; the same spec gives the same numbers either way."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import queue
import signal
import threading
import traceback
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing.managers import SyncManager
from typing import Any

from fedbench.errors import FedbenchError
from fedbench.hookspecs import Hooks, RoundRecord, RunInfo, RunResult, hookimpl
from fedbench.pool import context
from fedbench.prepare import Settings
from fedbench.runs import run_spec
from fedbench.spec import RunSpec

_LOOK_SECONDS = 0.5
"""Between two looks whether a worker has died. Events themselves are waited for."""
POOL_DIED = (
    "a worker process died (killed, or out of memory), and the pool with it; finished runs are kept and the same "
    "command resumes the others; try --workers 1"
)
"""Why the runs failed that were not finished then, in whichever worker they were."""
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

    Workers beyond the number of runs train clients of a run side by side. A run that fails yields `RunFailed` and the
    others go on. Closing the generator ends the workers.
    """
    gc.enable()
    settings = replace(settings, cores=max(workers // max(len(specs), 1), 1))
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
    starting = context()
    manager = SyncManager(ctx=starting)
    # its process ends with this one, however that ends
    manager.start(quiet_worker)
    with manager:
        events = manager.Queue()
        pool = ProcessPoolExecutor(workers, mp_context=starting, initializer=quiet_worker)
        try:
            # every run ends with an event, unless its process does first
            unended: dict[str, Future[None]] = {
                spec.run_id: pool.submit(_attempt_remotely, spec, settings, events) for spec in specs
            }
            by_id = {spec.run_id: spec for spec in specs}
            while unended:
                try:
                    event: Event = pickle.loads(events.get(timeout=_LOOK_SECONDS))
                except queue.Empty:
                    for failure in _died(unended):
                        del unended[failure]
                        yield RunFailed(by_id[failure], POOL_DIED)
                    continue
                if event.spec.run_id not in unended:
                    continue  # said after its process was taken for dead
                if isinstance(event, RunFinished | RunFailed):
                    del unended[event.spec.run_id]
                yield event
        except BaseException:
            for process in list((pool._processes or {}).values()):
                process.terminate()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _died(futures: Mapping[str, Future[None]]) -> list[str]:
    """The runs whose process has gone; any other error of the pool is raised."""
    died = []
    for run_id, future in futures.items():
        error = future.exception() if future.done() else None
        if isinstance(error, BrokenProcessPool):
            died.append(run_id)
        elif error is not None:
            raise error
    return died


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
    # as bytes, which the queue's own process passes on without building the tensors and records in them
    _attempt(spec, settings, lambda event: events.put(pickle.dumps(event)))


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
