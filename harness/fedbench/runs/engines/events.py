"""The events of runs while they are carried out, in whichever process that is; a failure is one of them."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from fedbench.core.errors import REASON, FedbenchError, Unworkable, reason_of, shortened, text_of, traceback_of
from fedbench.core.method.hooks import hookimpl
from fedbench.core.method.notifications import NotificationSpecs
from fedbench.core.records import RoundRecord, RunInfo, RunResult
from fedbench.core.spec import RunSpec

_PASSING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE})
"""Errors of the system that are none of the run's: disk full, quota, device, memory, open files."""
_CARD_FULL = ("CUDA out of memory", "CUDA error: out of memory", "_STATUS_ALLOC_FAILED")
"""What torch, CUDA and its libraries say in a RuntimeError."""
_NO_MEMORY = ("can't allocate memory", "Cannot allocate memory", *_CARD_FULL)
"""Likewise, of the machine's memory as well."""


@dataclass(frozen=True)
class RunStarted:
    """A run is assembled."""

    hook: ClassVar[str] = "run_started"
    spec: RunSpec
    info: RunInfo


@dataclass(frozen=True)
class RoundFinished:
    """A round of a run is done."""

    hook: ClassVar[str] = "round_finished"
    spec: RunSpec
    record: RoundRecord


@dataclass(frozen=True)
class RunWarned:
    """Something is to be known of a run that goes on all the same."""

    hook: ClassVar[str] = "run_warned"
    spec: RunSpec
    warning: str


@dataclass(frozen=True)
class RunFinished:
    """A run is done."""

    hook: ClassVar[str] = "run_finished"
    spec: RunSpec
    info: RunInfo
    result: RunResult


@dataclass(frozen=True)
class RunFailed:
    """A run ended early. ``reason`` is one line; ``details`` the traceback, empty for bad input."""

    hook: ClassVar[str] = "run_failed"
    spec: RunSpec
    reason: str
    details: str = ""
    may_pass: bool = False
    """Whether the reason is of the machine (a full disk, no memory left), and another attempt may get on."""
    is_unworkable: bool = False
    """Whether its values are to blame: training diverged with them, the process ended early at every attempt, or a card
    was too small."""
    is_card_full: bool = False
    """Whether a CUDA card had too little memory left, so that the run may get on with a card to itself."""


@dataclass(frozen=True)
class RunRetried:
    """Attempt number ``attempt`` of a run ended early for a reason that may pass; another follows."""

    hook: ClassVar[str] = "run_retried"
    spec: RunSpec
    reason: str
    attempt: int


@dataclass(frozen=True)
class RunSkipped:
    """Another process that shares the store has finished the run in the meantime."""

    hook: ClassVar[str] = "run_skipped"
    spec: RunSpec


@dataclass(frozen=True)
class Lost:
    """The process of a run ended before the run did; an event for the scheduler alone."""

    spec: RunSpec
    reason: str


Event = RunStarted | RoundFinished | RunWarned | RunFinished | RunFailed | RunRetried | RunSkipped
Emit = Callable[[Event], None]


class Forward:
    """A listener inside a run that hands every notification on as an event."""

    def __init__(self, emit: Emit) -> None:
        self.emit = emit

    @hookimpl
    def run_started(self, spec: RunSpec, info: RunInfo) -> None:
        self.emit(RunStarted(spec, info))

    @hookimpl
    def round_finished(self, spec: RunSpec, record: RoundRecord) -> None:
        self.emit(RoundFinished(spec, record))

    @hookimpl
    def run_warned(self, spec: RunSpec, warning: str) -> None:
        self.emit(RunWarned(spec, warning))

    @hookimpl
    def run_finished(self, spec: RunSpec, info: RunInfo, result: RunResult) -> None:
        self.emit(RunFinished(spec, info, result))


def notify(hooks: NotificationSpecs, event: Event) -> None:
    """Call the notification hook of ``event`` on the listeners behind ``hooks``."""
    # pluggy hands an answer those of the fields that it names
    getattr(hooks, event.hook)(**vars(event))


def failure_of(spec: RunSpec, error: BaseException) -> RunFailed:
    """The event for a run that ``error`` ended; its reason and traceback are of bounded length."""
    passing, is_full = any(map(may_pass, _chain(error))), any(map(_is_card_full, _chain(error)))
    if isinstance(error, FedbenchError):
        reason = shortened(" ".join(text_of(error).split()), REASON)
        return RunFailed(spec, reason, "", passing, isinstance(error, Unworkable), is_full)
    what = "out of memory: " if any(map(is_memory, _chain(error))) else ""
    return RunFailed(spec, what + reason_of(error), traceback_of(error), passing, is_card_full=is_full)


def may_pass(error: BaseException) -> bool:
    """Whether ``error`` is of the machine as it is now, so that the same run may get on another time."""
    is_network = isinstance(error, ConnectionError | TimeoutError)
    return is_memory(error) or is_network or (isinstance(error, OSError) and error.errno in _PASSING)


def is_memory(error: BaseException) -> bool:
    """Whether there was too little memory, of the machine or of an accelerator."""
    return isinstance(error, MemoryError) or _says(error, _NO_MEMORY)


def _is_card_full(error: BaseException) -> bool:
    return _says(error, _CARD_FULL)


def _says(error: BaseException, texts: tuple[str, ...]) -> bool:
    return isinstance(error, RuntimeError) and any(text in text_of(error) for text in texts)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """``error`` and what it was raised from, each once."""
    seen: list[BaseException] = []
    next_one: BaseException | None = error
    while next_one is not None and all(next_one is not one for one in seen):
        seen.append(next_one)
        yield next_one
        next_one = next_one.__cause__
