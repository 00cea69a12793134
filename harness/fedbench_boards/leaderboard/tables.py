"""A leaderboard's tables as text, independent of the format: columns of cells, and the lines below them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fedbench.core.wording import (
    NONE,
    heading,
    megabytes,
    spread,
)
from fedbench_boards.leaderboard.failures import MARK, reasons
from fedbench_boards.leaderboard.model import PARTLY, Board, Line, Milestone, Printed, PrintedNumber, Table
from fedbench_boards.leaderboard.notes import SIGN, notes_of
from fedbench_boards.leaderboard.published import AS_PRINTED, NOT_COMPARABLE
from fedbench_boards.leaderboard.rows import own_models, untrained
from fedbench_boards.leaderboard.rows.identity import ON_NETWORK
from fedbench_boards.leaderboard.rows.ranking import best_of
from fedbench_boards.leaderboard.rows.seeds import seed_cells, seed_counts, seeds_differ, seeds_named
from fedbench_boards.statistics.paired import SIGNIFICANT

STATUS = "status"
"""Heading of the column that marks failed rows."""
_PRINTED = {
    "p_value": "p",
    "train_seconds": "train s",
    "seconds_a_round": "s a round",
    "oracle_round": "best round",
}
"""Headings of printed numbers other than accuracies."""
_MARKS = {NOT_COMPARABLE: "≠", AS_PRINTED: "≈"}
"""Marks in front of a printed number whose conditions differ, or are not fully known to agree."""


@dataclass(frozen=True)
class TextColumn:
    """One column: ``best`` tells which cells are bold, ``signs`` follow the cells."""

    heading: str
    cells: list[str]
    best: list[bool] = field(default_factory=list)
    signs: list[str] = field(default_factory=list)

    def is_best(self, line: int) -> bool:
        """Whether the cell is bold."""
        return bool(self.best) and self.best[line]

    def sign(self, line: int) -> str:
        """The sign behind the cell; "" for most cells."""
        return self.signs[line] if self.signs else ""


@dataclass(frozen=True)
class TextRow:
    """A row in the list below a table."""

    name: str
    seeds: str
    settings: Mapping[str, str]
    """The settings of this row alone."""
    runs: list[str]
    """Run ids, in the order of the seeds."""
    tuning: Mapping[str, str]
    failure: str = ""
    """The outcome of failed runs; empty if none failed."""


@dataclass(frozen=True)
class TextTable:
    """One table. ``names`` are the rows' columns in full, ``short`` the same with letters for backbones."""

    caption: str
    rank: TextColumn
    names: list[TextColumn]
    short: list[TextColumn]
    letters: str
    """The legend of the letters; empty if all rows have one backbone."""
    scores: list[TextColumn]
    status: list[TextColumn]
    """The column with ``failed: reason`` of rows without a number, in full; empty if there is no such row."""
    further: list[TextColumn]
    """Published numbers, costs and rounds to the target, which may form a second table if one would be too wide."""
    notes: list[str]
    failures: list[str]
    """Notes on failed runs of rows that have a number, or that lost seeds for several reasons."""
    common: Mapping[str, str]
    """The settings that all rows share."""
    rows: list[TextRow]


def text_tables(board: Board) -> Iterator[TextTable]:
    """The tables of a board, in its order."""
    return (_text_table(table) for table in board.tables)


def _text_table(table: Table) -> TextTable:
    lines, measured = table.lines, table.measured
    backbones = list(dict.fromkeys(line.backbone for line in lines))
    shared = backbones[0] if len(backbones) == 1 else ""
    labels = [line.label for line in lines]
    marks = [_marks(line) for line in lines]
    names = [TextColumn("method" if shared else "row", labels if shared else [line.row for line in lines], signs=marks)]
    letters = dict(zip(backbones, map(_letter, range(len(backbones))), strict=True))
    legend = ", ".join(f"{letter} = {backbone}" for backbone, letter in letters.items())
    caption = table.caption + (f" · {shared}" if shared else "")
    counted = seed_counts(lines)
    over = f"{counted}, mean ± sample std" if counted.endswith("s") else counted or "no run has finished"
    scores = list(_scores(table))
    return TextTable(
        caption=f"{caption} · {over}; MB up and down",
        rank=TextColumn("#", [NONE if line.place is None else str(line.place) for line in lines]),
        names=names,
        short=names
        if shared
        else [TextColumn("method", labels, signs=marks), TextColumn("on", [letters[line.backbone] for line in lines])],
        letters="" if shared else f"on: {legend}",
        scores=[*scores, *_seeds(lines), *_best(table), *_difference(table)],
        status=list(_status(lines)),
        further=[*_published(table), *(_costs(lines) if measured else [])],
        notes=list(notes_of(table, [column.heading for column in scores])),
        failures=list(_failures(lines, names[0].cells)),
        common=table.shared_settings,
        rows=[_row(table, line, name) for line, name in zip(lines, names[0].cells, strict=True)],
    )


def _scores(table: Table) -> Iterator[TextColumn]:
    for metric in table.shown:
        cells = [line.cell(metric) for line in table.lines]
        if not all(math.isnan(cell.mean) for cell in cells):
            texts = [spread(cell.mean, cell.std) for cell in cells]
            yield TextColumn(heading(metric), texts, best_of(table.lines, metric))


def _marks(line: Line) -> str:
    lost = MARK if not line.has_failed and line.status.text else ""
    return lost + (untrained.MARK if line.untrained else "") + (own_models.MARK if line.one_for_all else "")


def _seeds(lines: Sequence[Line]) -> Iterator[TextColumn]:
    if seeds_differ(lines):
        yield TextColumn("seeds", [cell or NONE for cell in seed_cells(lines)])


def _best(table: Table) -> Iterator[TextColumn]:
    if table.tells_the_best:
        texts = [NONE if math.isnan(line.p_best) else f"{line.p_best:.2f}" for line in table.lines]
        yield TextColumn("P(best)", texts)


def _difference(table: Table) -> Iterator[TextColumn]:
    deltas = [line.delta for line in table.lines]
    if any(delta.seeds for delta in deltas):
        cells = [spread(delta.cell.mean, delta.half_width, sign="+") for delta in deltas]
        signs = [SIGN if delta.significance == SIGNIFICANT else "" for delta in deltas]
        yield TextColumn(f"Δ {table.baseline.partition(' · ')[0]}", cells, signs=signs)


def _status(lines: Sequence[Line]) -> Iterator[TextColumn]:
    if any(line.has_failed for line in lines):
        yield TextColumn(STATUS, [_outcome(line) for line in lines])


def _outcome(line: Line) -> str:
    """The outcome of a row: ``failed: reason``, ``2 of 3 seeds``, or nothing if it has all its seeds."""
    if line.has_failed:
        return reasons(line.status.failures)
    return line.status.text.partition(";")[0] if line.status.status == PARTLY else ""


def _failures(lines: Sequence[Line], names: Sequence[str]) -> Iterator[str]:
    for name, line in zip(names, lines, strict=True):
        several = len({failure.reason for failure in line.status.failures}) > 1
        if line.status.text and (several or not line.has_failed):
            yield f"{'' if line.has_failed else MARK + ' '}{name}: {line.status.text}"


def _published(table: Table) -> Iterator[TextColumn]:
    """Columns of the paper's numbers: the headline with a column of differences, other metrics with those in
    brackets."""
    printed = [line.printed or Printed() for line in table.lines]
    if any(one.comparable for one in printed):
        spreads = [one.metrics.get("std", PrintedNumber()).value for one in printed]
        yield TextColumn("paper", [_number(one, std) for one, std in zip(printed, spreads, strict=True)])
        if not all(math.isnan(one.delta) for one in printed):
            yield TextColumn("Δ paper", [spread(one.delta, math.nan, sign="+") for one in printed])
    for metric in dict.fromkeys(metric for one in printed for metric in one.metrics):
        if metric not in (table.headline, "std"):
            numbers = [one.metrics.get(metric, PrintedNumber()) for one in printed]
            cells = [_as_printed(one) if metric in _PRINTED else _with_delta(one) for one in numbers]
            yield TextColumn(f"paper {_PRINTED.get(metric, heading(metric))}", cells)


def _number(one: PrintedNumber, std: float = math.nan) -> str:
    return _marked(one, "several" if one.several else spread(one.value, std))


def _as_printed(one: PrintedNumber) -> str:
    return _marked(one, NONE if math.isnan(one.value) else f"{one.value:g}")


def _marked(one: PrintedNumber, number: str) -> str:
    return f"{_MARKS[one.comparable]} {number}" if one.comparable in _MARKS else number


def _with_delta(one: PrintedNumber) -> str:
    """A number and its difference, as ``98.1 (-0.4)``."""
    return _number(one) + ("" if math.isnan(one.delta) else f" ({spread(one.delta, math.nan, sign='+')})")


def _costs(lines: Sequence[Line]) -> Iterator[TextColumn]:
    yield TextColumn("MB", [megabytes(line.sent) for line in lines])
    seconds = [line.cost("train_seconds") for line in lines]
    yield TextColumn("train s", [NONE if math.isnan(s) else f"{s:.1f}" for s in seconds])
    for cost in dict.fromkeys(cost for line in lines for cost in line.costs if cost.startswith(ON_NETWORK)):
        sending = [line.cost(cost) for line in lines]
        yield TextColumn(f"s {cost.removeprefix('seconds ')}", [NONE if math.isnan(s) else f"{s:.1f}" for s in sending])
    if any(line.milestone.seeds for line in lines):
        yield TextColumn("rounds", [_rounds(line.milestone) for line in lines])
        yield TextColumn("MB to it", [megabytes(line.milestone.bytes) for line in lines])


def _rounds(milestone: Milestone) -> str:
    """Rounds to the target: ``12``; ``8.5 (2/3)`` if a seed never reaches it; ``never`` if none does."""
    if not milestone.seeds:
        return NONE
    if not milestone.reached:
        return "never"
    everywhere = milestone.reached == milestone.seeds
    return f"{milestone.rounds.mean:.1f}".removesuffix(".0") + ("" if everywhere else f" ({milestone.text})")


def _row(table: Table, line: Line, name: str) -> TextRow:
    seeds = seeds_named(line.seeds)
    tuning = line.tuning if line.tuned else {}
    return TextRow(name, seeds, table.own_settings(line), list(line.runs.values()), tuning, line.status.text)


def _letter(number: int) -> str:
    return chr(ord("A") + number) if number < 26 else str(number + 1)
