"""Notifications of a run: listeners hear of it as it is, methods by copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pluggy

from fedbench.core.method.notifications import NOTIFICATIONS, Notifications
from fedbench.core.records import ReadOnly, RunInfo
from fedbench.core.spec import RunSpec


def notifications(manager: pluggy.PluginManager, listeners: Sequence[object]) -> Notifications:
    """Notifications for ``listeners`` and then for the run's methods, for these as copies.

    A frozen dataclass can be written to by whoever insists, and what listeners record must be true.
    """
    methods = [plugin for plugin in manager.get_plugins() if not any(plugin is listener for listener in listeners)]

    def to_all(hook: str) -> Callable[..., None]:
        to_listeners = manager.subset_hook_caller(hook, methods)
        to_methods = manager.subset_hook_caller(hook, listeners)

        def notify(**fields: Any) -> None:
            to_listeners(**fields)
            if to_methods.get_hookimpls():
                to_methods(**{name: _for_methods(value, fields["spec"]) for name, value in fields.items()})

        return notify

    return cast(Notifications, SimpleNamespace(**{hook: to_all(hook) for hook in NOTIFICATIONS}))


def _for_methods(fields: object, spec: RunSpec) -> object:
    """A copy of what listeners are fields, without the counts of labels that the scenario hides."""
    copy = deepcopy(fields)
    if isinstance(copy, RunInfo) and spec.scenario.labels == "hidden":
        return replace(copy, class_counts=())
    # made anew, since a copy of a read-only array can be written to
    return replace(copy) if isinstance(copy, ReadOnly) else copy
