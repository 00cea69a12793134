"""Lookup of metrics and rows by the names that the command line takes."""

from __future__ import annotations

import pandas as pd

from fedbench.core.errors import FedbenchError, unknown_name
from fedbench.core.metric_names import QUALITIES
from fedbench.core.wording import heading
from fedbench.kinds.measured import metric_plugin
from fedbench.tracking.schema import FINAL
from fedbench_boards.leaderboard import failures
from fedbench_boards.leaderboard.rows.identity import PROTOCOL, label_of, named_rows


def metric_named(results: pd.DataFrame, name: str) -> str:
    """The accuracy that ``--metric`` means: ``tail`` is ``tail_accuracy``, ``own models`` is the metric with this
    heading.

    FedbenchError for an accuracy that no run has.
    """
    known = [str(column).removeprefix(FINAL) for column in results if str(column).startswith(FINAL)]
    accuracies = [metric for metric in known if "accuracy" in metric or metric in QUALITIES or metric_plugin(metric)]
    accuracies = [metric for metric in accuracies if results[FINAL + metric].notna().any()]
    if not accuracies:
        raise FedbenchError(f"no run has finished, so there is no accuracy {name!r}; leave out --metric and --column.")
    short = {metric.removesuffix("_accuracy"): metric for metric in accuracies}
    called = {heading(metric).replace(" ", "_"): metric for metric in accuracies if "/" not in metric}
    called |= short | {metric: metric for metric in accuracies}
    metric_meant = called.get(name) or called.get(name.replace(" ", "_"))
    if metric_meant is None and name in known:
        raise FedbenchError(
            f"metric {name!r} is of a plug-in that is not here; install it, or give its file with --plugin."
        )
    if metric_meant is None:
        raise unknown_name("accuracy in these results", name, short)
    return metric_meant


def baseline_named(results: pd.DataFrame, name: str, failed: pd.DataFrame | None = None) -> str:
    """``name`` if it is a row, a method or a label in ``results`` or of ``failed`` runs; FedbenchError otherwise."""
    tried = failures.attempts(results, failed)
    known = {*tried["row"], *tried["method"], *(label_of(row) for row in tried["row"])}
    for _, of_protocol in tried.groupby(list(PROTOCOL), sort=False, dropna=False):
        protocol, lost = failures.split(of_protocol)
        rows = named_rows(protocol)
        known |= {*rows, *failures.without_a_run(rows, lost)}
    if name not in known:
        raise unknown_name("baseline", name, known, "It is a row, or the method of one.")
    return name
