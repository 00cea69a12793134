"""The kinds of figures of stored runs, for ``fedbench figure`` and ``Results.plot``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure

from fedbench.core.errors import FedbenchError, unknown_name
from fedbench.runs.prepare import Settings
from fedbench.suites.suite import Suite
from fedbench.tracking.schema import FINAL
from fedbench_boards.leaderboard.figures import draw
from fedbench_boards.leaderboard.figures.points import by_row, named, swept
from fedbench_boards.leaderboard.named import metric_named
from fedbench_boards.leaderboard.results import GROUPS, load_curves, load_measured, load_rounds
from fedbench_boards.leaderboard.rows.own_models import OF_GROUPS, ranks_own_models

ACCURACY = "accuracy"
"""The kind with one accuracy by round, a line a row."""
_OF_MODELS = ("entropies", "embedding", "holdings")
_ONE_SETTING = (ACCURACY, "rounds", "gains", "layers", *_OF_MODELS)
_MOST_PANELS = 4
KINDS = ("sweep", "rounds", "gains", "gap", "layers", *_OF_MODELS)


@dataclass(frozen=True)
class Drawing:
    """A figure to draw; the suite decides what is None or empty."""

    kind: str
    """One of `KINDS`, or `ACCURACY`."""
    by: tuple[str, ...] = ()
    """Names of the settings on the axes."""
    metric: str | None = None
    setting: str | None = None
    methods: tuple[str, ...] = ()
    baseline: str | None = None


def drawn(wanted: Drawing, uri: str, suite: Suite, results: pd.DataFrame, settings: Settings) -> Figure:
    """The figure of ``results``, finished runs in the store at ``uri``. FedbenchError for what they don't have."""
    kind, metric = wanted.kind, wanted.metric
    if kind not in (ACCURACY, *KINDS):
        raise unknown_name("kind of figure", kind, (ACCURACY, *KINDS))
    results = _chosen(results, wanted.setting, wanted.methods)
    if kind in _ONE_SETTING and results["setting"].nunique() > 1:
        raise FedbenchError(f"{kind} are of one setting; choose one with --setting.")
    headline = suite.headline_of(wanted.setting or "")
    with draw.style():
        if kind in _OF_MODELS:
            return _of_models(kind, uri, results, settings)
        if kind in (ACCURACY, "rounds"):
            return _of_rounds(uri, results, metric, headline, () if kind == ACCURACY else GROUPS)
        if kind == "layers":
            return _of_layers(uri, suite.name, results, metric or "cka_global")
        ranked = metric_named(results, metric) if metric else headline
        return _of_results(kind, results, ranked, wanted.by, wanted.baseline or suite.baseline)


def _chosen(results: pd.DataFrame, setting: str | None, methods: Collection[str]) -> pd.DataFrame:
    if setting is not None:
        if setting not in set(results["setting"]):
            raise unknown_name("setting of these runs", setting, sorted(set(results["setting"])))
        results = results[results["setting"] == setting]
    for method in methods:
        if method not in set(results["method"]):
            raise unknown_name("method of these runs", method, sorted(set(results["method"])))
    return results[results["method"].isin(methods)] if methods else results


def owners_of(results: pd.DataFrame) -> dict[str, str]:
    """MLflow id -> name of the row, as `named` gives it."""
    names = named(results)
    return {str(run): names[str(row)] for run, row in zip(results["mlflow_id"], results["row"], strict=True)}


def _of_rounds(uri: str, results: pd.DataFrame, metric: str | None, headline: str, groups: Sequence[str]) -> Figure:
    """An accuracy by round with those of the ``groups``, or a metric that a method reports or measures."""
    if metric is not None and not ranks_own_models(metric):
        names = [metric, *(f"{metric}/{group.removesuffix('_accuracy')}" for group in groups)]
        measured = load_rounds(uri, results, names)
        if metric in measured:
            return draw.rounds(measured, owners_of(results), names)
    ranked = metric_named(results, metric) if metric else headline
    names = list(dict.fromkeys([ranked, *(OF_GROUPS if groups and ranks_own_models(ranked) else groups)]))
    curves = load_curves(uri, results, *names)
    if metric is None and (ranked not in curves or curves.dropna(subset=[ranked])["mlflow_id"].is_unique):
        # what is ranked is of one round of every run, such as the one that is best on validation data
        names = ["global_accuracy", *groups]
    return draw.rounds(curves, owners_of(results), names)


def _of_layers(uri: str, suite: str, results: pd.DataFrame, metric: str) -> Figure:
    prefix = f"{metric.rstrip('/')}/"
    values, owners = load_measured(uri, suite, results, prefix), owners_of(results)
    names = results["mlflow_id"].map(owners)
    rows = {str(row): of.dropna(axis=1) for row, of in values.groupby(names, sort=False) if not of.dropna(axis=1).empty}
    rows = {row: of for row, of in rows.items() if of.shape[1]}
    if not rows:
        raise FedbenchError(f"these runs have measured no {metric} of layers; run cka+METHOD.")
    return draw.layers(rows, prefix)


def _of_models(kind: str, uri: str, results: pd.DataFrame, settings: Settings) -> Figure:
    """Figures of the rows' recorded models, those of each row's first seed."""
    from fedbench.tracking.models import recorded_model
    from fedbench_boards.leaderboard.figures import models, scatter

    owners = owners_of(results)
    first = results.sort_values("seed", kind="stable").drop_duplicates("row")["mlflow_id"]
    if len(first) > _MOST_PANELS:
        raise FedbenchError(f"{len(first)} rows are too many panels; choose up to {_MOST_PANELS} by --method.")
    recorded = {owners[run]: recorded_model(uri, run, settings) for run in map(str, first)}
    info = next(iter(recorded.values())).run.info
    if kind == "entropies":
        values = {row: models.entropies(one.run, one.state) for row, one in recorded.items()}
        return scatter.entropies(values, len(info.classnames))
    if kind == "embedding":
        planes = {row: models.embedded(one.run, one.state) for row, one in recorded.items()}
        return scatter.embedding(planes, info.classnames)
    clusters = {way: own for one in recorded.values() for way, own in models.clusters(one.run).items()}
    return scatter.holdings(info.class_counts, info.classnames, clusters)


def _of_results(kind: str, results: pd.DataFrame, metric: str, by: tuple[str, ...], baseline: str) -> Figure:
    if kind == "gains":
        metrics = list(dict.fromkeys([metric, *GROUPS]))
        return draw.gains(by_row(results, metrics), baseline, metrics)
    if not 1 <= len(by) <= (2 if kind == "sweep" else 1):
        raise FedbenchError(f"a figure of the kind {kind} needs --by KEY, a setting that has several values.")
    if kind == "gap":
        results = results.assign(**{FINAL + "head minus tail": results.get(f"{FINAL}head_accuracy", float("nan"))})
        results[FINAL + "head minus tail"] -= results.get(f"{FINAL}tail_accuracy", float("nan"))
        metric = "head minus tail"
    series = swept(results[results[FINAL + metric].notna()] if FINAL + metric in results else results, by, metric)
    if len(by) == 1:
        return draw.lines(series, by[0], metric)
    if len(series) > 1:
        raise FedbenchError(f"a grid is of one method; choose one of {', '.join(series)} with --method and --setting.")
    ((name, points),) = series.items()
    return draw.grid(points, by, metric, name)
