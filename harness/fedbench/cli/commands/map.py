"""``fedbench map``: a suite over its axes, run and drawn."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedbench.cli.console import say
from fedbench.cli.options import CACHE_DIR, DATA_DIR, CacheDir, DataDir, Plugins, Store, Workers
from fedbench.cli.steps import step, words_of
from fedbench.core.errors import FedbenchError

_SOME_FAILED = 1
SUFFIXES = (".png", ".svg")


def map_(
    ctx: typer.Context,
    suite: Annotated[str, typer.Option(metavar="NAME|FILE", help="A suite with axes, by name or a YAML file.")] = "map",
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="A folder of the suite's name is written there.")
    ] = Path("leaderboards"),
    at: Annotated[
        list[str] | None, typer.Option(metavar="AXIS=VALUE", help="Draw at this value of a third axis; repeat it.")
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option("--method", metavar="METHOD", help="Run only rows of this method; repeat it.")
    ] = None,
    seed: Annotated[
        list[int] | None, typer.Option(metavar="INT", help="In place of the suite's; repeat it.", min=0)
    ] = None,
    only_draw: Annotated[bool, typer.Option("--only-draw", help="Draw what the store has; run nothing.")] = False,
    plugin: Plugins = None,
    store: Store = None,
    workers: Workers = None,
    data_dir: DataDir = DATA_DIR,
    cache_dir: CacheDir = CACHE_DIR,
) -> None:
    """Run a suite over its axes, and draw who leads where, by how much and at what cost.

    Beside the leaderboard, the folder figures gets: winners, margins over zero-shot and over the baseline, a heat map
    a method, the cost to come near the leader, curves along every axis, and the diagram of critical differences, as PNG
    and SVG; evidence.csv is what fedbench advise reads.
    The same command goes on where it was stopped.
    """
    from fedbench.core.files import usable_folder
    from fedbench.suites.suite import load_suite
    from fedbench_boards.leaderboard.across import MOST_AXES

    read = load_suite(suite)
    if not read.axes:
        raise FedbenchError(
            f"suite {read.name!r} has no axes; give it some, such as axes: {{dirichlet_alpha: [0.1, 1]}}."
        )
    fixed = _fixed(at or [], {axis: tuple(values) for axis, values in read.axes.items()})
    if not 1 <= len(read.axes) - len(fixed) <= MOST_AXES:
        raise FedbenchError(
            f"a map is drawn over one axis or {MOST_AXES}; suite {read.name!r} has {', '.join(read.axes)}: fix the "
            "others with --at AXIS=VALUE."
        )
    folder = output / re.sub(r"[^\w.\- ]|^\.+", "_", read.name)
    usable_folder(folder, "--output")
    stores = words_of({"--store": [store] if store else []})
    code = 0
    if not only_draw:
        chosen = words_of(
            {"--suite": [suite], "--method": method or [], "--seed": seed or [], "--plugin": plugin or []}
        )
        machine = words_of(
            {"--jobs": [workers] if workers else [], "--data-dir": [data_dir], "--cache-dir": [cache_dir]}
        )
        code = step(ctx, ["run", *chosen, *stores, *machine])
        if code > _SOME_FAILED:
            raise typer.Exit(code)
    plugins = words_of({"--plugin": plugin or []})
    code = max(code, step(ctx, ["leaderboard", "--suite", suite, "--output", str(folder), *plugins, *stores]))
    _draw(suite, folder, fixed, store)
    say(f"evidence and figures written to {folder}")
    raise typer.Exit(code)


def _draw(suite: str, folder: Path, fixed: dict[str, str], store: str | None) -> None:
    from fedbench.tracking.schema import store_uri
    from fedbench_boards.advice.evidence import SHIPPED, evidence_of, write_evidence
    from fedbench_boards.leaderboard import drawing
    from fedbench_boards.leaderboard.across import map_of
    from fedbench_boards.leaderboard.across_figures import critical_differences, figures
    from fedbench_boards.leaderboard.reading import ReadingOptions, read_board

    uri = store_uri(store, to_write=False)
    read = read_board(ReadingOptions(suite=suite), uri)
    found = map_of(read.suite, read.board, read.curves).fixed(fixed)
    write_evidence(evidence_of(uri, read.results), folder / SHIPPED)
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    with drawing.style():
        made = list(figures(found))
        if read.board.across is not None:
            made.append(("critical-differences", critical_differences(read.board.across, found.labels)))
        for name, figure in made:
            for suffix in SUFFIXES:
                drawing.save(figure, folder / "figures" / f"{name}{suffix}")


def _fixed(given: Sequence[str], axes: dict[str, tuple[str, ...]]) -> dict[str, str]:
    found = {}
    for text in given:
        axis, sign, value = (part.strip() for part in text.partition("="))
        if not sign or value not in axes.get(axis, ()):
            known = "; ".join(f"{name}: {', '.join(values)}" for name, values in axes.items())
            raise FedbenchError(f"--at {text!r} is no AXIS=VALUE of this suite; it has {known}.")
        found[axis] = value
    return found
