"""Processes on this machine, one for each run, forked from one that has loaded what it reads.

Whatever a run does to its process (dies, hangs, fills the memory, changes what all code in it shares) meets nobody
else: every process has a pipe of its own to this one, and ends with its run.
"""

from __future__ import annotations

import signal
import sys
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import wait

from fedbench.core.errors import FedbenchError
from fedbench.core.spec import RunSpec
from fedbench.runs.engines.attempt import attempt
from fedbench.runs.engines.events import Event, Lost, RunFailed, RunFinished
from fedbench.runs.engines.forks import Work
from fedbench.runs.engines.warm import WarmProcess
from fedbench.runs.prepare import Settings


@dataclass(eq=False)
class _Worker:
    process: WarmProcess
    spec: RunSpec | None = None
    """The run it has."""
    end: Event | None = None
    """How that ended; reported once its process is gone as well."""


class Processes:
    """Up to ``workers`` runs side by side, each in a process of its own with one thread.

    ``memory`` is how many bytes a run may take beyond what its process begins with, data and backbone included; more is
    a MemoryError in the run.
    """

    is_one_machine = True

    def __init__(self, settings: Settings, workers: int, memory: int | None = None) -> None:
        if memory is not None and sys.platform != "linux":
            raise FedbenchError("a memory limit for runs needs Linux; leave --memory-limit out.")
        self._settings = settings
        self._slots = workers
        self._memory = memory
        self._workers: list[_Worker] = []
        self._unbegun: list[Event | Lost] = []

    def slots(self) -> int:
        """The size of the pool."""
        return self._slots

    def begin(self, spec: RunSpec) -> None:
        """Begin a run, forked from a process that is free or from a new one."""
        try:
            worker = next((w for w in self._workers if w.spec is None), None) or self._new()
            worker.process.begin(Work(attempt, spec, spec))
        except (OSError, EOFError) as error:  # no further process, or no server of forks; `wait` says so
            self._unbegun.append(Lost(spec, f"no process could be started for it: {type(error).__name__} {error}"))
            return
        worker.spec = spec

    def wait(self, seconds: float) -> list[Event | Lost]:
        """Events of all processes; `Lost` for each that ended before its run."""
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
        for emitted in progress.events:
            # a method may have written to its own spec, by which events are matched to runs
            event = emitted if worker.spec is None else replace(emitted, spec=worker.spec)
            if isinstance(event, RunFinished | RunFailed):
                worker.end = event
            else:
                events.append(event)
        if progress.is_over and worker.spec is not None:
            events.append(worker.end or Lost(worker.spec, exit_text(progress.code)))
            self._freed(worker)
        return events

    def has_begun(self, spec: RunSpec) -> bool:
        """At once."""
        return True

    def stop(self, spec: RunSpec) -> None:
        """Kill the process that has the run."""
        for worker in [w for w in self._workers if w.spec is not None and w.spec.run_id == spec.run_id]:
            worker.process.stop()
            self._freed(worker)

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers:
            worker.process.close()
        self._workers.clear()

    def _new(self) -> _Worker:
        self._workers.append(_Worker(WarmProcess(self._settings, self._memory)))
        return self._workers[-1]

    def _freed(self, worker: _Worker) -> None:
        """Let the worker have another run, or go."""
        worker.spec = worker.end = None
        if not worker.process.can_begin():
            worker.process.close()
            self._workers.remove(worker)


def exit_text(code: int | None) -> str:
    """How a process ended, in words."""
    if code is not None and code < 0:
        known = {int(one): one.name for one in signal.Signals}
        name = known.get(-code, f"signal {-code}")
        memory = "; is there too little memory? try fewer --jobs" if -code == signal.SIGKILL else ""
        return f"its process was killed by {name}{memory}"
    return f"its process ended with exit code {code}"
