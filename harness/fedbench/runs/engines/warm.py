"""A process that has loaded what runs read, and forks another for each (`fedbench.runs.engines.forks`): this end of it.

Where the system can't fork, each run gets a new process that loads everything itself.
"""

from __future__ import annotations

import multiprocessing
import pickle
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from fedbench.core.main_program import without_main
from fedbench.runs.engines.forks import STOP, Work, alone, kill_below, serve
from fedbench.runs.engines.forkserver import context
from fedbench.runs.prepare import Settings

_PATIENCE = 5.0
"""Seconds that a process is given to end before it is killed."""


@dataclass(frozen=True)
class WorkProgress:
    """What became of a piece of work since the last look."""

    events: tuple[Any, ...] = ()
    is_over: bool = False
    """Its process has ended, and all that it had started."""
    code: int | None = None
    """The exit code of its process, negative for a signal."""


class WarmProcess:
    """One piece of work at a time, each in a process of its own.

    ``memory`` is how many bytes it may take beyond an idle process, with data and backbone; more is a MemoryError.
    ``fork_without`` has it forked from this very process, where the system can, which must have a single thread and has
    imported what runs need: that spares the server of forks. It does not keep those connections of this process.
    """

    def __init__(
        self, settings: Settings, memory: int | None = None, fork_without: Sequence[Connection] | None = None
    ) -> None:
        """Raises OSError or EOFError where no further process can be started."""
        self._settings = settings
        self._memory = memory
        is_own_fork = fork_without is not None and "fork" in multiprocessing.get_all_start_methods()
        self._context: Any = multiprocessing.get_context("fork") if is_own_fork else context()
        self._can_fork = self._context.get_start_method() != "spawn"
        self._control: Connection | None = None
        self._events: Connection | None = None
        self._process: BaseProcess | None = None
        if self._can_fork:
            self._control, there = self._context.Pipe()
            inherited = (self._control, *(fork_without or ())) if is_own_fork else ()
            self._start(there, serve, there, settings, memory, inherited)

    def begin(self, work: Work) -> None:
        """Begin a piece of work; what becomes of it is `look`'s to say."""
        self._events, there = self._context.Pipe(duplex=False)
        if not self._can_fork:
            self._start(there, alone, there, self._settings, self._memory, work)
            return
        assert self._control is not None and self._process is not None
        with there:
            try:
                self._control.send_bytes(pickle.dumps(work))
                reduction.send_handle(self._control, there.fileno(), self._process.pid)
            except OSError:  # it has died since, or would wait for the rest for ever; `look` says so
                self._process.kill()

    def signs(self) -> list[Any]:
        """What `multiprocessing.connection.wait` can wait for: one of them is ready once there is something to see."""
        # the process as well: what it has started may outlive it and hold its end of a pipe
        sentinel = None if self._process is None else self._process.sentinel
        return [sign for sign in (self._control, self._events, sentinel) if sign is not None]

    def look(self) -> WorkProgress:
        """What has happened since the last look; does not wait."""
        is_dead, code, is_over = self._process is None or not self._process.is_alive(), None, False
        try:
            if self._control is not None and self._control.poll():
                code, is_over = pickle.loads(self._control.recv_bytes()), True
        except (OSError, EOFError):
            is_dead = True
        if is_dead and not is_over:
            code, is_over = self._end(), True
        events = self._emitted()
        if is_over:
            self._hang_up()
        return WorkProgress(tuple(events), is_over, code)

    def stop(self) -> None:
        """End the work under way with all that it has started; there are no further events of it."""
        if self._control is not None:
            with suppress(OSError, EOFError):
                self._control.send_bytes(STOP)
                until = time.monotonic() + _PATIENCE
                while self.can_begin() and (left := until - time.monotonic()) > 0:
                    if self._control.poll(left):
                        self._control.recv_bytes()
                        self._hang_up()
                        return
        self.close()

    def can_begin(self) -> bool:
        """Whether it is there for further work."""
        return self._control is not None and self._process is not None and self._process.is_alive()

    def close(self) -> None:
        """End the process, and all that the work under way has started."""
        self._end()
        self._hang_up()
        if self._control is not None:
            self._control.close()
            self._control = None

    def _start(self, there: Connection, target: Callable[..., None], *arguments: Any) -> None:
        self._process = self._context.Process(target=target, args=arguments, daemon=True)
        with there, without_main():  # closed here: else the end of the process would go unnoticed
            self._process.start()

    def _emitted(self) -> list[Any]:
        events = []
        try:
            while self._events is not None and self._events.poll():
                events.append(pickle.loads(self._events.recv_bytes()))
        except (OSError, EOFError):
            self._hang_up()  # a pipe at its end is always ready: waiting for it would not wait
        return events

    def _hang_up(self) -> None:
        if self._events is not None:
            self._events.close()
            self._events = None

    def _end(self) -> int | None:
        """End the process; its exit code."""
        if self._process is None:
            return None
        if not self._can_fork:
            kill_below(self._process.pid or 0)
        self._process.terminate()
        self._process.join(_PATIENCE)
        if self._process.is_alive():
            kill_below(self._process.pid or 0)
            self._process.kill()
            self._process.join()
        return self._process.exitcode


class Apart:
    """One piece of work after another, each in a process of its own.

    They are forked from ``warm``, where it is given, and from a new `WarmProcess` where there is none or it has died.
    """

    def __init__(self, settings: Settings, warm: WarmProcess | None = None) -> None:
        self._settings = settings
        self._warm = warm

    def carry_out(self, work: Work, on_event: Callable[[Any], None]) -> int | None:
        """Call ``on_event`` with what the work emits, in order; the exit code of its process, negative for a signal.

        Whatever ``on_event`` raises ends the work and passes. Raises OSError or EOFError where no further process can
        be started.
        """
        if self._warm is None or not self._warm.can_begin():
            self.close()
            self._warm = WarmProcess(self._settings)
        self._warm.begin(work)
        progress = WorkProgress()
        try:
            while not progress.is_over:
                wait(self._warm.signs())
                progress = self._warm.look()
                for event in progress.events:
                    on_event(event)
        finally:
            if not progress.is_over:
                self._warm.stop()
        return progress.code

    def close(self) -> None:
        """End the warm process, and the work under way with it."""
        if self._warm is not None:
            self._warm.close()
            self._warm = None
