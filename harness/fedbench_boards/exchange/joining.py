"""Result folders of one suite in one: every run once, and the board of all of them.

Folders have no curves, so rounds to a target and what is drawn of single rounds are those of stores alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from fedbench.core.errors import FedbenchError
from fedbench.core.files import usable_folder
from fedbench.tracking.schema import FINAL
from fedbench_boards.exchange.checks import Checked, check_alike
from fedbench_boards.exchange.folder import named
from fedbench_boards.exchange.manifest import Environment, write_manifest
from fedbench_boards.exchange.numbers import differing, finals
from fedbench_boards.leaderboard.across.map import map_on_page
from fedbench_boards.leaderboard.formats.files import write
from fedbench_boards.leaderboard.page import write_page
from fedbench_boards.leaderboard.reading import ReadResults, board_of_runs, made_by
from fedbench_boards.leaderboard.results import StoredResults
from fedbench_boards.leaderboard.rows.identity import ON_NETWORK


def join(folders: Sequence[Checked], into: Path) -> int:
    """Write the board of all runs of ``folders`` into the folder ``into``; how many runs it has.

    FedbenchError where suite, licence or way of reading differ, where two folders have a run with other numbers or an
    other end, and where rows would lack seeds or have other data than the others.
    """
    into, first = usable_folder(into, "--into"), folders[0]
    for other in folders[1:]:
        _refuse_others(first, other)
    suite, given = first.suite, first.folder.manifest.options
    results = _joined(folders)
    stored = StoredResults(results, _diverged(folders, results))
    check_alike(pd.concat([results, stored.failed]), suite)
    board = board_of_runs(suite, given, stored)
    read = ReadResults(suite, stored, results, pd.DataFrame(), board)
    command = made_by(stored, replace(given, suite=suite.name))
    write(results, board, into, command)
    drawn = map_on_page(suite, board, read.curves)
    write_page(into / "index.html", suite.name, suite.description, results, board, read.curves, {}, command, drawn)
    write_manifest(into, read, given, first.folder.manifest.licence, _environment(folders))
    return len(results)


def _refuse_others(first: Checked, other: Checked) -> None:
    one, two = first.folder.manifest, other.folder.manifest
    for what, values in {
        "suite": (first.suite.name, other.suite.name),
        "licence": (one.licence, two.licence),
        "way of reading": (one.options.command, two.options.command),
        "network": (_networks(first), _networks(other)),
    }.items():
        if values[0] != values[1]:
            raise FedbenchError(
                f"the {what} of {str(first.folder.path)!r} is {values[0]}, that of {str(other.folder.path)!r} "
                f"{values[1]}; merge folders that have it in common."
            )


def _joined(folders: Sequence[Checked]) -> pd.DataFrame:
    """The runs of all folders, oldest first; of a run that several have, the first one's line."""
    kept: dict[str, Mapping[Any, Any]] = {}
    for folder in folders:
        for line in folder.folder.results.to_dict("records"):
            before = kept.setdefault(str(line["run_id"]), line)
            # a folder has columns for the metrics of its own runs
            both = before.keys() & line.keys()
            metric = next(differing(*(finals({name: each[name] for name in both}) for each in (before, line))), None)
            if metric is not None:
                raise FedbenchError(
                    f"{named(line)}: two folders have it with different numbers, {metric.removeprefix(FINAL)} "
                    f"{before[metric]!r} and {line[metric]!r}; fedbench verify tells which comes out again."
                )
    frame = pd.DataFrame(list(kept.values())).sort_values("started", kind="stable", ignore_index=True)
    # a text that one of the folders has no column of
    lacking = [str(name) for name in frame if not str(name).startswith(FINAL) and frame[name].isna().any()]
    return frame.assign(**{name: frame[name].fillna("") for name in lacking})


def _diverged(folders: Sequence[Checked], results: pd.DataFrame) -> pd.DataFrame:
    """The runs that diverged, each once. FedbenchError for one that ended with a number in another folder."""
    every = pd.concat([folder.diverged for folder in folders], ignore_index=True).drop_duplicates("run_id")
    both = every[every["run_id"].isin(results["run_id"])]
    if len(both):
        raise FedbenchError(
            f"{named(both.iloc[0].to_dict())}: it diverged in one folder and ended with a number in another; fedbench "
            "verify tells which comes out again."
        )
    return every


def _networks(folder: Checked) -> str:
    """What seconds of sending were added for, see ``fedbench leaderboard --network``."""
    named = [str(name).removeprefix(FINAL) for name in folder.folder.results]
    return "; ".join(name for name in named if name.startswith(ON_NETWORK)) or "none"


def _environment(folders: Sequence[Checked]) -> Environment:
    """That of all folders; where they differ the several, which no machine equals."""
    found = [folder.folder.manifest.environment.model_dump() for folder in folders]
    return Environment(**{name: ", ".join(dict.fromkeys(one[name] for one in found)) for name in found[0]})
