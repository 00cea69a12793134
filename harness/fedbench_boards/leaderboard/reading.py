"""Stored results as they are asked for: which suite reads them, ranked by what, compared with which row."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from fedbench.core.metric_names import EACH_DOMAIN
from fedbench.suites.single import ADHOC, single
from fedbench.suites.suite import Suite, load_suite, suite_names
from fedbench_boards.leaderboard.board import of_suite
from fedbench_boards.leaderboard.model import Board
from fedbench_boards.leaderboard.named import baseline_named, metric_named
from fedbench_boards.leaderboard.network import Link
from fedbench_boards.leaderboard.published import Published, published_folder, published_of, unreadable_columns
from fedbench_boards.leaderboard.results import StoredResults, load_curves, load_runs
from fedbench_boards.statistics.paired import Test


@dataclass(frozen=True, kw_only=True)
class ReadingOptions:
    """How results are to be read; the suite decides what is None."""

    suite: str | None = None
    metric: str | None = None
    columns: tuple[str, ...] = ()
    baseline: str | None = None
    target: float | None = None
    test: str = Test.t.value

    @property
    def command(self) -> str:
        """The command, without paths of this machine since it is for others: a suite's file by its name."""
        suite = self.suite
        if suite is not None and suite.endswith((".yaml", ".yml")):
            suite = Path(suite).name
        values_of = {
            "--suite": [suite],
            "--metric": [self.metric],
            "--column": self.columns,
            "--baseline": [self.baseline],
            "--target": [None if self.target is None else f"{self.target:g}"],
            "--test": [None if self.test == Test.t.value else self.test],
        }
        words = [
            word for name, values in values_of.items() for one in values if one is not None for word in (name, one)
        ]
        return shlex.join(["fedbench", "leaderboard", *words])


@dataclass(frozen=True, eq=False)
class ReadResults:
    """Results, and the board that they make."""

    suite: Suite
    """As they are read."""
    stored: StoredResults
    results: pd.DataFrame
    """Those that finished."""
    curves: pd.DataFrame
    board: Board


def read_board(
    given: ReadingOptions,
    uri: str,
    *,
    network: str | None = None,
    published: Path | None = None,
    only: Collection[str] | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> ReadResults:
    """The results in the store at ``uri`` as they are asked for.

    ``network`` adds the seconds of sending (``MBIT[,MS]``), ``published`` is the folder of published numbers, ``only``
    are run ids. ``tell`` hears of what could not be done as asked. FedbenchError for a name that nothing has.
    """
    name, suite = suite_of(given.suite)
    stored = load_runs(uri, name)
    if only is not None:
        finished, failed = (frame[frame["run_id"].isin(only)] for frame in (stored.finished, stored.failed))
        stored = StoredResults(finished.reset_index(drop=True), failed.reset_index(drop=True))
    results = stored.finished if network is None else Link.parse(network).column(stored.finished)
    suite = _overruled(suite, given, stored)
    curves = load_curves(uri, results, *suite.headlines)
    board = of_suite(
        suite, results, curves, _published(suite, results, published, tell), Test(given.test), stored.failed
    )
    if given.metric is not None:
        _tell_ranked_otherwise(board, given.metric, suite.headline, tell)
    return ReadResults(suite, stored, results, curves, board)


def board_of_runs(suite: Suite, given: ReadingOptions, stored: StoredResults) -> Board:
    """The board that the runs of ``stored`` make alone: without curves, so without rounds to a target."""
    suite = _overruled(suite, given, stored)
    published = _published(suite, stored.finished, None, lambda _: None)
    return of_suite(suite, stored.finished, None, published, Test(given.test), stored.failed)


def made_by(stored: StoredResults, given: ReadingOptions) -> str:
    """All commands behind the results and failures, oldest first, then the one that reads them; a line each.

    A failure of a run that has finished since is none.
    """
    lost = stored.failed[~stored.failed["run_id"].isin(stored.finished["run_id"])]
    runs = [run for frame in (stored.finished, lost) for run in frame.to_dict("records")]
    runs.sort(key=lambda run: run["started"])
    commands = [command for run in runs for command in json.loads(run["made_by"])]
    return "\n".join([*dict.fromkeys(commands), given.command])


def suite_of(name: str | None) -> tuple[str | None, Suite]:
    """What results are filed under, and how they are read: a name without a suite file (``adhoc``) is read as usual."""
    if name is None or not (name in suite_names() or name.endswith((".yaml", ".yml"))):
        return name, single().model_copy(update={"name": name or ADHOC})
    suite = load_suite(name)
    return suite.name, suite


def _overruled(read: Suite, given: ReadingOptions, stored: StoredResults) -> Suite:
    """The suite's way of reading, with what is asked for; FedbenchError for what no run has."""
    results = stored.finished
    changes: dict[str, object] = {}
    if given.metric is not None:
        read = read.ranked_by(metric_named(results, given.metric))
    if given.columns:
        changes["columns"] = tuple(c if c in EACH_DOMAIN else metric_named(results, c) for c in given.columns)
    if given.baseline is not None:
        changes["baseline"] = baseline_named(results, given.baseline, stored.failed)
    if given.target is not None:
        changes["target"] = given.target
    return read.model_copy(update=changes)


def _tell_ranked_otherwise(board: Board, given: str, headline: str, tell: Callable[[str], None]) -> None:
    otherwise = sum(table.headline != headline for table in board.tables)
    if otherwise:
        tell(
            f"{otherwise} of {len(board.tables)} tables have no row with a mean of {given!r} and are ranked by "
            "the overall accuracy."
        )


def _published(
    read: Suite, results: pd.DataFrame, folder: Path | None, tell: Callable[[str], None]
) -> Published | None:
    """What the suite's paper prints; None, which is told, where its file is not found."""
    place = published_folder(folder)
    facts = published_of(read, place)
    if read.published and facts is None:
        tell(
            f"published numbers are not shown: there is no {read.published}.csv in {place}; name its folder with "
            "--published."
        )
    unread = [] if facts is None else unreadable_columns(facts, results)
    if unread:
        tell(f"{read.published}.csv has no column {', '.join(unread)}; keys with it pick no number.")
    return facts
