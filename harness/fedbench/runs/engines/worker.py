"""Processes that carry out one piece of work after another: runs, looks at runs.

A worker keeps what it has imported and loaded, and its context on a CUDA card, so that a run of the same data and
backbone begins at once. The next piece of work gets a new worker after work that failed, work with a plug-in that does
not come with fedbench, work that changed what later runs read (`fedbench.runs.untouched`), and after `RENEWED` pieces
of work. What a piece of work leaves running ends with it.
"""

from __future__ import annotations

import contextvars
import ctypes
import gc
import logging
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
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import psutil
import torch

from fedbench.core.errors import FedbenchError
from fedbench.core.main_program import without_main
from fedbench.core.spec import RunSpec, stack_names
from fedbench.kinds.registry import METHOD, PLUGIN_FILES, comes_with_fedbench, installed, look_up
from fedbench.plugins.provenance import plugins_of
from fedbench.runs.engines import context
from fedbench.runs.engines.cards import first_card
from fedbench.runs.prepare import Loaded, Loader, Settings
from fedbench.runs.untouched import Traces

_LOG = logging.getLogger(__name__)
RENEWED = 100
"""Pieces of work after which a worker is replaced: libraries leak a little."""
_PATIENCE = 5.0
"""Seconds that work is given to stop by itself, and processes to be gone."""
_STOP = b""
"""In place of work: leave what is under way."""
_CHILD_SUBREAPER = 36
"""An option of Linux's prctl."""

Body = Callable[[Any, Settings, Loaded, Callable[[Any], None]], bool]


@dataclass(frozen=True)
class Work:
    """What a worker is to do: ``body(argument, settings, loaded, emit)``, a function of a module.

    It says whether it ended well.
    """

    body: Body
    argument: Any
    spec: RunSpec
    """The run whose data and backbone are loaded first."""


@dataclass(frozen=True)
class Seen:
    """What became of a piece of work since the last look."""

    events: tuple[Any, ...] = ()
    is_over: bool = False
    code: int | None = None
    """The exit code of its process, negative for a signal; 0 where it has ended in order."""


@dataclass(frozen=True)
class OnCard:
    """Bytes of a CUDA card's memory."""

    free: int
    """Left when the work began."""
    peak: int = 0
    """The most that torch has held for the work under way."""


class Worker:
    """One piece of work at a time, in a process that is there for further ones while `can_begin`.

    ``memory`` is how many bytes it may take beyond an idle process, with data and backbone; more is a MemoryError.
    Of all CUDA cards it sees only the ``card``, if that is given, as ``cuda``.
    """

    def __init__(self, settings: Settings, memory: int | None = None, card: int | None = None) -> None:
        """Raises OSError or EOFError where no further process can be started."""
        chosen = context()
        self._pipe, there = chosen.Pipe()
        self._process: BaseProcess = chosen.Process(target=_serve, args=(there, settings, memory, card), daemon=True)
        with there, without_main():  # closed here: else the end of the process would go unnoticed
            self._process.start()
        self._is_leaving = False
        self.card = card
        self.on_card: OnCard | None = None
        """As far as it has told; None for one that was on no card yet."""

    def begin(self, work: Work) -> None:
        """Begin a piece of work; what becomes of it is `look`'s to say."""
        with suppress(OSError):  # it has died since; `look` says so
            self._pipe.send_bytes(pickle.dumps(work))

    def signs(self) -> list[Any]:
        """What `multiprocessing.connection.wait` can wait for: one of them is ready once there is something to see."""
        # the process as well: what it has started may outlive it and hold its end of a pipe
        return [self._pipe, self._process.sentinel]

    def look(self) -> Seen:
        """What has happened since the last look; does not wait."""
        is_dead = not self._process.is_alive()
        events: list[Any] = []
        try:
            while self._pipe.poll():
                message = pickle.loads(self._pipe.recv_bytes())
                if isinstance(message, _Over):
                    self._is_leaving = message.is_last
                    if message.changed:
                        _LOG.debug("a worker is replaced: its last work changed %s", message.changed)
                    return Seen(tuple(events), is_over=True, code=0)
                if isinstance(message, OnCard):
                    self.on_card = message
                else:
                    events.append(message)
        except (OSError, EOFError):
            is_dead = True
        if not is_dead:
            return Seen(tuple(events))
        self._process.join(_PATIENCE)  # its end of the pipe is closed before it has an exit code
        code = self._process.exitcode
        self.close()
        return Seen(tuple(events), is_over=True, code=code)

    def stop(self, *, gently: bool = False) -> None:
        """End the work under way with all that it has started; there are no further events of it.

        ``gently`` lets it leave at its next event, so that the worker is there for further work.
        """
        with suppress(OSError, EOFError):
            if gently:
                self._pipe.send_bytes(_STOP)
            until = time.monotonic() + _PATIENCE
            while gently and self._pipe.poll(max(until - time.monotonic(), 0)):
                if self.look().is_over:
                    return
        self.close()

    def can_begin(self) -> bool:
        """Whether it is there for further work."""
        return not self._is_leaving and not self._pipe.closed and self._process.is_alive()

    def close(self) -> None:
        """End the process, and all that the work under way has started."""
        if not self._pipe.closed:
            _kill_tree(self._process.pid or 0)
            self._process.join()
            if self._process.exitcode:
                _kill_orphans()
            self._pipe.close()
        self._is_leaving = True


class Apart:
    """One piece of work after another, in one worker as long as it can, and after it in new ones."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._worker: Worker | None = None

    def carry_out(self, work: Work, on_event: Callable[[Any], None]) -> int | None:
        """Call ``on_event`` with what the work emits, in order; the exit code of its process, negative for a signal.

        Whatever ``on_event`` raises ends the work and passes. Raises OSError or EOFError where no further process can
        be started.
        """
        card = first_card(work.spec, self._settings)
        if self._worker is None or not self._worker.can_begin() or self._worker.card != card:
            self.close()
            self._worker = Worker(self._settings, card=card)
        self._worker.begin(work)
        progress = Seen()
        try:
            while not progress.is_over:
                wait(self._worker.signs())
                progress = self._worker.look()
                for event in progress.events:
                    on_event(event)
        except Exception:
            if not progress.is_over:
                self._worker.stop(gently=True)
            raise
        except BaseException:
            self.close()
            raise
        return progress.code

    def close(self) -> None:
        """End the worker, and the work under way with it."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def last_line(trace: str) -> str:
    """The message of an error, of its traceback."""
    return next((line.strip() for line in reversed(trace.splitlines()) if line.strip()), "an error without words")


@dataclass(frozen=True)
class _Over:
    """A piece of work has ended; ``is_last``: so does the worker."""

    is_last: bool
    changed: str
    """What the work has changed for others, in words."""


class Stopped(BaseException):
    """Raised in work that is to be left."""


def _serve(pipe: Connection, settings: Settings, memory: int | None, card: int | None) -> None:
    """What a worker does until its parent is gone or it has to be replaced."""
    if card is not None:
        # not torch.cuda.set_device, which is for one thread alone; CUDA reads this when it is first used
        os.environ["CUDA_VISIBLE_DEVICES"] = _name_of(card, os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    quiet_worker()
    adopt_what_is_left()
    sys.breakpointhook = _refuse_breakpoint
    torch.set_num_threads(1)
    PLUGIN_FILES.set(settings.plugin_files)  # what they define may be data and backbones, too
    if memory is not None:
        _limit_memory(psutil.Process().memory_info().data + memory)
    loader = Loader(settings)
    installed(METHOD)  # read here once instead of in every run
    traces = Traces()
    # a limit is to hold for what a run takes itself
    left = 1 if settings.plugin_files or memory is not None else RENEWED
    while True:
        try:
            message = pipe.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)
        if message == _STOP:  # what it is to end has ended by itself
            continue
        work: Work = pickle.loads(message)
        # CUDA's context is made here, before the traces: torch may set environment variables with it
        on_card = _on_card(work.spec.device)
        loaded, left = loader.load(work.spec), left - 1
        traces.begin([loaded.dataset, loaded.backbone])
        is_well = _carry_out(work, settings, loaded, pipe, on_card)
        changed = traces.changed()
        is_last = not is_well or bool(changed) or left <= 0 or not _comes_with_fedbench(work.spec)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            gc.collect()  # graphs refer to steps, and these to graphs
            torch.cuda.empty_cache()  # for runs of other workers
        _end_children()
        for stream in (sys.stdout, sys.stderr):
            with suppress(BaseException):  # a run may have closed or replaced them
                stream.flush()
        try:
            pipe.send_bytes(pickle.dumps(_Over(is_last, changed)))
        except OSError:
            is_last = True
        if is_last:  # without what a run has registered for the end of its process
            os._exit(0)


def _comes_with_fedbench(spec: RunSpec) -> bool:
    """Whether all code of the run does. Other code may keep what it likes in its modules and classes."""
    try:
        methods = [look_up(METHOD, name).source for name in stack_names(spec.method)]
        return all(map(comes_with_fedbench, [*methods, *(plugin.source for plugin in plugins_of(spec))]))
    except FedbenchError:  # a name that nothing has
        return False


def _name_of(card: int, visible: str) -> str:
    """What CUDA_VISIBLE_DEVICES calls the card that is that number of the ``visible`` ones; of all, where it is ""."""
    return visible.split(",")[card].strip() if visible else str(card)


def _on_card(device: str) -> OnCard | None:
    """Work begins on the card of a ``device``; None for another device, and for a card that can't be used."""
    if device.startswith("cuda"):
        with suppress(Exception):  # the run meets it again, and says so
            free, _ = torch.cuda.mem_get_info(device)
            torch.cuda.reset_peak_memory_stats(device)
            return OnCard(free)
    return None


def _carry_out(work: Work, settings: Settings, loaded: Loaded, pipe: Connection, on_card: OnCard | None) -> bool:
    """Whether the work ended well."""

    def emit(event: Any) -> None:
        if pipe.poll() and pipe.recv_bytes() == _STOP:
            raise Stopped
        if on_card is not None:
            peak = torch.cuda.max_memory_reserved(work.spec.device)
            pipe.send_bytes(pickle.dumps(replace(on_card, peak=peak)))
        pipe.send_bytes(pickle.dumps(event))

    try:
        return contextvars.copy_context().run(work.body, work.argument, settings, loaded, emit)
    except Stopped:
        return True
    except BaseException:
        with suppress(BaseException):
            traceback.print_exc()
            sys.stderr.flush()
        _end_children()
        os._exit(1)


def adopt_what_is_left() -> None:
    """Let processes that lose their parent become children of this one, if they began below it; on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_CHILD_SUBREAPER, 1, 0, 0, 0)


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
        _kill(_below(os.getpid()))
        os._exit(1)


def _refuse_breakpoint(*_: object, **__: object) -> None:
    raise FedbenchError(
        "breakpoint() is in a process of its own here, which no terminal reaches; run with --engine in-process, and "
        "with --executor sequential to stop at one client after another."
    )


def _end_children() -> None:
    """Kill and reap all processes below this one."""
    until = time.monotonic() + _PATIENCE
    while hasattr(os, "WNOHANG") and time.monotonic() < until:
        try:
            reaped, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not reaped:
            _kill(_below(os.getpid()))
            time.sleep(0.002)


def _kill_tree(pid: int) -> None:
    """Kill a process with all that it has started, and wait until they are gone."""
    with suppress(psutil.Error):
        root = psutil.Process(pid)
        root.suspend()  # it must not start others meanwhile
        below: list[psutil.Process] = []
        while new := [process for process in _below(pid) if process not in below]:
            _kill(new)
            below += new
        root.kill()
        psutil.wait_procs(below, timeout=_PATIENCE)


def _kill_orphans() -> None:
    """Kill what a worker had started that died by itself: the server of forks has adopted it (`preload`)."""
    server = getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)  # not on every system
    ours = {process.pid for process in multiprocessing.active_children()}
    with suppress(psutil.Error):
        there = psutil.Process(server._forkserver_pid).children() if server and server._forkserver_pid else []
        orphans = [below for process in there if process.pid not in ours for below in (*_below(process.pid), process)]
        _kill(orphans)
        psutil.wait_procs(orphans, timeout=_PATIENCE)


def _below(pid: int) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return psutil.Process(pid).children(recursive=True)
    return []


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.kill()


def _limit_memory(limit: int) -> None:
    """Let no more than ``limit`` bytes of this process be its own data; an allocation beyond fails."""
    import resource  # not on every system

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def exit_text(code: int | None) -> str:
    """How a process ended, in words."""
    if code is not None and code < 0:
        known = {int(each): each.name for each in signal.Signals}
        name = known.get(-code, f"signal {-code}")
        memory = "; is there too little memory? try fewer --jobs" if -code == signal.SIGKILL else ""
        return f"its process was killed by {name}{memory}"
    return f"its process ended with exit code {code}"
