"""The events of runs while they are carried out, in whichever process that is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fedbench.core.hooks import Hooks, RoundRecord, RunInfo, RunResult, hookimpl
from fedbench.core.spec import RunSpec


@dataclass(frozen=True)
class RunStarted:
    """A run is assembled."""

    spec: RunSpec
    info: RunInfo


@dataclass(frozen=True)
class RoundFinished:
    """A round of a run is done."""

    spec: RunSpec
    record: RoundRecord


@dataclass(frozen=True)
class RunWarned:
    """Something is to be known of a run that goes on all the same."""

    spec: RunSpec
    warning: str


@dataclass(frozen=True)
class RunFinished:
    """A run is done."""

    spec: RunSpec
    info: RunInfo
    result: RunResult


@dataclass(frozen=True)
class RunFailed:
    """A run ended early. ``reason`` is one line; ``details`` the traceback, empty for bad input."""

    spec: RunSpec
    reason: str
    details: str = ""
    may_pass: bool = False
    """Whether the reason is of the machine (a full disk, no memory left), and another attempt may get on."""


@dataclass(frozen=True)
class RunRetried:
    """Attempt number ``attempt`` of a run ended early for a reason that may pass; another follows."""

    spec: RunSpec
    reason: str
    attempt: int


@dataclass(frozen=True)
class RunSkipped:
    """Another process that shares the store has finished the run in the meantime."""

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


def notify(hooks: Hooks, event: Event) -> None:
    """Call the notification hook of ``event`` on the listeners behind ``hooks``."""
    if isinstance(event, RunStarted):
        hooks.run_started(spec=event.spec, info=event.info)
    elif isinstance(event, RoundFinished):
        hooks.round_finished(spec=event.spec, record=event.record)
    elif isinstance(event, RunWarned):
        hooks.run_warned(spec=event.spec, warning=event.warning)
    elif isinstance(event, RunFinished):
        hooks.run_finished(spec=event.spec, info=event.info, result=event.result)
    elif isinstance(event, RunFailed):
        hooks.run_failed(spec=event.spec, reason=event.reason)
    elif isinstance(event, RunRetried):
        hooks.run_retried(spec=event.spec, reason=event.reason, attempt=event.attempt)
    else:
        hooks.run_skipped(spec=event.spec)
