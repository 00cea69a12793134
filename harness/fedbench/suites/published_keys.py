"""How suites say which published numbers their runs replay."""

from __future__ import annotations

from collections.abc import Mapping

from fedbench.core.metric_names import GROUPS

Key = dict[str, str]
"""Columns of a file of published numbers, with the values that pick the lines a run replays."""

PUBLISHED_METRICS: dict[str, Key] = {
    "global_accuracy": {"metric": "accuracy"},
    **{f"{group}_accuracy": {"metric": f"accuracy_{group}"} for group in GROUPS},
}
"""Our name of a metric -> the columns of the published one."""


def columns_of(printed: object) -> object:
    """The columns that pick a metric's numbers; a name alone is that of the column ``metric``."""
    return {"metric": printed} if isinstance(printed, str) else printed


def as_key(given: object) -> object:
    """A mapping's columns and values as text."""
    return {str(column): str(value) for column, value in given.items()} if isinstance(given, Mapping) else given
