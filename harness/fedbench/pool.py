"""Worker processes: how they start, and starting them before they are needed.

Importing torch and open_clip takes seconds of a core. Where the system can fork, one server process imports them once
and every worker is a fork of it, ready at once; elsewhere each worker imports them itself. Nothing here imports torch.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, SpawnContext


def context() -> ForkServerContext | SpawnContext:
    """How worker processes are started here."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    chosen = multiprocessing.get_context("forkserver")
    chosen.set_forkserver_preload(["fedbench.preload"])
    return chosen


def warm_up() -> None:
    """Let the imports of workers begin now, beside whatever this process does until it needs them."""
    if context().get_start_method() != "forkserver":
        return
    from multiprocessing import forkserver

    is_main = threading.current_thread() is threading.main_thread()
    # Ctrl-C is this process's to answer; the server would print a traceback where it hits the imports
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if is_main else None
    try:
        forkserver.ensure_running()
    finally:
        if is_main:
            signal.signal(signal.SIGINT, before)
