"""A leaderboard's tables as all formats show them: columns of cells under a caption, above notes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fedbench.core.wording import NONE, heading, megabytes, spread
from fedbench_boards.leaderboard import own_models
from fedbench_boards.leaderboard.failures import MARK, reasons
from fedbench_boards.leaderboard.model import (
    NAN,
    PARTLY,
    Board,
    Delta,
    Line,
    Milestone,
    Printed,
    PrintedNumber,
    Table,
)
from fedbench_boards.leaderboard.notes import INTERVAL, P_BEST, RANKS, SIGN, has_intervals, notes_of
from fedbench_boards.leaderboard.published import AS_PRINTED, COMPARABLE, NOT_COMPARABLE
from fedbench_boards.leaderboard.rows import best_of, seed_cells, seed_counts, seeds_differ
from fedbench_boards.statistics import NOT_SIGNIFICANT, SIGNIFICANT

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
AGREEING = {COMPARABLE: "comparable", AS_PRINTED: "comparable as far as printed", NOT_COMPARABLE: "not comparable"}
"""How far a printed number has the run's conditions, in words."""
_MANTISSA = {"float32": 23, "tf32": 10, "bfloat16": 7}
"""Bits by which a column of precisions is sorted."""
NOT_TOLD = "n.s."
"""Mark of the web page alone, behind a difference that a test does not tell from nothing."""


@dataclass(frozen=True)
class Cell:
    """A cell as readers see it, and its number in full."""

    shown: str
    value: float = NAN
    deviation: float = NAN
    """The number behind ±."""
    best: bool = False
    """Whether it is bold."""
    mark: str = ""
    note: str = ""
    """Text that the web page has under the number."""
    title: str = ""
    """Text that the web page shows where the cell is pointed at."""

    @property
    def spread(self) -> str:
        """The deviation behind ±; "" without one."""
        return "" if math.isnan(self.deviation) else f"± {self.deviation:.1f}"

    @property
    def text(self) -> str:
        """What tables show: ``65.0 ± 4.0``."""
        return f"{self.shown} {self.spread}" if self.spread else self.shown

    @property
    def sign(self) -> str:
        """The mark that tables show behind the text."""
        return "" if self.mark == NOT_TOLD else self.mark


@dataclass(frozen=True)
class Column:
    """A column of a table; ``key``, ``explained`` and ``first``, the direction of the first sort, are for the page."""

    heading: str
    cells: list[Cell]
    key: str = ""
    explained: str = ""
    first: str = "descending"

    @property
    def texts(self) -> list[str]:
        """The cells as tables show them."""
        return [cell.text for cell in self.cells]

    @property
    def is_known(self) -> bool:
        """Whether any of its cells has a number."""
        return not all(math.isnan(cell.value) for cell in self.cells)


@dataclass(frozen=True)
class TextTable:
    """One table as every format shows it. ``names`` are its first columns, ``short`` the same with letters for
    backbones."""

    caption: str
    rank: Column
    names: list[Column]
    short: list[Column]
    letters: str = ""
    """The legend of the letters; empty if all rows have one backbone."""
    scores: list[Column] = field(default_factory=list)
    status: list[Column] = field(default_factory=list)
    """The column with ``failed: reason`` of rows without a number, in full; empty if there is no such row."""
    further: list[Column] = field(default_factory=list)
    """Published numbers, costs and rounds to the target, which may form a second table if one would be too wide."""
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """Notes on failed runs of rows that have a number, or that lost seeds for several reasons."""
    of: Table | None = None
    """The table with the lines that the rows show; None for rows over all settings."""

    @property
    def columns(self) -> list[Column]:
        """All columns in their order."""
        return [self.rank, *self.names, *self.scores, *self.further, *self.status]

    @property
    def lines(self) -> Iterator[tuple[Cell, ...]]:
        """The cells of every row, in the order of `columns`."""
        return zip(*(column.cells for column in self.columns), strict=True)

    def is_words(self, column: Column) -> bool:
        """Whether the column is of names or reasons, which begin at the left."""
        return column in (*self.names, *self.status)


def scored(mean: float, deviation: float, sign: str = "", **rest: Any) -> Cell:
    """A cell with ``mean ± deviation`` at one decimal."""
    return Cell(spread(mean, NAN, sign), mean, NAN if math.isnan(mean) else deviation, **rest)


def _counted(value: float, digits: int, **rest: Any) -> Cell:
    return Cell(NONE if math.isnan(value) else f"{value:.{digits}f}", value, **rest)


def text_tables(board: Board) -> Iterator[TextTable]:
    """The tables of a board, in its order."""
    return (text_table(table) for table in board.tables)


def text_table(table: Table) -> TextTable:
    """The one form of a table that all formats write."""
    lines = table.lines
    backbones = list(dict.fromkeys(line.backbone for line in lines))
    shared = backbones[0] if len(backbones) == 1 else ""
    labels = _named("method", [line.label for line in lines], lines)
    names = labels if shared else _named("row", [line.row for line in lines], lines)
    letters = dict(zip(backbones, map(_letter, range(len(backbones))), strict=True))
    on = Column("on", [Cell(letters[line.backbone]) for line in lines])
    caption = table.caption + (f" · {shared}" if shared else "")
    counted = seed_counts(lines)
    over = f"{counted}, mean ± sample std" if counted.endswith("s") else counted or "no run has finished"
    scores = [column for metric in table.shown if (column := _score(table, metric)).is_known]
    return TextTable(
        caption=f"{caption} · {over}; MB up and down",
        rank=_rank(lines),
        names=[names],
        short=[names] if shared else [labels, on],
        letters="" if shared else f"on: {', '.join(f'{letter} = {name}' for name, letter in letters.items())}",
        scores=[*scores, *_precision(lines), *_seeds(lines), *_best(table), *_difference(table)],
        status=list(_status(lines)),
        further=[*_published(table), *(_costs(table) if table.measured else [])],
        notes=list(notes_of(table, [column.heading for column in scores])),
        failures=list(_failures(lines, names.texts)),
        of=table,
    )


def in_words(shown: TextTable) -> str:
    """What the table says, in a sentence or two: which row leads, by how much, and which are best in other columns.

    "" where no two rows can be compared.
    """
    table, names = shown.of, shown.names[0].texts
    if table is None or len(names) < 2:
        return ""
    ranked = [(name, line) for name, line in zip(names, table.lines, strict=True) if line.rank is not None]
    leaders = [(name, line) for name, line in ranked if (line.rank_low or line.rank) == 1]
    if len(ranked) < 2:
        return ""
    (first, line), *equal = leaders
    ahead = "" if math.isnan(line.delta.cell.mean) else f", {line.delta.cell.mean:+.1f} over {table.baseline}"
    score = f"{heading(table.headline)} {line.cell(table.headline).mean:.1f}{ahead}"
    others = " and ".join(name for name, _ in equal) if len(equal) < 3 else f"{len(equal)} other rows"
    if line.rank_low is None:
        said = f"{first} comes first{f' with {others}' if equal else ''} ({score}); too few seeds for a test."
    elif not equal:
        said = f"{first} leads ({score})."
    else:
        said = f"{first} comes first ({score}), but can't be told from {others}."
    elsewhere = []
    for column in shown.scores:
        best = [(name, cell.shown) for name, cell in zip(names, column.cells, strict=True) if cell.best]
        if column.key in table.shown[1:] and best and first not in dict(best):
            elsewhere.append(f"on {column.heading}: {best[0][0]} ({best[0][1]})")
    return f"{said} Best {'; '.join(elsewhere)}." if elsewhere else said


def _named(title: str, names: Sequence[str], lines: Sequence[Line]) -> Column:
    return Column(title, [Cell(name, mark=marks_of(line)) for name, line in zip(names, lines, strict=True)])


def _rank(lines: Sequence[Line]) -> Column:
    places = [line.rank if line.rank_low is None else line.rank_low for line in lines]
    cells = [
        Cell(NONE) if place is None else Cell(line.shown_rank, place) for place, line in zip(places, lines, strict=True)
    ]
    told = "" if all(line.rank_low is None for line in lines) else f": {RANKS}"
    return Column("#", cells, "rank", f"rank by the first accuracy column{told}", "ascending")


def _score(table: Table, metric: str) -> Column:
    means = [line.cell(metric) for line in table.lines]
    best = best_of(table.lines, metric)
    cells = [scored(cell.mean, cell.std, best=is_best) for cell, is_best in zip(means, best, strict=True)]
    return Column(heading(metric), cells, metric, f"{metric}, %: mean ± standard deviation over seeds")


def marks_of(line: Line) -> str:
    """The marks behind the row's name."""
    lost = MARK if not line.has_failed and line.status.text else ""
    return (
        lost
        + (own_models.UNTRAINED_MARK if line.untrained else "")
        + (own_models.ONE_FOR_ALL_MARK if line.one_for_all else "")
    )


def _precision(lines: Sequence[Line]) -> Iterator[Column]:
    if len({line.precision for line in lines}) > 1:
        cells = [Cell(line.precision, _MANTISSA[line.precision]) for line in lines]
        yield Column("precision", cells, "precision", "arithmetic of training and evaluation")


def _seeds(lines: Sequence[Line]) -> Iterator[Column]:
    if seeds_differ(lines):
        cells = [Cell(text or NONE, len(line.runs)) for line, text in zip(lines, seed_cells(lines), strict=True)]
        yield Column("seeds", cells, "seeds", "the row's seeds, by their number")


def _best(table: Table) -> Iterator[Column]:
    if table.tells_the_best:
        yield Column("P(best)", [_counted(line.p_best, 2) for line in table.lines], "p_best", P_BEST)


def _difference(table: Table) -> Iterator[Column]:
    if any(line.delta.seeds for line in table.lines):
        baseline = table.baseline.partition(" · ")[0]
        explained = f"{heading(table.headline)} minus that of {baseline}, paired over the seeds both have"
        explained += f"; {INTERVAL}" if has_intervals(table.lines) else ""
        yield Column(f"Δ {baseline}", [_delta(line.delta) for line in table.lines], "delta", explained)


def _delta(delta: Delta) -> Cell:
    mark = {SIGNIFICANT: SIGN, NOT_SIGNIFICANT: NOT_TOLD}.get(delta.significance, "")
    tested = "" if math.isnan(delta.p_value) else f"{delta.test} over {delta.seeds} seeds, {probability(delta.p_value)}"
    adjusted = "" if math.isnan(delta.p_adjusted) else f"adjusted {probability(delta.p_adjusted)}"
    title = ", ".join(filter(None, [delta.significance, tested, adjusted]))
    return scored(delta.cell.mean, delta.half_width, "+", mark=mark, title=title)


def probability(value: float) -> str:
    """A p-value as papers print it."""
    return "p < 0.001" if value < 0.001 else f"p = {value:.2g}"


def _status(lines: Sequence[Line]) -> Iterator[Column]:
    if any(line.has_failed for line in lines):
        yield Column(STATUS, [Cell(_outcome(line)) for line in lines])


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


def _published(table: Table) -> Iterator[Column]:
    """Columns of the paper's numbers: the headline with a column of differences, other metrics with those in
    brackets."""
    printed = [line.printed or Printed() for line in table.lines]
    if any(number.comparable for number in printed):
        spreads = [number.metrics.get("std", PrintedNumber()).value for number in printed]
        cells = [_paper_cell(number, _number(number, std)) for number, std in zip(printed, spreads, strict=True)]
        yield Column("paper", cells, "published", "what the paper prints, and whether the settings agree")
        deltas = Column("Δ paper", [scored(number.delta, NAN, "+") for number in printed], "published_delta")
        yield from [replace(deltas, explained="measured minus published")] if deltas.is_known else []
    for metric in dict.fromkeys(metric for number in printed for metric in number.metrics):
        if metric not in (table.headline, "std"):
            numbers = [number.metrics.get(metric, PrintedNumber()) for number in printed]
            cells = [
                _paper_cell(number, _as_printed(number) if metric in _PRINTED else _with_delta(number))
                for number in numbers
            ]
            name = _PRINTED.get(metric, heading(metric))
            yield Column(f"paper {name}", cells, f"published_{metric}", "what the paper prints")


def _paper_cell(number: PrintedNumber, shown: str) -> Cell:
    aspects = ", ".join(difference.aspect for difference in number.differences)
    note = AGREEING.get(number.comparable, "") + (f": {aspects}" if number.comparable == NOT_COMPARABLE else "")
    in_full = "" if math.isnan(number.value) else f"{number.value:g}"
    title = "; ".join(filter(None, [in_full, number.source, number.differs]))
    return Cell(shown, number.value, note=note, title=title)


def _number(number: PrintedNumber, std: float = math.nan) -> str:
    return _marked(number, "several" if number.several else spread(number.value, std))


def _as_printed(number: PrintedNumber) -> str:
    return _marked(number, NONE if math.isnan(number.value) else f"{number.value:g}")


def _marked(number: PrintedNumber, text: str) -> str:
    return f"{_MARKS[number.comparable]} {text}" if number.comparable in _MARKS else text


def _with_delta(number: PrintedNumber) -> str:
    """A number and its difference, as ``98.1 (-0.4)``."""
    return _number(number) + ("" if math.isnan(number.delta) else f" ({spread(number.delta, math.nan, sign='+')})")


def sent(line: Line) -> str:
    """Traffic in words: ``1.50 MB up, 0.50 MB down``; "" if it is unknown."""
    if math.isnan(line.sent):
        return ""
    return f"{megabytes(line.cost('bytes_up'))} MB up, {megabytes(line.cost('bytes_down'))} MB down"


def _costs(table: Table) -> Iterator[Column]:
    lines = table.lines
    cells = [Cell(megabytes(line.sent), line.sent, title=sent(line)) for line in lines]
    yield Column("MB", cells, "bytes", "sent up and down by all clients in all rounds, 10^6 bytes", "ascending")
    cells = [_counted(line.cost("train_seconds"), 1) for line in lines]
    yield Column("train s", cells, "train_seconds", "seconds of training, mean over seeds", "ascending")
    if any(line.milestone.seeds for line in lines):
        explained = "first evaluated round with the target accuracy, mean over the seeds that reach it"
        cells = [_rounds_cell(line.milestone) for line in lines]
        yield Column("rounds", cells, ROUNDS, explained, "ascending")
        cells = [Cell(megabytes(line.milestone.bytes), line.milestone.bytes) for line in lines]
        yield Column("MB to it", cells, BYTES_TO_TARGET, "sent until then, mean over the same seeds", "ascending")


ROUNDS, BYTES_TO_TARGET = "rounds_to_target", "bytes_to_target"
"""Keys of columns on the way to the target."""


def _rounds_cell(milestone: Milestone) -> Cell:
    target = "" if math.isnan(milestone.target) else f"to {milestone.target:.1f} %"
    traffic = "" if math.isnan(milestone.bytes) else f"{megabytes(milestone.bytes)} MB"
    seconds = "" if math.isnan(milestone.seconds) else f"{milestone.seconds:.1f} s of training"
    title = ", ".join(filter(None, [target, traffic, seconds]))
    return Cell(_rounds(milestone), milestone.rounds.mean, title=title)


def _rounds(milestone: Milestone) -> str:
    """Rounds to the target: ``12``; ``8.5 (2/3)`` if a seed never reaches it; ``never`` if none does."""
    if not milestone.seeds:
        return NONE
    if not milestone.reached:
        return "never"
    everywhere = milestone.reached == milestone.seeds
    return f"{milestone.rounds.mean:.1f}".removesuffix(".0") + ("" if everywhere else f" ({milestone.text})")


def _letter(number: int) -> str:
    return chr(ord("A") + number) if number < 26 else str(number + 1)
