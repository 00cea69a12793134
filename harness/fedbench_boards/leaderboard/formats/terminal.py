"""A leaderboard in the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from fedbench_boards.leaderboard.across.table import across_table
from fedbench_boards.leaderboard.failures import shortened
from fedbench_boards.leaderboard.model import Board
from fedbench_boards.leaderboard.tables import STATUS, TextColumn, TextTable, text_tables

_ANY_WIDTH = 10_000
_REASON, _REASON_WIDTH, _FAILURE = 84, 32, 240
"""The most characters of a reason in its cell, of one line of it, and of a failure below the table."""


class _Terminal:
    """The tables of a board, each laid out for the width it is printed in."""

    def __init__(self, board: Board) -> None:
        summary = across_table(board)
        self._tables = [*text_tables(board), *([] if summary is None else [summary])]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for shown in self._tables:
            layouts = list(_layouts(shown))
            fitting = (one for one in layouts if _width(one[0], console, options) <= options.max_width)
            layout, notes = next(fitting, layouts[-1])
            yield Text(shown.caption, "dim")
            for table in layout:
                yield Text()
                yield table
            yield Text("\n".join(["", *notes, ""]), "dim")


def render_terminal(board: Board) -> RenderableType:
    """Every table of the board under its caption and above what its marks mean, to print on a rich console.

    Where a table is too wide, backbones become letters, then published numbers and costs a second table.
    """
    return _Terminal(board)


def _layouts(shown: TextTable) -> Iterator[tuple[list[Table], list[str]]]:
    """Ways to show a table, each with its notes, the plainest first."""
    plain = [*(shortened(failure, _FAILURE) for failure in shown.failures), *shown.notes]
    lettered = [*plain, *([shown.letters] if shown.letters else [])]
    status = [replace(one, cells=[shortened(cell, _REASON) for cell in one.cells]) for one in shown.status]
    for names, notes in ((shown.names, plain), (shown.short, lettered)):
        yield [_table([shown.rank, *names, *shown.scores, *shown.further, *status])], notes
    for names, notes in ((shown.names, plain), (shown.short, lettered)):
        first = [shown.rank, *names]
        yield [_table([*first, *shown.scores, *status]), _table([*first, *shown.further])], notes


def _table(columns: Sequence[TextColumn]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold", collapse_padding=True)
    for column in columns:
        is_name = column.heading in ("row", "method")
        is_status = column.heading == STATUS
        is_text = is_name or is_status or column.heading == "on"
        table.add_column(
            Text(column.heading),
            justify="left" if is_text else "right",
            no_wrap=not (is_name or is_status),
            overflow="fold",
            max_width=_REASON_WIDTH if is_status else None,
        )
    for line in range(len(columns[0].cells)):
        # Text, because brackets in a plain string would be read as markup
        table.add_row(*(Text(_cell(column, line), "bold" if column.is_best(line) else "") for column in columns))
    return table


def _cell(column: TextColumn, line: int) -> str:
    """A cell with its sign, or with room for one if other cells have it."""
    wide = max((len(sign) for sign in column.signs), default=0)
    return column.cells[line] + (f" {column.sign(line):<{wide}}" if wide else "")


def _width(layout: Sequence[Table], console: Console, options: ConsoleOptions) -> int:
    free = options.update(max_width=_ANY_WIDTH)
    return max(Measurement.get(console, free, table).maximum for table in layout)
