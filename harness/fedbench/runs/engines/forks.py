"""Processes of runs, forked from one that has loaded what they read.

Every run so begins with the same state, whatever the runs before it did to theirs, at the price of a fork: libraries,
data and backbone are shared until somebody writes to them. The warm process itself never runs code of a method. It has
one thread of Python and no accelerator in use, since neither survives a fork. What a run leaves running ends with it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import psutil
import torch

from fedbench.core.spec import RunSpec
from fedbench.kinds.registry import METHOD, PLUGIN_FILES, installed
from fedbench.runs.engines.debugging import refuse_breakpoints
from fedbench.runs.loaded import Loaded, Loader
from fedbench.runs.prepare import Settings

STOP = b""
"""In place of work: end what is under way."""
_PATIENCE = 5.0
"""Seconds after which a process that can't be killed is left to the system."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
"""Options of Linux's prctl."""

Body = Callable[[Any, Settings, Loaded, Callable[[Any], None]], None]


@dataclass(frozen=True)
class Work:
    """What a process of its own is to do: ``body(argument, settings, loaded, emit)``, a function of a module."""

    body: Body
    argument: Any
    spec: RunSpec
    """Whose data and backbone are loaded before."""


def serve(control: Connection, settings: Settings, memory: int | None, inherited: Sequence[Connection]) -> None:
    """A warm process: forks one for each `Work` that comes through ``control``, and answers with its exit code.

    With each comes the end of a pipe, for what the work emits. `STOP` ends the process at work. ``memory`` is how many
    bytes data, backbone and work may take together. ``inherited`` are the parent's ends of pipes that came with a fork.
    """
    PLUGIN_FILES.set(settings.plugin_files)  # what they define may be data and backbones, too
    for end in inherited:  # held open here, it would hide that the parent is gone
        end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent answers it
    signal.signal(signal.SIGTERM, _leave)
    ended, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    _control_process(_PR_SET_CHILD_SUBREAPER, 1)  # so that what a run leaves running becomes a child of this process
    torch.set_num_threads(1)  # a pool of threads would be missing after a fork
    if memory is not None:
        _limit_memory(psutil.Process().memory_info().data + memory)
    parent = multiprocessing.parent_process()
    assert parent is not None
    if inherited:  # forked from the worker itself, whose end it would notice only once all is loaded
        _control_process(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent.pid:
            return
    loader = Loader(settings)
    installed(METHOD)  # read here once instead of in every run
    try:
        while parent.sentinel not in wait([control, parent.sentinel]):
            message = control.recv_bytes()
            if message == STOP:  # what it is to end has ended by itself
                continue
            work: Work = pickle.loads(message)
            with Connection(reduction.recv_handle(control), readable=False) as events:
                child = _fork(work, settings, loader.load(work.spec), control, events)
            code = _watch(child, control, parent.sentinel, ended)
            _end_children()
            control.send_bytes(pickle.dumps(code))
    except (EOFError, ConnectionError):  # the parent is gone
        return
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _end_children()


def alone(events: Connection, settings: Settings, memory: int | None, work: Work) -> None:
    """A process with a single piece of work, where the system can't fork."""
    quiet_worker()
    PLUGIN_FILES.set(settings.plugin_files)
    if memory is not None:
        _limit_memory(psutil.Process().memory_info().data + memory)
    _carry_out(work, settings, Loaded(), events)


def quiet_worker() -> None:
    """To be called first in a worker process: Ctrl-C is the parent's to answer, and the worker ends with it."""
    # Ctrl-C reaches the whole process group; only the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def kill_below(process: int) -> None:
    """Kill all processes that ``process`` has started, and those that they have."""
    with suppress(psutil.Error):
        for one in psutil.Process(process).children(recursive=True):
            with suppress(psutil.Error):
                one.kill()


def _leave(*_: object) -> NoReturn:
    raise SystemExit(0)


def _leave_with_parent() -> None:
    # A parent that is killed outright can't stop its workers, and they would train on for nobody.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _fork(work: Work, settings: Settings, loaded: Loaded, control: Connection, events: Connection) -> int:
    """The id of a new process that does ``work``."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    ours = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        control.close()
        _control_process(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if sys.platform != "linux":
            os.setpgid(0, 0)
        if os.getppid() == ours:
            _carry_out(work, settings, loaded, events)
    finally:
        os._exit(1)


def _carry_out(work: Work, settings: Settings, loaded: Loaded, events: Connection) -> NoReturn:
    """Do the work and end this process, whatever threads and processes the work has started."""
    code, ours = 1, os.getpid()
    refuse_breakpoints()
    try:
        work.body(work.argument, settings, loaded, lambda event: events.send_bytes(pickle.dumps(event)))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):  # a run may have closed or replaced them
            sys.stdout.flush()
            sys.stderr.flush()
        if sys.platform != "linux" and os.getpid() == ours:  # there, the warm process adopts and ends them
            kill_below(ours)
        os._exit(
            code
        )  # without what a run has registered for the end of its process: the parent's own is registered there as well


def _watch(child: int, control: Connection, parent: int, ended: int) -> int:
    """The exit code of ``child``, which is killed where the parent says so. EOFError once the parent is gone."""
    while True:
        ready = wait([control, parent, ended])
        if parent in ready:
            raise EOFError
        if control in ready and control.recv_bytes() == STOP:
            os.kill(child, signal.SIGKILL)
        if ended in ready:
            os.read(ended, 4096)
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                if sys.platform != "linux":
                    with suppress(OSError):
                        os.killpg(child, signal.SIGKILL)
                return os.waitstatus_to_exitcode(status)


def _end_children() -> None:
    """Kill and reap all processes below this one."""
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until:
        try:
            reaped, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not reaped:
            kill_below(os.getpid())
            time.sleep(0.002)


def _control_process(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _limit_memory(limit: int) -> None:
    """Let no more than ``limit`` bytes of this process be its own data; an allocation beyond fails."""
    import resource  # not on every system

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
