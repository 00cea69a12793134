"""Results of others: ``submit`` checks a folder, ``verify`` repeats some of its runs, ``merge`` joins several."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

import typer

from fedbench.cli.options import (
    EngineOption,
    Plugins,
    SuiteName,
    Workers,
    finite,
    plugin_files,
    settings_of,
)
from fedbench.core.errors import FedbenchError
from fedbench.core.wording import counted
from fedbench.workflow.asking import folders
from fedbench.workflow.console import complain, resumable, say

_NUMBERS_DIFFER = 1
_Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="As fedbench leaderboard --output writes it.")]


def submit(folder: _Folder, suite: SuiteName = None, plugin: Plugins = None) -> None:
    """Check that a result folder is in order: runs, seeds, data, the board that follows from them, its manifest.

    What is not ends with exit code 2, and one sentence that names the row and the reason. A run that diverged is a
    result, one that failed otherwise is none. The suite is by default the one that the runs recorded. Nothing is run.
    Tables of a folder in order that are plain (results.csv) are compressed (results.csv.gz).
    """
    from fedbench_boards.exchange.checks import check_folder
    from fedbench_boards.exchange.folder import compress_tables

    checked = check_folder(folder, suite, plugin_files(plugin))
    for note in checked.notes:
        complain(note, label="note")
    say(f"{folder} is in order: {checked.summary}")
    if compress_tables(checked.folder):
        say(f"{folder}: its tables are compressed now")


def verify(
    folder: _Folder,
    share: Annotated[
        float,
        typer.Option(
            metavar="NUMBER", min=0, max=1, callback=finite, help="Of the runs; at least one, and all that diverged."
        ),
    ] = 0.1,
    seed: Annotated[
        int | None, typer.Option(metavar="INT", min=0, help="Draws which; by default one that nobody knows before.")
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option(
            metavar="POINTS", min=0, max=100, callback=finite, help="For accuracies of another platform, torch or code."
        ),
    ] = 0.5,
    suite: SuiteName = None,
    plugin: Plugins = None,
    workers: Workers = None,
    engine: EngineOption = "processes",
) -> None:
    """Carry out some of a folder's runs once more, and compare their final metrics with the recorded ones.

    On the same platform, torch and code they are the same to the last bit, and what diverged does so again; elsewhere
    rounding may decide that, and a run with both ends is unsettled. What differs ends with exit code 1.
    """
    from fedbench.runs.engines import ENGINES
    from fedbench.workflow.screens import Terminal
    from fedbench.workflow.selection import Place
    from fedbench_boards.exchange.checks import check_folder
    from fedbench_boards.exchange.verifying import drawn
    from fedbench_boards.exchange.verifying import verify as repeated

    settings = settings_of(*folders(None, None), plugin)
    checked = check_folder(folder, suite, settings.plugin_files)
    seed = secrets.randbelow(10**6) if seed is None else seed
    chosen = drawn(checked, share, seed)
    say(f"{counted(len(chosen), 'run')} of {len(checked.specs)}, drawn with --seed {seed}, again:")
    place = Place(engine, workers)
    place.check(ENGINES)
    found = []
    with resumable():
        for one in repeated(checked, chosen, settings, place, Terminal(), tolerance):
            found.append(one)
            say(str(one))
    unsettled = sum(one.is_unsettled for one in found)
    wrong = sum(not one.is_confirmed for one in found) - unsettled
    if wrong:
        complain(f"{wrong} of {counted(len(found), 'run')} did not give the numbers of {folder}.")
        raise typer.Exit(_NUMBERS_DIFFER)
    rest = f", {unsettled} unsettled" if unsettled else ""
    say(f"{folder} is confirmed by {counted(len(found) - unsettled, 'run')}{rest}")


def merge(
    places: Annotated[
        list[str], typer.Argument(metavar="PLACE...", help="Stores (folders or URIs), or result folders.")
    ],
    into: Annotated[str, typer.Option("--into", metavar="PLACE", help="Where they go; made where it is missing.")],
    suite: SuiteName = None,
    plugin: Plugins = None,
) -> None:
    """Copy the runs of stores into one, with curves and models; or join result folders, and write the board of all.

    A run that several have is taken once. Where its numbers differ nothing is written.
    """
    from fedbench_boards.exchange.folder import is_result_folder

    files = plugin_files(plugin)
    folders = [place for place in places if is_result_folder(place)]
    if not folders and (suite is not None or files):
        raise FedbenchError("--suite and --plugin are for result folders; leave them out for stores.")
    if not folders:
        _merge_stores(places, into)
    elif len(folders) < len(places):
        store = next(place for place in places if place not in folders)
        raise FedbenchError(f"{folders[0]!r} is a result folder, {store!r} is none; merge stores, or result folders.")
    else:
        _join_folders(folders, into, suite, files)


def _merge_stores(stores: list[str], into: str) -> None:
    from fedbench.tracking.databases import masked
    from fedbench_boards.exchange.merging import merge as merged

    for one in merged(stores, into, lambda run: say(f"copied {run}", style="dim")):
        left = f", {one.unfinished} not ended and left" if one.unfinished else ""
        already = f"{one.skipped} in {masked(into)} already and skipped"
        say(f"{one.source}: {counted(one.copied, 'run')} copied, {already}{left}")


def _join_folders(folders: list[str], into: str, suite: str | None, plugins: tuple[Path, ...]) -> None:
    from fedbench_boards.exchange.checks import check_folder
    from fedbench_boards.exchange.merging import join

    checked = [check_folder(Path(folder), suite, plugins) for folder in folders]
    count = join(checked, Path(into))
    for folder in checked:
        for note in folder.notes:
            complain(note, label="note")
        say(f"{folder.folder.path}: {folder.summary}")
    say(f"written to {into}: {counted(count, 'run')}, without curves, which only stores have")
