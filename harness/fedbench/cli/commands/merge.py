"""``fedbench merge``: runs of several stores in one, or result folders of one suite in one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedbench.cli.console import complain, say
from fedbench.cli.options import Plugins, plugin_files
from fedbench.core.errors import FedbenchError
from fedbench.core.wording import counted


def merge(
    places: Annotated[
        list[str], typer.Argument(metavar="PLACE...", help="Stores (folders or URIs), or result folders.")
    ],
    into: Annotated[str, typer.Option("--into", metavar="PLACE", help="Where they go; made where it is missing.")],
    suite: Annotated[str | None, typer.Option(metavar="NAME|FILE", help="Result folders: their suite.")] = None,
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
        _stores(places, into)
    elif len(folders) < len(places):
        store = next(place for place in places if place not in folders)
        raise FedbenchError(f"{folders[0]!r} is a result folder, {store!r} is none; merge stores, or result folders.")
    else:
        _folders(folders, into, suite, files)


def _stores(stores: list[str], into: str) -> None:
    from fedbench_boards.exchange.merging import merge as merged

    for one in merged(stores, into, lambda run: say(f"copied {run}", style="dim")):
        left = f", {one.unfinished} not ended and left" if one.unfinished else ""
        say(f"{one.source}: {counted(one.copied, 'run')} copied, {one.skipped} in {into} already and skipped{left}")


def _folders(folders: list[str], into: str, suite: str | None, plugins: tuple[Path, ...]) -> None:
    from fedbench_boards.exchange.checks import check_folder
    from fedbench_boards.exchange.merging import join

    checked = [check_folder(Path(folder), suite, plugins) for folder in folders]
    count = join(checked, Path(into))
    for folder in checked:
        for note in folder.notes:
            complain(note, label="note")
        say(f"{folder.folder.path}: {folder.summary}")
    say(f"written to {into}: {counted(count, 'run')}, without curves, which only stores have")
