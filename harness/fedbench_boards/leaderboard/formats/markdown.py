"""A leaderboard as Markdown: every table under its caption and above what its rows were run with."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from fedbench_boards.leaderboard.across.table import across_table
from fedbench_boards.leaderboard.model import Board
from fedbench_boards.leaderboard.tables import TextColumn, TextTable, text_tables

# a bracket and what would make a link of it: names have brackets of their own
_MARKUP = re.compile(r"[\\|*`]|(?<=\])\(")
_BACKTICKS = re.compile("`+")


def to_markdown(board: Board) -> str:
    """Every table of the board as Markdown, each under its caption and above what its rows were run with."""
    summary = across_table(board)
    tables = [*text_tables(board), *([] if summary is None else [summary])]
    return "\n\n".join(map(_table, tables)) + "\n"


def _table(table: TextTable) -> str:
    columns = [table.rank, *table.names, *table.scores, *table.further, *table.status]
    texts = (*table.names, *table.status)
    aligned = ["---:" if column.heading == "#" or column not in texts else "---" for column in columns]
    lines = [[_plain(column.heading) for column in columns], aligned]
    lines += [[_cell(column, number) for column in columns] for number in range(len(table.rank.cells))]
    rows = ["| " + " | ".join(line) + " |" for line in lines]
    notes = [part for note in (*table.failures, *table.notes) for part in (_plain(note), "")]
    return "\n".join([_plain(table.caption), "", *rows, "", *notes, *_settings_list(table)])


def _cell(column: TextColumn, line: int) -> str:
    cell = _plain(column.cells[line])
    sign = column.sign(line)
    return (f"**{cell}**" if column.is_best(line) else cell) + (f" {_plain(sign)}" if sign else "")


def _plain(text: str) -> str:
    """``text`` on one line, without what Markdown would take for markup."""
    return _MARKUP.sub(r"\\\g<0>", " ".join(text.split())).replace("<", "&lt;")


def _code(text: str) -> str:
    """``text`` on one line, between more backticks than it has in a row."""
    plain = " ".join(text.split())
    fence = "`" * (1 + max((len(run) for run in _BACKTICKS.findall(plain)), default=0))
    return f"{fence}{plain}{fence}" if fence == "`" else f"{fence} {plain} {fence}"


def _settings_list(table: TextTable) -> Iterator[str]:
    """The shared settings in one line, then a line per row: its seeds, own settings, and runs."""
    if not table.rows:
        return
    yield f"All rows: {_assigned(table.common)}"
    yield ""
    for row in table.rows:
        own = f": {_assigned(row.settings)}" if row.settings else ""
        spent = _plain(", ".join(f"{key} {value}" for key, value in row.tuning.items()))
        tuned = f"; tuned: {spent}" if spent else ""
        runs = " ".join(_code(run) for run in row.runs)
        ids = f"; run{'s' if len(row.runs) > 1 else ''} {runs}" if row.runs else "; failed"
        yield f"- {_plain(row.name)}, {row.seeds}{own}{tuned}{ids}"


def _assigned(settings: Mapping[str, str]) -> str:
    return ", ".join(_code(f"{key}={value}") for key, value in settings.items())
