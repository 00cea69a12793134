"""Properties of metrics by name, built in or from plug-ins."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from fedbench.core.metric_names import (
    COSTS,
    EACH_DOMAIN,
    LOWER_IS_BETTER,
    NEITHER,
    STATISTICS,
    TIMES,
    known_accuracy,
)
from fedbench.kinds.registry import registered

if TYPE_CHECKING:
    from fedbench.kinds.kinds import AnyMetric


def metric_plugin(name: str) -> type[AnyMetric] | None:
    """The plug-in that computes the metric ``name`` (``tail_f1``, ``tail_f1/head``); None for a built-in metric."""
    plugin = registered("metric").get(name.partition("/")[0])
    return None if plugin is None else cast("type[AnyMetric]", plugin.load())


def lower_is_better(metric: str) -> bool:
    """Whether a smaller value is a better one."""
    plugin = metric_plugin(metric)
    return metric in LOWER_IS_BETTER or (plugin is not None and plugin.higher_is_better is False)


def says_nothing_of_quality(metric: str) -> bool:
    """Whether neither larger nor smaller values are better."""
    plugin = metric_plugin(metric)
    return metric in NEITHER or (plugin is not None and plugin.higher_is_better is None)


def ranking_metric(name: str) -> str:
    """The metric that ``name`` means in a suite: a plug-in's, or what `known_accuracy` says. ValueError for none."""
    return name if name and metric_plugin(name) is not None else known_accuracy(name)


def column_metric(name: str) -> str:
    """``name``, if it may be a leaderboard's column. ValueError for another."""
    if name not in EACH_DOMAIN:
        ranking_metric(name)
    return name


def printed_metric(name: str) -> str:
    """``name``, if papers print it: a column, or a statistic or cost of the headline. ValueError for another."""
    return name if name in (*STATISTICS, *TIMES) else column_metric(name)


def objective_metric(name: str) -> str:
    """``name``, if it is a cost or a metric; empty is the headline's. ValueError for another."""
    if name and name not in COSTS:
        ranking_metric(name)
    return name
