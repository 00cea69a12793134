"""Engines carry out runs: in this process, in workers on this machine, on a Ray cluster; with the same numbers.

An engine only begins runs, says what happens to them and ends those that it has to stop. Which run begins when, what is
tried again and what has taken too long is decided in `fedbench.runs.engines.engine`, alike for all engines.

Here is also how worker processes start, and starting them before they are needed. Importing torch and open_clip takes
seconds of a core. Where the system can fork, one server process imports them once and every worker is a fork of it;
elsewhere each worker imports them itself. Nothing here imports torch. Workers that are forked see the environment
variables that were set when the server started: the first call of `context` or `warm_up` in a process.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, Protocol

from fedbench.core.main_program import without_main

if TYPE_CHECKING:  # a command that starts the server of forks imports this package before torch
    from multiprocessing.context import ForkServerContext, SpawnContext

    from fedbench.core.spec import RunSpec
    from fedbench.runs.engines.events import Event, Lost

EngineName = Literal["in-process", "processes", "ray"]
ENGINES: tuple[EngineName, ...] = ("in-process", "processes", "ray")


class Engine(Protocol):
    """Carries out runs side by side."""

    @property
    def is_one_machine(self) -> bool:
        """Whether all runs share the memory of one machine, so that one that found too little is better tried alone."""
        ...

    def slots(self) -> int:
        """How many runs it can carry out at the same time."""
        ...

    def has_room(self, spec: RunSpec, *, alone: bool = False) -> bool:
        """Whether this run can begin now, while there is a slot; ``alone`` with a CUDA card to itself."""
        ...

    def begin(self, spec: RunSpec, *, alone: bool = False) -> None:
        """Begin a run. Not to be called without a free slot and room for it."""
        ...

    def wait(self, seconds: float) -> list[Event | Lost]:
        """What has happened since the last call, in order for each run; waits up to ``seconds`` for something.

        A run ends with `RunFinished`, `RunFailed` or `Lost`, and its slot is free again.
        """
        ...

    def has_begun(self, spec: RunSpec) -> bool:
        """Whether a run that was begun has a process by now, rather than a place in somebody's queue."""
        ...

    def stop(self, spec: RunSpec, *, gently: bool = False) -> list[Event | Lost]:
        """End a run that is under way, at once; its slot is free again.

        Its process ends with it, but ``gently`` spares a process that can be had for another run within seconds.
        There are no further events of the run. Those that were not told yet are returned where it had ended by itself.
        """
        ...

    def clear(self) -> None:
        """End processes that have no run, so that nothing of the machine is held but by runs under way."""
        ...

    def close(self) -> None:
        """End whatever is under way, and give back what the engine holds."""
        ...


def can_fork() -> bool:
    """Whether worker processes are forked here, from one that has imported what they need."""
    return "forkserver" in multiprocessing.get_all_start_methods()


def context() -> ForkServerContext | SpawnContext:
    """How worker processes are started here; where they are forked, their server runs after this call.

    A worker imports from where this process does, in the order of its ``sys.path`` at the first call.
    """
    if not can_fork():
        return multiprocessing.get_context("spawn")
    chosen = multiprocessing.get_context("forkserver")
    chosen.set_forkserver_preload(["fedbench.runs.engines.preload"])
    _start_server()
    return chosen


def warm_up() -> None:
    """Let the imports of workers begin now, beside whatever this process does until it needs them."""
    context()


def _start_server() -> None:
    from multiprocessing import forkserver

    is_main = threading.current_thread() is threading.main_thread()
    # Ctrl-C is this process's to answer; the server would print a traceback where it hits the imports
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if is_main else None
    try:
        with _same_imports(), without_main():
            forkserver.ensure_running()
    finally:
        if is_main:
            signal.signal(signal.SIGINT, before)


@contextmanager
def _same_imports() -> Iterator[None]:
    # Python before 3.12 drops the parent's path on the way to the server, and puts the current folder first
    variables = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONSAFEPATH": "1"}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
