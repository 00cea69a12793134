"""``fedbench submit`` and ``fedbench verify``: are the results of others in order, and do they come out again?"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

import typer

from fedbench.cli.console import complain, resumable, say
from fedbench.cli.options import (
    CACHE_DIR,
    DATA_DIR,
    CacheDir,
    DataDir,
    EngineOption,
    Plugins,
    Workers,
    finite,
    plugin_files,
)
from fedbench.core.wording import counted

_NUMBERS_DIFFER = 1
_Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="As fedbench leaderboard --output writes it.")]
_Suite = Annotated[
    str | None, typer.Option(metavar="NAME|FILE", help="Its suite; by default the one that the runs recorded.")
]


def submit(folder: _Folder, suite: _Suite = None, plugin: Plugins = None) -> None:
    """Check that a result folder is in order: runs, seeds, data, the board that follows from them, its manifest.

    What is not ends with exit code 2, and one sentence that names the row and the reason. A run that diverged is a
    result, one that failed otherwise is none. Nothing is run.
    """
    from fedbench_boards.exchange.checks import check_folder

    checked = check_folder(folder, suite, plugin_files(plugin))
    for note in checked.notes:
        complain(note, label="note")
    say(f"{folder} is in order: {checked.summary}")


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
    suite: _Suite = None,
    plugin: Plugins = None,
    workers: Workers = None,
    engine: EngineOption = "processes",
    data_dir: DataDir = DATA_DIR,
    cache_dir: CacheDir = CACHE_DIR,
) -> None:
    """Carry out some of a folder's runs once more, and compare their final metrics with the recorded ones.

    On the same platform, torch and code they are the same to the last bit, and what diverged does so again; elsewhere
    rounding may decide that, and a run with both ends is unsettled. What differs ends with exit code 1.
    """
    from fedbench.cli.screen import Terminal
    from fedbench.core.files import expanded
    from fedbench.runs.engines import ENGINES
    from fedbench.runs.prepare import Settings
    from fedbench.workflow.selection import Place
    from fedbench_boards.exchange.checks import check_folder
    from fedbench_boards.exchange.verifying import drawn
    from fedbench_boards.exchange.verifying import verify as repeated

    files = plugin_files(plugin)
    checked = check_folder(folder, suite, files)
    seed = secrets.randbelow(10**6) if seed is None else seed
    chosen = drawn(checked, share, seed)
    say(f"{counted(len(chosen), 'run')} of {len(checked.specs)}, drawn with --seed {seed}, again:")
    settings = Settings(expanded(data_dir, "--data-dir"), expanded(cache_dir, "--cache-dir"), files)
    place = Place(engine, workers, "", 1.0, 0.0)
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
