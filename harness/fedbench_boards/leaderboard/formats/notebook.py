"""A leaderboard in the output of a notebook's cell."""

from __future__ import annotations

import html
from collections.abc import Iterator

from fedbench_boards.leaderboard.model import Board
from fedbench_boards.leaderboard.tables import TextColumn, TextTable, text_tables


def to_html(board: Board) -> str:
    """Every table of the board under its caption and above what its marks mean, without styles of its own."""
    return "".join("".join(_table(table)) for table in text_tables(board))


def _table(table: TextTable) -> Iterator[str]:
    columns = [table.rank, *table.names, *table.scores, *table.further, *table.status]
    texts = [*table.names, *table.status]
    yield f"<div><small>{html.escape(table.caption)}</small></div><table><thead><tr>"
    yield from (f"<th{_side(column, texts)}>{html.escape(column.heading)}</th>" for column in columns)
    yield "</tr></thead><tbody>"
    for line in range(len(table.rows)):
        yield "<tr>"
        yield from (f"<td{_side(column, texts)}>{_cell(column, line)}</td>" for column in columns)
        yield "</tr>"
    yield "</tbody></table>"
    yield from (f"<div><small>{html.escape(note)}</small></div>" for note in (*table.failures, *table.notes))


def _side(column: TextColumn, texts: list[TextColumn]) -> str:
    return f' style="text-align: {"left" if column in texts else "right"}"'


def _cell(column: TextColumn, line: int) -> str:
    text = html.escape(column.cells[line])
    sign = html.escape(column.sign(line))
    return (f"<b>{text}</b>" if column.is_best(line) else text) + (f" {sign}" if sign else "")
