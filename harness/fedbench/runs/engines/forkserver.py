"""Worker processes: how they start, and starting them before they are needed.

Importing torch and open_clip takes seconds of a core. Where the system can fork, one server process imports them once
and every worker is a fork of it, ready at once; elsewhere each worker imports them itself. Nothing here imports torch.

Workers that are forked see the environment variables that were set when the server started: the first call of
`context` or `warm_up` in a process. What is set later doesn't reach them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fedbench.core.main_program import without_main

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, SpawnContext


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
