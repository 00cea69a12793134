"""Stored results as they are asked for: which suite reads them, ranked by what, compared with which row."""

from __future__ import annotations

import json
import shlex
import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from fedbench.core.errors import FedbenchError, unknown_name
from fedbench.core.metric_names import EACH_DOMAIN, QUALITIES
from fedbench.core.wording import MEGA, heading
from fedbench.kinds.measured import metric_plugin
from fedbench.suites.suite import ADHOC, Suite, load_suite, single, suite_names
from fedbench.tracking.schema import FINAL, store_uri
from fedbench_boards.leaderboard import failures
from fedbench_boards.leaderboard.board import of_suite
from fedbench_boards.leaderboard.formats import flat
from fedbench_boards.leaderboard.model import Board
from fedbench_boards.leaderboard.published import Published, published_folder, published_of, unreadable_columns
from fedbench_boards.leaderboard.results import StoredResults, load_curves, load_runs
from fedbench_boards.leaderboard.rows import PROTOCOL, label_of, named_rows
from fedbench_boards.statistics import Test


def metric_named(results: pd.DataFrame, name: str) -> str:
    """The accuracy that ``--metric`` means: ``tail`` is ``tail_accuracy``, ``own models`` is the metric with this
    heading.

    FedbenchError for an accuracy that no run has.
    """
    known = [str(column).removeprefix(FINAL) for column in results if str(column).startswith(FINAL)]
    accuracies = [metric for metric in known if "accuracy" in metric or metric in QUALITIES or metric_plugin(metric)]
    accuracies = [metric for metric in accuracies if results[FINAL + metric].notna().any()]
    if not accuracies:
        raise FedbenchError(f"no run has finished with an accuracy, so there is no {name!r}.")
    short = {metric.removesuffix("_accuracy"): metric for metric in accuracies}
    called = {heading(metric).replace(" ", "_"): metric for metric in accuracies if "/" not in metric}
    called |= short | {metric: metric for metric in accuracies}
    metric_meant = called.get(name) or called.get(name.replace(" ", "_"))
    if metric_meant is None and name in known:
        raise FedbenchError(
            f"metric {name!r} is of a plug-in that is not here; install it, or give its file with --plugin."
        )
    if metric_meant is None:
        raise unknown_name("accuracy in these results", name, short)
    return metric_meant


def baseline_named(results: pd.DataFrame, name: str, failed: pd.DataFrame | None = None) -> str:
    """``name`` if it is a row, a method or a label in ``results`` or of ``failed`` runs; FedbenchError otherwise."""
    tried = failures.attempts(results, failed)
    known = {*tried["row"], *tried["method"], *(label_of(row) for row in tried["row"])}
    for _, of_protocol in tried.groupby(list(PROTOCOL), sort=False, dropna=False):
        protocol, lost = failures.split(of_protocol)
        rows = named_rows(protocol)
        known |= {*rows, *failures.without_a_run(rows, lost)}
    if name not in known:
        raise unknown_name("baseline", name, known, "It is a row, or the method of one.")
    return name


@dataclass(frozen=True, kw_only=True)
class ReadingOptions:
    """How results are to be read; the suite decides what is None."""

    suite: str | None = None
    metric: str | None = None
    columns: tuple[str, ...] = ()
    baseline: str | None = None
    target: float | None = None
    test: str = Test.t.value

    def __post_init__(self) -> None:
        known = [test.value for test in Test]
        if self.test not in known:
            raise unknown_name("test", str(self.test), known)

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
        words = [(name, text) for name, values in values_of.items() for text in values if text is not None]
        return shlex.join(["fedbench", "leaderboard", *(word for pair in words for word in pair)])


@dataclass(frozen=True, eq=False)
class ReadResults:
    """Results, and the board that they make."""

    suite: Suite
    """The suite that says how they are read."""
    stored: StoredResults
    results: pd.DataFrame
    """The runs that finished."""
    curves: pd.DataFrame
    board: Board


def read_board(
    given: ReadingOptions,
    uri: str,
    *,
    published: Path | None = None,
    only: Collection[str] | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> ReadResults:
    """The results in the store at ``uri`` as they are asked for.

    ``published`` is the folder of published numbers, ``only`` are run ids. ``tell`` hears of what could not be done as
    asked. FedbenchError for a name that nothing has.
    """
    name, suite = suite_of(given.suite)
    stored = load_runs(uri, name)
    if only is not None:
        finished, failed = (frame[frame["run_id"].isin(only)] for frame in (stored.finished, stored.failed))
        stored = StoredResults(finished.reset_index(drop=True), failed.reset_index(drop=True))
    results = stored.finished
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
    source = published_folder(folder)
    facts = published_of(read, source)
    if read.published and facts is None:
        tell(
            f"published numbers are not shown: there is no {read.published}.csv in {source}; name its folder with "
            "--published."
        )
    unread = [] if facts is None else unreadable_columns(facts, results)
    if unread:
        tell(f"{read.published}.csv has no column {', '.join(unread)}; keys with it pick no number.")
    return facts


_WHERE_TOLD = ("table", "setting", "failure")
"""Columns that are left out if all their values are empty or 0."""
_FIRST = {"block": "table"} | {name: name for name in ("setting", "rank", "rank_low", "rank_high", "row")}
_LAST = {"delta_mean": "delta"} | {name: name for name in ("delta_std", "delta_low", "delta_high")}
_LAST |= {"p_adjusted": "p", "p_best": "p_best", "megabytes": "megabytes", "train_seconds_mean": "train_seconds"}
_LAST |= {"seeds": "seeds", "failure": "failure"}
"""Columns of leaderboard.csv before and behind the scores, and what the data frame calls them."""


def leaderboard(
    suite: str | None = None,
    *,
    metric: str | None = None,
    columns: str | Iterable[str] = (),
    baseline: str | None = None,
    target: float | None = None,
    test: str = "t",
    store: str | Path | None = None,
    published: str | Path | None = None,
    full: bool = False,
) -> pd.DataFrame:
    """The leaderboard of stored results, as ``fedbench leaderboard`` shows it with options of the same names.

    See `frame_of` for the columns. Raises FedbenchError where there are no results, or for a name that nothing has.
    """
    given = ReadingOptions(
        suite=suite,
        metric=metric,
        columns=(columns,) if isinstance(columns, str) else tuple(columns),
        baseline=baseline,
        target=target,
        test=test,
    )
    uri = store_uri(None if store is None else str(store), to_write=False)
    folder = None if published is None else Path(published)
    return frame_of(read_board(given, uri, published=folder, tell=_warn).board, full=full)


def frame_of(board: Board, *, full: bool = False) -> pd.DataFrame:
    """A line a row, the best first in each ``table``: means and standard deviations over ``seeds``, in %.

    ``delta`` is the difference to the baseline with its 95 % interval (``delta_low``, ``delta_high``) and the ``p`` of
    its test, corrected for the rows of the table. A row's rank is from ``rank_low`` to ``rank_high`` by its seeds;
    ``p_best`` is how likely a row is the best. ``megabytes`` are sent both ways. With ``full`` it has the
    columns of the file leaderboard.csv instead.
    """
    frame = flat(board)
    if full or frame.empty:
        return frame
    shown = dict.fromkeys(metric for table in board.tables for metric in table.shown)
    scores = {f"{metric}_{part}": f"{metric}{end}" for metric in shown for part, end in (("mean", ""), ("std", "_std"))}
    names = _FIRST | scores | _LAST
    frame = frame.assign(megabytes=(frame["bytes_up_mean"] + frame["bytes_down_mean"]) / MEGA)
    frame = frame[[name for name in names if name in frame]].rename(columns=names)
    silent = [name for name in _WHERE_TOLD if frame[name].nunique() < 2 and not any(frame[name])]
    return frame.drop(columns=silent).astype(dict.fromkeys(("rank", "rank_low", "rank_high"), "Int64"))


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=2)
