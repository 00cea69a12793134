"""Notifications to listeners of a run: MLflow, progress views, the pruning of trials. Methods may listen too."""

from __future__ import annotations

from typing import cast

import pluggy

from fedbench.core.records import RoundRecord, RunInfo, RunResult
from fedbench.core.spec import RunSpec

PROJECT = "fedbench"
"""The name under which pluggy knows hooks and their answers."""
_spec = pluggy.HookspecMarker(PROJECT)


class NotificationSpecs:
    """The notifications. Nobody answers them."""

    @_spec
    def run_started(self, spec: RunSpec, info: RunInfo) -> None:
        """Notification: a run is assembled and begins. MLflow and the progress view listen.

        The arguments of all notifications are read-only; a method of the run gets a copy of its own.
        """

    @_spec
    def round_finished(self, spec: RunSpec, record: RoundRecord) -> None:
        """Notification: a round is done. MLflow and the progress view listen."""

    @_spec
    def run_warned(self, spec: RunSpec, warning: str) -> None:
        """Notification: something to know about a run that goes on all the same, such as a checkpoint not written."""

    @_spec
    def run_finished(self, spec: RunSpec, info: RunInfo, result: RunResult) -> None:
        """Notification: a run is done. MLflow listens."""

    @_spec
    def run_failed(self, spec: RunSpec, reason: str) -> None:
        """Notification: a run ended early, with the reason in one line. MLflow listens."""

    @_spec
    def run_retried(self, spec: RunSpec, reason: str, attempt: int) -> None:
        """Notification: attempt number ``attempt`` of a run ended early for a reason that may pass; another follows."""

    @_spec
    def run_skipped(self, spec: RunSpec) -> None:
        """Notification: another process that shares the store has finished a run that this one was to carry out."""


NOTIFICATIONS = tuple(name for name in vars(NotificationSpecs) if not name.startswith("_"))


def notifier(manager: pluggy.PluginManager) -> NotificationSpecs:
    """The manager's hooks, typed: pluggy's own relay is untyped."""
    return cast(NotificationSpecs, manager.hook)
