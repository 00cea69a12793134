"""One attempt at a run, wherever it is carried out: its notifications become events, and so does its failure."""

from __future__ import annotations

import errno
import traceback
from collections.abc import Iterator
from pathlib import Path

from fedbench.errors import FedbenchError
from fedbench.events import Emit, Forward, RunFailed
from fedbench.prepare import Settings
from fedbench.runs import run_spec
from fedbench.spec import RunSpec

_PASSING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE})
"""Errors of the system that are none of the run's: disk full, quota, device, memory, open files."""
_NO_MEMORY = ("can't allocate memory", "CUDA out of memory", "Cannot allocate memory")
"""What torch says in a plain RuntimeError."""


def attempt(spec: RunSpec, settings: Settings, emit: Emit) -> None:
    """Carry out ``spec`` from its newest checkpoint on; the last event says how it ended, whatever the method does."""
    try:
        run_spec(spec, settings, [Forward(emit)])
    except FedbenchError as error:
        emit(RunFailed(spec, " ".join(str(error).split()), may_pass=any(map(may_pass, _chain(error)))))
    except BaseException as error:  # a method may raise SystemExit or KeyboardInterrupt as well
        passing = any(map(may_pass, _chain(error)))
        emit(RunFailed(spec, reason_of(error), traceback.format_exc(), may_pass=passing))


def reason_of(error: BaseException) -> str:
    """What was raised, in one line: its kind, text and notes."""
    notes = "; ".join(getattr(error, "__notes__", []))
    where = f" ({notes})" if notes else ""
    what = "out of memory: " if any(map(is_memory, _chain(error))) else ""
    said = " ".join(f"{type(error).__name__}: {error}".split()).strip(": ")
    return f"{what}{said}{where}"


def raised_at(error: BaseException) -> str:
    """File and line, without folders."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else "no traceback"


def may_pass(error: BaseException) -> bool:
    """Whether ``error`` is of the machine as it is now, so that the same run may get on another time."""
    is_network = isinstance(error, ConnectionError | TimeoutError)
    return is_memory(error) or is_network or (isinstance(error, OSError) and error.errno in _PASSING)


def is_memory(error: BaseException) -> bool:
    """Whether there was too little memory, of the machine or of an accelerator."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(said in str(error) for said in _NO_MEMORY)
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """``error`` and what it was raised from."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__
