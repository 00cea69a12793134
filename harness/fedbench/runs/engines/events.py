"""The events of runs while they are carried out, in whichever process that is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from fedbench.core.method.hooks import hookimpl
from fedbench.core.method.notifications import Notifications
from fedbench.core.records import RoundRecord, RunInfo, RunResult
from fedbench.core.spec import RunSpec


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
        """Forward."""
        self.emit(RunStarted(spec, info))

    @hookimpl
    def round_finished(self, spec: RunSpec, record: RoundRecord) -> None:
        """Forward."""
        self.emit(RoundFinished(spec, record))

    @hookimpl
    def run_warned(self, spec: RunSpec, warning: str) -> None:
        """Forward."""
        self.emit(RunWarned(spec, warning))

    @hookimpl
    def run_finished(self, spec: RunSpec, info: RunInfo, result: RunResult) -> None:
        """Forward."""
        self.emit(RunFinished(spec, info, result))


def notify(hooks: Notifications, event: Event) -> None:
    """Call the notification hook of ``event`` on the listeners behind ``hooks``."""
    # pluggy hands an answer those of the fields that it names
    getattr(hooks, event.hook)(**vars(event))
