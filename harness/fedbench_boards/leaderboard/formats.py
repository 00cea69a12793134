"""A leaderboard as files (CSV, Markdown), in the terminal, and in the output of a notebook's cell."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from fedbench.core.files import csv_text, file_bytes, replacing
from fedbench_boards.leaderboard.across import across_table
from fedbench_boards.leaderboard.failures import shortened
from fedbench_boards.leaderboard.model import Board, Line, Printed, Table
from fedbench_boards.leaderboard.rows import seeds_named
from fedbench_boards.leaderboard.tables import STATUS, Cell, Column, TextTable, in_words, text_tables

# a bracket and what would make a link of it: names have brackets of their own
_MARKUP = re.compile(r"[\\|*`]|(?<=\])\(")
_BACKTICKS = re.compile("`+")


def to_markdown(board: Board) -> str:
    """Every table of the board as Markdown, each under its caption and above what its rows were run with."""
    summary = across_table(board)
    tables = [*text_tables(board), *([] if summary is None else [summary])]
    return "\n\n".join(map(_markdown_table, tables)) + "\n"


def _markdown_table(table: TextTable) -> str:
    columns = table.columns
    aligned = ["---" if table.is_words(column) else "---:" for column in columns]
    headings = [_plain(column.heading) for column in columns]
    cells = (map(_markdown_cell, line) for line in table.lines)
    rows = ["| " + " | ".join(line) + " |" for line in (headings, aligned, *cells)]
    notes = [part for note in (*table.failures, *table.notes) for part in (_plain(note), "")]
    return "\n".join([_plain(table.caption), "", *rows, "", *notes, *_settings_list(table)])


def _markdown_cell(cell: Cell) -> str:
    text = _plain(cell.text)
    return (f"**{text}**" if cell.best else text) + (f" {_plain(cell.sign)}" if cell.sign else "")


def _plain(text: str) -> str:
    """``text`` on one line, without what Markdown would take for markup."""
    return _MARKUP.sub(r"\\\g<0>", " ".join(text.split())).replace("<", "&lt;")


def _code(text: str) -> str:
    """``text`` on one line, between more backticks than it has in a row."""
    plain = " ".join(text.split())
    fence = "`" * (1 + max((len(run) for run in _BACKTICKS.findall(plain)), default=0))
    return f"{fence}{plain}{fence}" if fence == "`" else f"{fence} {plain} {fence}"


def _settings_list(shown: TextTable) -> Iterator[str]:
    """The shared settings in one line, then a line per row: its seeds, own settings, and runs."""
    table = shown.of
    if table is None:
        return
    yield f"All rows: {_assigned(table.shared_settings)}"
    yield ""
    for name, line in zip(shown.names[0].texts, table.lines, strict=True):
        settings = table.own_settings(line)
        own = f": {_assigned(settings)}" if settings else ""
        spent = _plain(", ".join(f"{key} {value}" for key, value in line.tuning.items())) if line.tuned else ""
        tuned = f"; tuned: {spent}" if spent else ""
        runs = " ".join(map(_code, line.runs.values()))
        ids = f"; run{'s' if len(line.runs) > 1 else ''} {runs}" if line.runs else "; failed"
        yield f"- {_plain(name)}, {seeds_named(line.seeds)}{own}{tuned}{ids}"


def _assigned(settings: Mapping[str, str]) -> str:
    return ", ".join(_code(f"{key}={value}") for key, value in settings.items())


def to_csv(board: Board) -> str:
    """The board with unrounded means and standard deviations in columns of their own; costs in bytes and seconds."""
    return csv_text(flat(board))


def write(results: pd.DataFrame, board: Board, folder: Path, command: str) -> None:
    """Write ``results.csv.gz`` (a line per run), ``leaderboard.csv.gz`` and ``leaderboard.md``.

    ``command`` are the commands that made all of it, a line each. FedbenchError where ``folder`` can't be written.
    """
    texts = {
        "results.csv.gz": csv_text(results),
        "leaderboard.csv.gz": to_csv(board),
        "leaderboard.md": markdown_page(board, command),
    }
    for name, text in texts.items():
        with replacing(folder / name, "leaderboard", "choose another --output") as temporary:
            temporary.write_bytes(file_bytes(name, text))


def markdown_page(board: Board, command: str) -> str:
    """The content of leaderboard.md; ``command`` as for `write`."""
    prompts = "\n".join(f"$ {line}" for line in command.splitlines())
    commands = f"Made by\n\n```console\n{prompts}\n```\n\n" if command else ""
    summary = across_table(board) if board.has_many_tables else None
    if summary is None:
        return f"# Leaderboard\n\n{commands}{to_markdown(board)}"
    said = f"The {len(board.tables)} tables of single settings are in leaderboard.csv.gz."
    return f"# Leaderboard\n\n{commands}{said}\n\n{_markdown_table(summary)}\n"


def flat(board: Board) -> pd.DataFrame:
    """A line per row of every table, numbered by ``block``; cells with several values are JSON."""
    frame = pd.DataFrame(
        [_line(number, table, line) for number, table in enumerate(board.tables) for line in table.lines]
    )
    # whole numbers stay whole beside a row without a rank
    gaps = {
        name: "Int64" for name in ("rank", "rank_low", "rank_high") if len(frame) and bool(frame[name].isna().any())
    }
    return frame.astype(gaps)


_NAMED = (
    *("rank", "row", "label", "setting", "scale", "dataset", "scenario", "method", "backbone"),
    *("server_data", "not_on_unseen", "tuned"),
)
"""Columns that are called as in a line."""


def _line(block: int, table: Table, line: Line) -> dict[str, Any]:
    cells = {f"{metric}_{part}": getattr(c, part) for metric, c in line.cells.items() for part in ("mean", "std")}
    delta, milestone = line.delta, line.milestone
    return {
        "block": block,
        "caption": table.caption,
        "baseline": table.baseline,
        **{name: getattr(line, name) for name in _NAMED},
        "tuning": _json(line.tuning),
        "headline": table.headline,
        "runs": _json(line.runs),
        "mlflow_ids": _json(line.mlflow_ids),
        "seeds": len(line.runs),
        **cells,
        **{f"{cost}_mean": value for cost, value in line.costs.items()},
        "seed_list": ", ".join(str(seed) for seed in line.seeds),
        "settings": _json(line.settings),
        "delta_mean": delta.cell.mean,
        "delta_std": delta.cell.std,
        "delta_low": delta.low,
        "delta_high": delta.high,
        "delta_seeds": delta.seeds,
        **{name: getattr(delta, name) for name in ("p_value", "significance", "test")},
        "baseline_note": delta.note,
        "rounds_to_target_mean": milestone.rounds.mean,
        "rounds_to_target_std": milestone.rounds.std,
        "bytes_to_target_mean": milestone.bytes,
        "seconds_to_target_mean": milestone.seconds,
        "target": milestone.target,
        "target_metric": milestone.metric,
        "target_reached": milestone.text,
        **({} if line.printed is None else _printed(line.printed)),
        "status": line.status.status,
        "failure": line.status.text,
        "failures": _json([vars(failure) for failure in line.status.failures]),
        "untrained": line.untrained,
        "one_for_all": line.one_for_all,
        "shown": _json(table.shown),
        "incomplete": _json(line.incomplete),
        "p_adjusted": delta.p_adjusted,
        **{name: getattr(line, name) for name in ("whole", "rank_low", "rank_high", "p_best")},
    }


def _printed(printed: Printed) -> Mapping[str, Any]:
    return {
        "published": printed.value,
        "published_delta": printed.delta,
        "published_source": printed.source,
        "published_keys": _json(printed.keys),
        "published_several": _json([{"source": source, "value": value} for source, value in printed.several]),
        "comparable": printed.comparable,
        "differs": printed.differs,
        "differences": _json([[d.aspect, d.printed, d.here] for d in printed.differences]),
        "not_printed": _json(printed.not_printed),
        "published_also": _json([{"source": source, "value": value} for source, value in printed.also]),
        **{f"published_{metric}": one.value for metric, one in printed.metrics.items()},
    }


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def to_html(board: Board) -> str:
    """Every table of the board under its caption and above what its marks mean, without styles of its own."""
    return "".join("".join(_notebook_table(table)) for table in text_tables(board))


def _notebook_table(table: TextTable) -> Iterator[str]:
    sides = ["left" if table.is_words(column) else "right" for column in table.columns]
    yield f"<div><small>{html.escape(table.caption)}</small></div><table><thead><tr>"
    for column, side in zip(table.columns, sides, strict=True):
        yield f'<th style="text-align: {side}">{html.escape(column.heading)}</th>'
    yield "</tr></thead><tbody>"
    for line in table.lines:
        yield "<tr>"
        for cell, side in zip(line, sides, strict=True):
            yield f'<td style="text-align: {side}">{_notebook_cell(cell)}</td>'
        yield "</tr>"
    yield "</tbody></table>"
    if said := in_words(table):
        yield f"<div>{html.escape(said)}</div>"
    yield from (f"<div><small>{html.escape(note)}</small></div>" for note in (*table.failures, *table.notes))


def _notebook_cell(cell: Cell) -> str:
    text, sign = html.escape(cell.text), html.escape(cell.sign)
    return (f"<b>{text}</b>" if cell.best else text) + (f" {sign}" if sign else "")


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
            fitting = (layout for layout in layouts if _width(layout[0], console, options) <= options.max_width)
            layout, notes = next(fitting, layouts[-1])
            yield Text(shown.caption, "dim")
            for table in layout:
                yield Text()
                yield table
            if said := in_words(shown):
                yield Text(f"\n{said}")
            yield Text("\n".join(["", *notes, ""]), "dim")


def render_terminal(board: Board) -> RenderableType:
    """Every table of the board under its caption and above what its marks mean, to print on a rich console.

    Where a table is too wide, backbones become letters, then published numbers and costs a second table.
    """
    return _Terminal(board)


def _layouts(shown: TextTable) -> Iterator[tuple[list[RichTable], list[str]]]:
    """Ways to show a table, each with its notes, the plainest first."""
    plain = [*(shortened(failure, _FAILURE) for failure in shown.failures), *shown.notes]
    lettered = [*plain, *([shown.letters] if shown.letters else [])]
    status = [
        Column(column.heading, [Cell(shortened(text, _REASON)) for text in column.texts]) for column in shown.status
    ]
    for names, notes in ((shown.names, plain), (shown.short, lettered)):
        yield [_terminal_table([shown.rank, *names, *shown.scores, *shown.further, *status])], notes
    for names, notes in ((shown.names, plain), (shown.short, lettered)):
        first = [shown.rank, *names]
        yield [_terminal_table([*first, *shown.scores, *status]), _terminal_table([*first, *shown.further])], notes


def _terminal_table(columns: Sequence[Column]) -> RichTable:
    table = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold", collapse_padding=True)
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
    for line in zip(*map(_terminal_cells, columns), strict=True):
        table.add_row(*line)
    return table


def _terminal_cells(column: Column) -> list[Text]:
    """The cells, each with its sign or with room for one if other cells have it."""
    wide = max((len(cell.sign) for cell in column.cells), default=0)
    # Text, because brackets in a plain string would be read as markup
    return [
        Text(cell.text + (f" {cell.sign:<{wide}}" if wide else ""), "bold" if cell.best else "")
        for cell in column.cells
    ]


def _width(layout: Sequence[RichTable], console: Console, options: ConsoleOptions) -> int:
    free = options.update(max_width=_ANY_WIDTH)
    return max(Measurement.get(console, free, table).maximum for table in layout)
