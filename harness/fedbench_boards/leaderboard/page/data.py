"""The content of a board's page for its template: sections with tables and charts, an overview, how to make it again.

Parts over all settings are rows by mean rank and critical differences.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from markupsafe import Markup

from fedbench.core.wording import NONE
from fedbench.plugins.provenance import versions
from fedbench_boards.leaderboard.across import across_table, critical_differences, labels_of
from fedbench_boards.leaderboard.model import Board, Line
from fedbench_boards.leaderboard.page.sections import MOST_CURVES, Section, section_of, sentence
from fedbench_boards.leaderboard.page.svg import shapes, swatch
from fedbench_boards.leaderboard.reading import ReadResults
from fedbench_boards.leaderboard.rows import spans
from fedbench_boards.leaderboard.tables import Cell, TextTable


@dataclass(frozen=True)
class OverviewRow:
    """The headline of one row in every section."""

    name: str
    backbone: str
    """The backbone; "" where all rows have the same one."""
    sign: Markup
    cells: list[Cell]


@dataclass(frozen=True)
class Ranking:
    """The rows over all settings, each with its sign."""

    table: TextTable
    signs: list[Markup]
    notes: list[str]
    diagram: Markup


@dataclass(frozen=True)
class Page:
    """The whole content of a page."""

    suite: str
    description: str
    facts: list[tuple[str, str]]
    sections: list[Section]
    shows_sections: bool
    """Whether there are few enough to be shown; else the overview has a column of each."""
    overview: list[OverviewRow]
    ranking: Ranking | None
    settings: list[str]
    has_tuned_and_default: bool
    """Whether there are both tuned rows and rows with default parameters."""
    command: str
    states: list[tuple[str, list[str]]]
    """What the runs were made of, with its full hashes or commits."""
    seeds: str
    runs: list[dict[str, str]]
    """A line for the runs of a row that are of the same code and data, for the list at the end."""
    shapes: Markup
    versions: Mapping[str, str]
    most_curves: int = MOST_CURVES

    @property
    def overview_has_marks(self) -> bool:
        """Whether any number of the overview has a mark."""
        return any(cell.mark for row in self.overview for cell in row.cells)


def page_of(read: ReadResults, federations: Mapping[str, Mapping[str, Any]], command: str) -> Page:
    """The page's content; see ``write_page`` for the arguments."""
    suite, results, board = read.suite, read.results, read.board
    styles = {name: number for number, name in enumerate(dict.fromkeys(line.row for line in board.lines))}
    sections = [
        section_of(f"table-{number}", title, table, styles, read.curves, federations)
        for number, (title, table) in enumerate(zip(_titles(board), board.tables, strict=True), start=1)
    ]
    settings = _settings(board.lines)
    return Page(
        suite=suite.name,
        # a number and its percent sign stay on one line
        description=suite.description.replace(" %", "\N{NO-BREAK SPACE}%"),
        facts=_facts(results, board, settings),
        sections=sections,
        shows_sections=not board.has_many_tables,
        overview=_overview(sections, board, styles) if len(sections) > 1 else [],
        ranking=_ranking(board, styles),
        settings=settings if len(settings) > 1 else [],
        has_tuned_and_default=len({line.tuned for line in board.lines}) > 1,
        command=command,
        states=_states(results),
        seeds=_seeds(results),
        runs=_runs(results),
        shapes=shapes(len(styles)),
        versions=versions(),
    )


def _settings(lines: Sequence[Line]) -> list[str]:
    return list(dict.fromkeys(line.setting for line in lines if line.setting))


def _facts(results: pd.DataFrame, board: Board, settings: Sequence[str]) -> list[tuple[str, str]]:
    """Facts on what was compared, when and by which code."""
    days = sorted({f"{day:%Y-%m-%d}" for day in results["started"]})
    commits = sorted({_short_commit(text) for text in results["commit"]} - {""})
    facts = [
        ("methods", str(len({line.method for line in board.lines}))),
        ("rows", str(len({line.row for line in board.lines}))),
        ("settings", str(len(settings) or (1 if board.tables else 0))),
        ("seeds", _seeds(results)),
        ("runs", str(len(results))),
        ("failed runs", str(sum(len(line.status.failures) for line in board.lines) or "")),
        ("run on", " to ".join(dict.fromkeys(days[:1] + days[-1:]))),
        ("commit", ", ".join(commits)),
    ]
    return [(term, text) for term, text in facts if text]


def _titles(board: Board) -> list[str]:
    """A name for every table: its settings, else its data; numbered if it repeats."""
    names = []
    for table in board.tables:
        data = [text for text in (table.lines[0].dataset, table.lines[0].scenario) if text]
        several = ", ".join(data) if len(board.tables) > 1 else ""
        names.append(" / ".join(_settings(table.lines)) or several or "Results")
    return [f"{name} ({n})" if names.count(name) > 1 else name for n, name in enumerate(names, start=1)]


def _overview(sections: Sequence[Section], board: Board, styles: Mapping[str, int]) -> list[OverviewRow]:
    """A line per row, a cell per section: the section's headline."""
    cells: dict[str, list[Cell]] = {}
    called: dict[str, tuple[str, str]] = {}
    for number, (section, table) in enumerate(zip(sections, board.tables, strict=True)):
        keys = [column.key for column in section.columns]
        for line, row in zip(table.lines, section.rows, strict=True):
            own = cells.setdefault(line.row, [Cell(NONE)] * len(sections))
            headline = row.cells[keys.index(table.headline)] if table.headline in keys else Cell(NONE)
            own[number] = replace(headline, mark=row.mark)
            called[line.row] = (row.name, "" if line.backbone in row.name else line.backbone)
    several = len({backbone for _, backbone in called.values()}) > 1
    return [
        OverviewRow(called[name][0], called[name][1] if several else "", swatch(styles[name]), own)
        for name, own in cells.items()
    ]


def _ranking(board: Board, styles: Mapping[str, int]) -> Ranking | None:
    """The table and the diagram of ``board.across``; ``styles`` are the numbers of the rows' signs."""
    table, overall = across_table(board), board.across
    if table is None or overall is None:
        return None
    known = {line.label: styles[line.row] for line in board.lines} | dict(styles)
    signs = [swatch(known[row]) for row in overall.mean_ranks.index]
    return Ranking(table, signs, list(map(sentence, table.notes)), _diagram(board))


def _diagram(board: Board) -> Markup:
    from fedbench_boards.leaderboard.drawing import style

    assert board.across is not None
    with style():
        fig = critical_differences(board.across, labels_of(board))
        file = io.StringIO()
        fig.savefig(file, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    drawn = file.getvalue()
    # the page's own colour in place of black, for dark pages; the drawing scales with the column
    drawn = drawn[drawn.index("<svg") :].replace("#000000", "currentColor")
    drawn = re.sub(r"<!--.*?-->|(?<=>)\s+", "", drawn)
    drawn = re.sub(r'xlink:href="([^"]+)" transform="translate\(([\d.]+) 0\)"', r'href="\1" x="\2"', drawn)
    return Markup(re.sub(r'(<svg [^>]*?)width="[^"]*" height="[^"]*"|(<svg )height="[^"]*"', r"\1\2", drawn, count=1))


def _states(results: pd.DataFrame) -> list[tuple[str, list[str]]]:
    """What made the runs: commits, and hashes of code, data and weights."""
    hashes = {"commit": "commit", "harness_hash": "code", "data_hash": "data", "weights_hash": "weights"}
    states = [(term, [text for text in dict.fromkeys(results[name]) if text]) for name, term in hashes.items()]
    return [state for state in states if state[1]]


def _runs(results: pd.DataFrame) -> list[dict[str, str]]:
    hashes = ["code_hash", "data_hash", "weights_hash"]
    short = {"commit": results["commit"].map(_short_commit)}
    short |= {name: results[name].astype(str).str[:8] for name in hashes}
    names = ["row", "setting", "commit", *hashes]
    alike = results.assign(**short).groupby(names, sort=False, dropna=False)
    return [dict(zip(names, map(str, told), strict=True)) | {"seed": _seeds(runs)} for told, runs in alike]


def _seeds(results: pd.DataFrame) -> str:
    return ", ".join(spans(sorted({int(seed) for seed in results["seed"]})))


def _short_commit(text: str) -> str:
    revision, dirty, _ = text.partition("+dirty")
    return revision[:7] + dirty
