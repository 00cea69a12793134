"""One attempt at a run, wherever it is carried out: its notifications become events, and so does its failure."""

from __future__ import annotations

import errno
from collections.abc import Iterator

from fedbench.core.errors import REASON, FedbenchError, reason_of, shortened, text_of, traceback_of
from fedbench.core.spec import RunSpec
from fedbench.runs.engines.events import Emit, Forward, RunFailed
from fedbench.runs.job import run_spec
from fedbench.runs.loaded import Loaded
from fedbench.runs.prepare import Settings

_PASSING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE})
"""Errors of the system that are none of the run's: disk full, quota, device, memory, open files."""
_NO_MEMORY = ("can't allocate memory", "CUDA out of memory", "Cannot allocate memory")
"""What torch says in a plain RuntimeError."""


def attempt(spec: RunSpec, settings: Settings, loaded: Loaded, emit: Emit) -> None:
    """Carry out ``spec`` from its newest checkpoint on; the last event says how it ended, whatever the method does.

    What is in ``loaded`` it need not load itself.
    """
    try:
        run_spec(spec, settings, [Forward(emit)], loaded)
    except BaseException as error:  # a method may raise SystemExit or KeyboardInterrupt as well
        emit(failure_of(spec, error))


def failure_of(spec: RunSpec, error: BaseException) -> RunFailed:
    """The event for a run that ``error`` ended; its reason and traceback are of bounded length."""
    passing = any(map(may_pass, _chain(error)))
    if isinstance(error, FedbenchError):
        return RunFailed(spec, shortened(" ".join(text_of(error).split()), REASON), may_pass=passing)
    what = "out of memory: " if any(map(is_memory, _chain(error))) else ""
    return RunFailed(spec, what + reason_of(error), traceback_of(error), may_pass=passing)


def may_pass(error: BaseException) -> bool:
    """Whether ``error`` is of the machine as it is now, so that the same run may get on another time."""
    is_network = isinstance(error, ConnectionError | TimeoutError)
    return is_memory(error) or is_network or (isinstance(error, OSError) and error.errno in _PASSING)


def is_memory(error: BaseException) -> bool:
    """Whether there was too little memory, of the machine or of an accelerator."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(text in text_of(error) for text in _NO_MEMORY)
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """``error`` and what it was raised from, each once."""
    seen: list[BaseException] = []
    next_one: BaseException | None = error
    while next_one is not None and all(next_one is not one for one in seen):
        seen.append(next_one)
        yield next_one
        next_one = next_one.__cause__
