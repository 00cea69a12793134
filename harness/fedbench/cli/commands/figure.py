"""``fedbench figure``: what papers draw, from recorded runs."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedbench.cli.console import say
from fedbench.cli.options import Store
from fedbench.core.errors import FedbenchError, unknown_name

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from fedbench.suites.suite import Suite


class FigureKind(enum.StrEnum):
    """What is drawn."""

    sweep = "sweep"
    rounds = "rounds"
    gains = "gains"
    gap = "gap"


def figure(
    kind: Annotated[FigureKind, typer.Argument(help="A sweep of settings, curves by round, gains by class group, ...")],
    suite: Annotated[str, typer.Option(metavar="NAME|FILE", help="Whose runs are drawn.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="A .png, .svg or .pdf file.")],
    by: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Setting on the axis: fedglcl.tau, dirichlet_alpha; two make a grid."),
    ] = None,
    metric: Annotated[
        str | None, typer.Option(metavar="NAME", help="What is drawn: tail, worst_client; the suite's headline.")
    ] = None,
    setting: Annotated[str | None, typer.Option(metavar="NAME", help="Only this setting of the suite.")] = None,
    method: Annotated[
        list[str] | None, typer.Option(metavar="METHOD", help="Only rows of this method; repeat it.")
    ] = None,
    baseline: Annotated[str | None, typer.Option(metavar="ROW", help="What gains are taken to.")] = None,
    store: Store = None,
) -> None:
    """Draw a figure of recorded runs.

    sweep: a metric over one setting's values, or over two as a grid. rounds: accuracy by round, of all classes and of
    their groups. gains: by how much rows are above the baseline, by group. gap: head minus tail over a setting.
    """
    from fedbench.leaderboard.figures import draw
    from fedbench.leaderboard.named import metric_named
    from fedbench.leaderboard.results import load_results
    from fedbench.suites.suite import load_suite
    from fedbench.tracking.schema import store_uri

    read = load_suite(suite)
    uri = store_uri(store, to_write=False)
    results = _chosen(load_results(uri, read.name), setting, method)
    ranked = metric_named(results, metric) if metric else read.headline_of(setting or "")
    with draw.style():
        made = _drawn(kind, read, uri, results, ranked, tuple(by or ()), baseline or read.baseline)
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


def _drawn(
    kind: FigureKind, read: Suite, uri: str, results: pd.DataFrame, metric: str, by: tuple[str, ...], baseline: str
) -> Figure:
    from fedbench.leaderboard.figures import draw
    from fedbench.leaderboard.figures.points import by_row, swept
    from fedbench.leaderboard.results import GROUPS, load_curves
    from fedbench.leaderboard.rows.identity import label_of
    from fedbench.tracking.schema import FINAL

    if kind in (FigureKind.rounds, FigureKind.gains):
        if results["setting"].nunique() > 1:
            raise FedbenchError(f"{kind} are of one setting; choose one with --setting.")
        metrics = list(dict.fromkeys([metric, *GROUPS]))
        if kind is FigureKind.gains:
            return draw.gains(by_row(results, metrics), baseline, metrics)
        owners = {str(run): label_of(str(row)) for run, row in zip(results["mlflow_id"], results["row"], strict=True)}
        return draw.rounds(load_curves(uri, results, metric), owners, metrics)
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
