"""``fedbench figure``: what papers draw, from recorded runs."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from fedbench.cli.console import say
from fedbench.cli.options import CACHE_DIR, DATA_DIR, CacheDir, DataDir, Plugins, Store, plugin_files
from fedbench.core.files import expanded


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
        list[str] | None, typer.Option("--method", metavar="METHOD", help="Only rows of this method; repeat it.")
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
    from fedbench.runs.prepare import Settings
    from fedbench.tracking.schema import store_uri
    from fedbench_boards.leaderboard import drawing
    from fedbench_boards.leaderboard.figures import Drawing, drawn
    from fedbench_boards.leaderboard.reading import suite_of
    from fedbench_boards.leaderboard.results import load_results

    _, read = suite_of(suite)
    uri = store_uri(store, to_write=False)
    settings = Settings(expanded(data_dir, "--data-dir"), expanded(cache_dir, "--cache-dir"), plugin_files(plugin))
    wanted = Drawing(kind.value, tuple(by or ()), metric, setting, tuple(method or ()), baseline)
    drawing.save(drawn(wanted, uri, read, load_results(uri, read.name), settings), output)
    say(f"written to {output}")
