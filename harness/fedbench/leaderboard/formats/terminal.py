"""A leaderboard for readers: tables in the terminal, Markdown, CSV."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from fedbench.core.files import csv_text
from fedbench.leaderboard.failures import shortened
from fedbench.leaderboard.tables import STATUS, Column, Shown, tables

_ANY_WIDTH = 10_000
_REASON, _REASON_WIDTH, _FAILURE = 84, 32, 240
"""Characters of a reason in its cell, of a line of it, and of a failure told below the table, in the terminal."""
# a bracket and what would make a link of it: names have brackets of their own
_MARKUP = re.compile(r"[\\|*`]|(?<=\])\(")
_BACKTICKS = re.compile("`+")


class _Terminal:
    """The tables of a board, each laid out for the width it is printed in."""

    def __init__(self, board: pd.DataFrame) -> None:
        self._tables = list(tables(board))

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


def render_terminal(board: pd.DataFrame) -> RenderableType:
    """Every table of the board under its caption and above what its marks mean, to print on a rich console.

    Where a table is too wide, backbones become letters, then published numbers and costs a second table.
    """
    return _Terminal(board)


def to_markdown(board: pd.DataFrame) -> str:
    """Every table of the board as Markdown, each under its caption and above what its rows were run with."""
    parts = []
    for shown in tables(board):
        columns = [shown.rank, *shown.names, *shown.scores, *shown.further, *shown.status]
        texts = (*shown.names, *shown.status)
        aligned = ["---:" if column.heading == "#" or column not in texts else "---" for column in columns]
        lines = [[_markdown(column.heading) for column in columns], aligned]
        lines += [[_markdown_cell(column, number) for column in columns] for number in range(len(shown.rows))]
        rows = ["| " + " | ".join(line) + " |" for line in lines]
        notes = [part for note in (*shown.failures, *shown.notes) for part in (_markdown(note), "")]
        parts.append("\n".join([_markdown(shown.caption), "", *rows, "", *notes, *_settings_list(shown)]))
    return "\n\n".join(parts) + "\n"


def to_csv(board: pd.DataFrame, path: Path) -> None:
    """The board with unrounded means and standard deviations in columns of their own; costs in bytes and seconds."""
    path.write_text(csv_text(board), encoding="utf-8")


def _layouts(shown: Shown) -> Iterator[tuple[list[Table], list[str]]]:
    """Ways to show a table with the notes each needs, the plainest first."""
    plain = [*(shortened(failure, _FAILURE) for failure in shown.failures), *shown.notes]
    lettered = [*plain, *([shown.letters] if shown.letters else [])]
    status = [replace(one, cells=[shortened(cell, _REASON) for cell in one.cells]) for one in shown.status]
    for names, notes in ((shown.names, plain), (shown.short, lettered)):
        yield [_table([shown.rank, *names, *shown.scores, *shown.further, *status])], notes
    for names, notes in ((shown.names, plain), (shown.short, lettered)):
        first = [shown.rank, *names]
        yield [_table([*first, *shown.scores, *status]), _table([*first, *shown.further])], notes


def _table(columns: Sequence[Column]) -> Table:
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


def _cell(column: Column, line: int) -> str:
    """A cell with its sign, or with room for one where others have it."""
    wide = max((len(sign) for sign in column.signs), default=0)
    return column.cells[line] + (f" {column.sign(line):<{wide}}" if wide else "")


def _width(layout: Sequence[Table], console: Console, options: ConsoleOptions) -> int:
    free = options.update(max_width=_ANY_WIDTH)
    return max(Measurement.get(console, free, table).maximum for table in layout)


def _markdown_cell(column: Column, line: int) -> str:
    cell = _markdown(column.cells[line])
    sign = column.sign(line)
    return (f"**{cell}**" if column.is_best(line) else cell) + (f" {_markdown(sign)}" if sign else "")


def _markdown(text: str) -> str:
    """``text`` on one line, without what Markdown would take for markup."""
    return _MARKUP.sub(r"\\\g<0>", " ".join(text.split())).replace("<", "&lt;")


def _code(text: str) -> str:
    """``text`` on one line, between more backticks than it has in a row."""
    plain = " ".join(text.split())
    fence = "`" * (1 + max((len(run) for run in _BACKTICKS.findall(plain)), default=0))
    return f"{fence}{plain}{fence}" if fence == "`" else f"{fence} {plain} {fence}"


def _settings_list(shown: Shown) -> Iterator[str]:
    """What all rows share in one line, then a line a row: its seeds, what is its own, and its runs."""
    yield f"All rows: {_assigned(shown.common)}"
    yield ""
    for row in shown.rows:
        own = f": {_assigned(row.settings)}" if row.settings else ""
        spent = _markdown(", ".join(f"{key} {value}" for key, value in row.tuning.items()))
        tuned = f"; tuned: {spent}" if spent else ""
        runs = " ".join(_code(run) for run in row.runs)
        ids = f"; run{'s' if len(row.runs) > 1 else ''} {runs}" if row.runs else "; failed"
        yield f"- {_markdown(row.name)}, {row.seeds}{own}{tuned}{ids}"


def _assigned(settings: dict[str, str]) -> str:
    return ", ".join(_code(f"{key}={value}") for key, value in settings.items())
