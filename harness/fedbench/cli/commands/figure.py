"""``fedbench figure``: what papers draw, from recorded runs."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedbench.cli.console import say
from fedbench.cli.options import CACHE_DIR, DATA_DIR, CacheDir, DataDir, Plugins, Store, plugin_files
from fedbench.core.errors import FedbenchError, unknown_name
from fedbench.core.files import expanded

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from fedbench.runs.prepare import Settings


class FigureKind(enum.StrEnum):
    """What is drawn."""

    sweep = "sweep"
    rounds = "rounds"
    gains = "gains"
    gap = "gap"
    layers = "layers"
    entropies = "entropies"
    embedding = "embedding"
    holdings = "holdings"


_OF_MODELS = (FigureKind.entropies, FigureKind.embedding, FigureKind.holdings)
_ONE_SETTING = (FigureKind.rounds, FigureKind.gains, FigureKind.layers, *_OF_MODELS)
_MOST_PANELS = 4


def figure(
    kind: Annotated[FigureKind, typer.Argument(help="A sweep of settings, curves by round, gains by class group, ...")],
    suite: Annotated[str, typer.Option(metavar="NAME|FILE", help="Whose runs are drawn.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="A .png, .svg or .pdf file.")],
    by: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Setting on the axis: fedglcl.tau, dirichlet_alpha; two make a grid."),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="What is drawn: tail, drift, cka_clients; the suite's headline."),
    ] = None,
    setting: Annotated[str | None, typer.Option(metavar="NAME", help="Only this setting of the suite.")] = None,
    method: Annotated[
        list[str] | None, typer.Option(metavar="METHOD", help="Only rows of this method; repeat it.")
    ] = None,
    baseline: Annotated[str | None, typer.Option(metavar="ROW", help="What gains are taken to.")] = None,
    store: Store = None,
    data_dir: DataDir = DATA_DIR,
    cache_dir: CacheDir = CACHE_DIR,
    plugin: Plugins = None,
) -> None:
    """Draw a figure of recorded runs.

    sweep: a metric over one setting's values, or over two as a grid. rounds: a metric by round, of all classes and of
    their groups. gains: by how much rows are above the baseline, by group. gap: head minus tail over a setting.
    layers: what is measured of every layer after the last round, with cka in the stack. Of each row's model, of its
    first seed: entropies of its predictions, embedding of its features (t-SNE), holdings of the clients by cluster.
    """
    from fedbench.leaderboard.figures import draw
    from fedbench.leaderboard.named import metric_named
    from fedbench.leaderboard.results import load_results
    from fedbench.runs.prepare import Settings
    from fedbench.suites.suite import load_suite
    from fedbench.tracking.schema import store_uri

    read = load_suite(suite)
    uri = store_uri(store, to_write=False)
    results = _chosen(load_results(uri, read.name), setting, method)
    if kind in _ONE_SETTING and results["setting"].nunique() > 1:
        raise FedbenchError(f"{kind} are of one setting; choose one with --setting.")
    with draw.style():
        if kind in _OF_MODELS:
            settings = Settings(
                expanded(data_dir, "--data-dir"), expanded(cache_dir, "--cache-dir"), plugin_files(plugin)
            )
            made = _of_models(kind, uri, results, settings)
        elif kind is FigureKind.rounds:
            made = _of_rounds(uri, results, metric, read.headline_of(setting or ""))
        elif kind is FigureKind.layers:
            made = _of_layers(uri, read.name, results, metric or "cka_global")
        else:
            ranked = metric_named(results, metric) if metric else read.headline_of(setting or "")
            made = _of_results(kind, results, ranked, tuple(by or ()), baseline or read.baseline)
    draw.save(made, output)
    say(f"written to {output}")


def _chosen(results: pd.DataFrame, setting: str | None, methods: list[str] | None) -> pd.DataFrame:
    if setting is not None:
        if setting not in set(results["setting"]):
            raise unknown_name("setting of these runs", setting, sorted(set(results["setting"])))
        results = results[results["setting"] == setting]
    for method in methods or ():
        if method not in set(results["method"]):
            raise unknown_name("method of these runs", method, sorted(set(results["method"])))
    return results[results["method"].isin(methods)] if methods else results


def _owners(results: pd.DataFrame) -> dict[str, str]:
    """MLflow id -> the row's label."""
    from fedbench.leaderboard.rows.identity import label_of

    return {str(run): label_of(str(row)) for run, row in zip(results["mlflow_id"], results["row"], strict=True)}


def _of_rounds(uri: str, results: pd.DataFrame, metric: str | None, headline: str) -> Figure:
    """An accuracy by round with those of the groups, or what a method reports or measures."""
    from fedbench.leaderboard.figures import draw
    from fedbench.leaderboard.named import metric_named
    from fedbench.leaderboard.results import GROUPS, load_curves, load_rounds

    if metric is not None:
        names = [metric, *(f"{metric}/{group.removesuffix('_accuracy')}" for group in GROUPS)]
        measured = load_rounds(uri, results, names)
        if metric in measured:
            return draw.rounds(measured, _owners(results), names)
    ranked = metric_named(results, metric) if metric else headline
    return draw.rounds(load_curves(uri, results, ranked), _owners(results), list(dict.fromkeys([ranked, *GROUPS])))


def _of_layers(uri: str, suite: str, results: pd.DataFrame, metric: str) -> Figure:
    from fedbench.leaderboard.figures import draw
    from fedbench.leaderboard.results import load_measured

    prefix = f"{metric.rstrip('/')}/"
    values, owners = load_measured(uri, suite, results, prefix), _owners(results)
    names = results["mlflow_id"].map(owners)
    rows = {str(row): of.dropna(axis=1) for row, of in values.groupby(names, sort=False) if not of.dropna(axis=1).empty}
    rows = {row: of for row, of in rows.items() if of.shape[1]}
    if not rows:
        raise FedbenchError(f"these runs have measured no {metric} of layers; run cka+METHOD.")
    return draw.layers(rows, prefix)


def _of_models(kind: FigureKind, uri: str, results: pd.DataFrame, settings: Settings) -> Figure:
    """What the rows' models give again, of each row's first seed."""
    from fedbench.leaderboard.figures import models, scatter
    from fedbench.tracking.recorded.models import recorded_model

    owners = _owners(results)
    first = results.sort_values("seed", kind="stable").drop_duplicates("row")["mlflow_id"]
    if len(first) > _MOST_PANELS:
        raise FedbenchError(f"{len(first)} rows are too many panels; choose up to {_MOST_PANELS} by --method.")
    found = {owners[run]: recorded_model(uri, run, settings) for run in map(str, first)}
    info = next(iter(found.values())).run.info
    if kind is FigureKind.entropies:
        values = {row: models.entropies(one.run, one.state) for row, one in found.items()}
        return scatter.entropies(values, len(info.classnames))
    if kind is FigureKind.embedding:
        planes = {row: models.embedded(one.run, one.state) for row, one in found.items()}
        return scatter.embedding(planes, info.classnames)
    clusters = {way: own for one in found.values() for way, own in models.clusters(one.run).items()}
    return scatter.holdings(info.class_counts, info.classnames, clusters)


def _of_results(kind: FigureKind, results: pd.DataFrame, metric: str, by: tuple[str, ...], baseline: str) -> Figure:
    from fedbench.leaderboard.figures import draw
    from fedbench.leaderboard.figures.points import by_row, swept
    from fedbench.leaderboard.results import GROUPS
    from fedbench.tracking.schema import FINAL

    if kind is FigureKind.gains:
        metrics = list(dict.fromkeys([metric, *GROUPS]))
        return draw.gains(by_row(results, metrics), baseline, metrics)
    if not 1 <= len(by) <= (2 if kind is FigureKind.sweep else 1):
        raise FedbenchError(f"a figure of the kind {kind} needs --by KEY, a setting that has several values.")
    if kind is FigureKind.gap:
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
