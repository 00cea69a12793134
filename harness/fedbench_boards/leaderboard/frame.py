"""A leaderboard as a data frame, for programs."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from fedbench.core.wording import MEGA
from fedbench.tracking.schema import store_uri
from fedbench_boards.leaderboard.formats.files import flat
from fedbench_boards.leaderboard.model import Board, Line, Table
from fedbench_boards.leaderboard.reading import ReadingOptions, read_board

_WHERE_TOLD = ("table", "setting", "failure")
"""Columns that are left out if all their values are empty or 0."""


def leaderboard(
    suite: str | None = None,
    *,
    metric: str | None = None,
    columns: str | Iterable[str] = (),
    baseline: str | None = None,
    target: float | None = None,
    test: str = "t",
    network: str | None = None,
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
    place = None if published is None else Path(published)
    return frame_of(read_board(given, uri, network=network, published=place, tell=_warn).board, full=full)


def frame_of(board: Board, *, full: bool = False) -> pd.DataFrame:
    """A line a row, the best first in each ``table``: means and standard deviations over ``seeds``, in %.

    ``delta`` is the difference to the baseline with its 95 % interval (``delta_low``, ``delta_high``) and the ``p`` of
    its test, corrected for the rows of the table. Rows that their seeds can't tell from the best share ``tied_rank`` 1;
    ``p_best`` is how likely a row is the best. ``megabytes`` are sent both ways. With ``full`` it has the
    columns of the file leaderboard.csv instead.
    """
    if full:
        return flat(board)
    frame = pd.DataFrame(
        [_line(number, table, line) for number, table in enumerate(board.tables) for line in table.lines]
    )
    silent = [name for name in _WHERE_TOLD if name in frame and frame[name].nunique() < 2 and not any(frame[name])]
    return frame.drop(columns=silent).astype({"rank": "Int64", "tied_rank": "Int64"} if len(frame) else {})


def _line(number: int, table: Table, line: Line) -> dict[str, Any]:
    cells = {metric: line.cell(metric) for metric in table.shown}
    scores = {
        f"{metric}{end}": value
        for metric, cell in cells.items()
        for end, value in (("", cell.mean), ("_std", cell.std))
    }
    return {
        "table": number,
        "setting": line.setting,
        "rank": line.rank,
        "tied_rank": line.tied_rank,
        "row": line.row,
        **scores,
        "delta": line.delta.cell.mean,
        "delta_std": line.delta.cell.std,
        "delta_low": line.delta.low,
        "delta_high": line.delta.high,
        "p": line.delta.p_adjusted,
        "p_best": line.p_best,
        "megabytes": line.sent / MEGA,
        "train_seconds": line.cost("train_seconds"),
        "seeds": len(line.runs),
        "failure": line.status.text,
    }


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=2)
