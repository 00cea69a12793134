"""Workers that last: processes on this machine, of which each forks a process for every piece of its work.

A cluster has workers of the same interface (`fedbench.runs.engines.ray.nodes`), so that one supervisor serves both.
"""

from __future__ import annotations

import atexit
import pickle
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from fedbench.core.main_program import without_main
from fedbench.runs.engines.forks import quiet_worker
from fedbench.runs.engines.forkserver import context
from fedbench.runs.engines.processes import exit_text
from fedbench.runs.engines.warm import WarmProcess
from fedbench.runs.prepare import Settings


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
    """Up to ``most`` processes on this machine. They end with this one."""

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
        """Call ``body(*arguments, warm, emit)`` in a new process; ``warm`` is its `WarmProcess`. The task."""
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
    warm = WarmProcess(settings, fork_without=(events,))
    quiet_worker()
    pickle.loads(pickled)(warm, events.send)


def last_line(trace: str) -> str:
    """The message of an error, of its traceback."""
    return next((line.strip() for line in reversed(trace.splitlines()) if line.strip()), "an error without words")
