"""A pool of processes on this machine, each with one run at a time.

Whatever a run does to its process (dies, hangs, fills the memory) meets nobody else: every process has a pipe of its
own to this one, nothing is shared between them, and another takes its place.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import psutil

from fedbench.engines.attempt import attempt
from fedbench.errors import FedbenchError
from fedbench.events import Event, Lost, RunFailed, RunFinished
from fedbench.pool import context
from fedbench.prepare import Settings
from fedbench.spec import RunSpec

_GROWN = 2**30
"""Bytes by which a run may leave its process larger; the next run gets a new one beyond that."""
_PATIENCE = 5.0
"""Seconds that a process is given to end before it is killed."""


@dataclass(eq=False)
class _Worker:
    process: BaseProcess
    pipe: Connection
    spec: RunSpec | None = None
    """The run it has."""


class Processes:
    """Up to ``workers`` runs side by side, each in a process of its own with one thread.

    ``memory`` is how many bytes a run may take beyond what its process begins with; more is a MemoryError in the run.
    """

    is_one_machine = True

    def __init__(self, settings: Settings, workers: int, memory: int | None = None) -> None:
        if memory is not None and sys.platform != "linux":
            raise FedbenchError("a memory limit for runs needs Linux; leave --memory-limit out.")
        self._settings = settings
        self._slots = workers
        self._memory = memory
        self._context: Any = context()
        self._workers: list[_Worker] = []
        self._unbegun: list[Event | Lost] = []

    def slots(self) -> int:
        """The size of the pool."""
        return self._slots

    def begin(self, spec: RunSpec) -> None:
        """Begin a run, in a process that is free or in a new one."""
        try:
            worker = next((w for w in self._workers if w.spec is None and w.process.is_alive()), None) or self._new()
        except (OSError, EOFError) as error:  # no further process, or no server of forks; `wait` says so
            self._unbegun.append(Lost(spec, f"no process could be started for it: {type(error).__name__} {error}"))
            return
        worker.spec = spec
        with suppress(OSError):  # it has died since; `wait` says so
            worker.pipe.send_bytes(pickle.dumps(spec))

    def wait(self, seconds: float) -> list[Event | Lost]:
        """Events of all processes; `Lost` for each that ended before its run."""
        heard: list[Event | Lost] = [*self._unbegun]
        self._unbegun.clear()
        busy = [worker for worker in self._workers if worker.spec is not None]
        if not busy and not heard:
            time.sleep(seconds)
        # the process as well: what it has started may outlive it and hold its end of the pipe
        signs = [sign for worker in busy for sign in (worker.pipe, worker.process.sentinel)]
        ready = wait(signs, 0 if heard else seconds) if signs else []
        for worker in busy:
            if worker.pipe in ready or worker.process.sentinel in ready:
                heard += self._heard(worker)
        return heard

    def _heard(self, worker: _Worker) -> list[Event | Lost]:
        """What a process has said, or that it is gone."""
        has_ended = not worker.process.is_alive()
        said: list[Event | Lost] = []
        try:
            while worker.pipe.poll() and worker.spec is not None:
                event, leaves = pickle.loads(worker.pipe.recv_bytes())
                said.append(event)
                if isinstance(event, RunFinished | RunFailed):
                    worker.spec = None
                if leaves:
                    self._drop(worker)
                    return said
        except (OSError, EOFError):
            has_ended = True
        if has_ended:
            spec, reason = worker.spec, _told(self._drop(worker))
            said += [Lost(spec, reason)] if spec is not None else []
        return said

    def has_begun(self, spec: RunSpec) -> bool:
        """At once."""
        return True

    def stop(self, spec: RunSpec) -> None:
        """Kill the process that has the run."""
        for worker in [w for w in self._workers if w.spec is not None and w.spec.run_id == spec.run_id]:
            worker.process.kill()
            self._drop(worker)

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers:
            worker.process.terminate()
        for worker in list(self._workers):
            self._drop(worker)

    def _new(self) -> _Worker:
        here, there = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(there, self._settings, self._memory), daemon=True)
        process.start()
        there.close()  # else the end of the process would go unnoticed
        self._workers.append(_Worker(process, here))
        return self._workers[-1]

    def _drop(self, worker: _Worker) -> int | None:
        """Let go of a process that ends, or is to; its exit code."""
        self._workers.remove(worker)
        worker.process.join(_PATIENCE)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        worker.pipe.close()
        return worker.process.exitcode


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


def _serve(pipe: Connection, settings: Settings, memory: int | None) -> None:
    quiet_worker()
    ours = psutil.Process()
    if memory is not None:
        _limit_memory(ours.memory_info().data + memory)
    while True:
        try:
            spec: RunSpec = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        before = ours.memory_info().rss
        ends: list[Event] = []

        def emit(event: Event, ends: list[Event] = ends) -> None:
            if isinstance(event, RunFinished | RunFailed):
                ends.append(event)
            else:
                pipe.send_bytes(pickle.dumps((event, False)))

        attempt(spec, settings, emit)
        # told with the end, so that no further run is given to a process that is about to leave
        leaves = ours.memory_info().rss - before > _GROWN
        pipe.send_bytes(pickle.dumps((ends[-1], leaves)))
        if leaves:
            return


def _limit_memory(limit: int) -> None:
    """Let no more than ``limit`` bytes of this process be its own data; an allocation beyond fails."""
    import resource  # not on every system

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _told(code: int | None) -> str:
    """How a process ended, in words."""
    if code is not None and code < 0:
        known = {int(one): one.name for one in signal.Signals}
        name = known.get(-code, f"signal {-code}")
        memory = "; is there too little memory? try fewer --jobs" if -code == signal.SIGKILL else ""
        return f"its process was killed by {name}{memory}"
    return f"its process ended with exit code {code}"
