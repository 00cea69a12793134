"""Rows over all settings of a board, and the map of a suite with axes.

Over settings are mean ranks, wins and losses, the score over all of them. A map has the leader of every place, its
margins, and the cost to come near it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from fedbench.core.errors import FedbenchError
from fedbench.core.wording import MEGA, heading
from fedbench.kinds.measured import lower_is_better
from fedbench.suites.files import places
from fedbench.suites.suite import Suite
from fedbench_boards.leaderboard.model import Board, Line, Table
from fedbench_boards.leaderboard.own_models import ranks_own_models
from fedbench_boards.leaderboard.rows import reached
from fedbench_boards.leaderboard.tables import Cell, Column, TextTable, probability, scored
from fedbench_boards.statistics import ALPHA, LOSSES, TIES, WINS, Across, Test, across, holm, interval, paired


def across_settings(tables: Sequence[Table], means: Collection[str], test: Test) -> Across | None:
    """Compare the rows that all settings have; None for too few, or if settings are ranked by different metrics.

    If a setting has several tables, the first counts. ``means`` are names of means over settings, which are left out.
    """
    settings: dict[str, Table] = {}
    for table in tables:
        names = {line.setting for line in table.lines}
        if len(names) == 1 and not names & {*means, ""}:
            settings.setdefault(names.pop(), table)
    if len({table.headline for table in settings.values()}) != 1:
        return None
    return across({name: _scores(table) for name, table in settings.items()}, test)


def _scores(table: Table) -> dict[str, Mapping[int, float]]:
    """Row -> seed -> the headline of rows with a rank; larger is better."""
    sign = -1 if lower_is_better(table.headline) else 1
    ranked = [line for line in table.lines if line.rank is not None]
    return {line.row: {seed: sign * score for seed, score in line.scores.items()} for line in ranked}


def labels_of(board: Board) -> dict[str, str]:
    """Row -> its name in tables: its label if all rows have one backbone."""
    lines = {line.row: line for line in board.lines}
    several = len({line.backbone for line in board.lines}) > 1
    return {row: line.row if several else line.label for row, line in lines.items()}


def across_table(board: Board) -> TextTable | None:
    """The table of ``board.across``, the best mean rank first."""
    overall = board.across
    if overall is None:
        return None
    rows, labels = list(overall.mean_ranks.index), labels_of(board)
    metric, scores = board.tables[0].headline, overall.scores.loc[rows]
    sign = -1 if lower_is_better(metric) else 1
    halves = (scores["high"] - scores["low"]) / 2
    names = Column("row" if labels[rows[0]] == rows[0] else "method", [Cell(labels[row]) for row in rows])
    ranks = [Cell(f"{rank:.2f}", rank) for rank in overall.mean_ranks]
    means = [scored(sign * mean, half) for mean, half in zip(scores["mean"], halves, strict=True)]
    counts = [
        Column(
            name,
            [Cell(str(count), count) for count in overall.outcomes.loc[rows, name]],
            name,
            first="ascending" if name == LOSSES else "descending",
        )
        for name in (WINS, TIES, LOSSES)
    ]
    first: Line = board.tables[0].lines[0]
    return TextTable(
        caption=f"all {len(overall.ranks)} settings · {len(rows)} rows that each of them has · {_seeds(overall)}"
        + (f" · {first.backbone}" if len({line.backbone for line in board.lines}) == 1 else ""),
        rank=Column("#", [Cell(str(place), place) for place in range(1, len(rows) + 1)], "rank", first="ascending"),
        names=[names],
        short=[names],
        scores=[
            Column("mean rank", ranks, "mean_rank", first="ascending"),
            Column(f"mean {heading(metric)}", means, "mean"),
            *counts,
        ],
        notes=list(_notes(overall, metric)),
    )


def _seeds(overall: Across) -> str:
    count = len(overall.seeds)
    return f"{count} seed{'s' if count > 1 else ''} that all of them have"


def _notes(overall: Across, metric: str) -> list[str]:
    verdict = "ranks differ" if overall.p_value < ALPHA else "no difference is shown"
    return [
        f"mean rank by {heading(metric)}, 1 is best; Friedman's test: {probability(overall.p_value)}, {verdict}",
        "settings count as independent, which neighbours on a grid, of the same data and seeds, are not",
        f"mean ranks less than {overall.critical_difference:.2f} apart are not told apart (Nemenyi, {ALPHA:g})",
        f"mean {heading(metric)}: over settings, ± half of the 95 % interval over seeds",
        f"{WINS}, {TIES}, {LOSSES}: against all other rows everywhere, by paired tests at {ALPHA:g}, not corrected",
    ]


MOST_AXES = 2
"""The most axes of a drawn map; further ones are fixed."""
NEAR = 2.0
"""Points below the leader that count as near it."""
Place = tuple[str, ...]
"""A value of every axis."""


@dataclass(frozen=True)
class Margin:
    """The lead of a place's leader over another row, paired over the seeds that both have."""

    mean: float
    low: float
    high: float
    """Ends of the 95 % interval."""
    p_adjusted: float = math.nan
    """The p-value corrected by Holm over the places; NaN if there is no test."""

    @property
    def is_significant(self) -> bool:
        """Whether the margin is significant at `ALPHA` after correction."""
        return self.p_adjusted < ALPHA


@dataclass(frozen=True)
class Cost:
    """The traffic of the row that reaches ``target`` with the least, both ways."""

    row: str
    target: float
    bytes: float


@dataclass(frozen=True)
class Square:
    """What a view of the map shows at one place."""

    words: tuple[str, ...]
    row: str = ""
    """The row that it is about; "" where that is none, or the same everywhere."""
    value: float = math.nan
    """The number behind its shade; NaN for none."""
    is_tied: bool = False
    """Whether other rows can't be told from the one it is about."""


@dataclass(frozen=True, eq=False)
class Map:
    """The tables of a suite by their place on its axes."""

    axes: Mapping[str, tuple[str, ...]]
    tables: Mapping[Place, Table]
    """The tables by place; a place without runs has none."""
    labels: Mapping[str, str]
    """Row -> its label, the best mean rank first."""
    headline: str
    baseline: str
    costs: Mapping[Place, Cost]
    """The row with the least traffic until it comes near the leader's mean, by place. Only rows that come near in some
    round of every run count; without one the place is left out."""

    def fixed(self, values: Mapping[str, str]) -> Map:
        """The map over the other axes at these values of some axes."""
        kept = [number for number, axis in enumerate(self.axes) if axis not in values]
        at = {number: values[axis] for number, axis in enumerate(self.axes) if axis in values}
        here = {place: of for place, of in self.tables.items() if all(place[n] == value for n, value in at.items())}
        tables = {tuple(place[n] for n in kept): of for place, of in here.items()}
        axes = {axis: own for axis, own in self.axes.items() if axis not in values}
        costs = {tuple(place[n] for n in kept): cost for place, cost in self.costs.items() if place in here}
        return replace(self, axes=axes, tables=tables, costs=costs)

    def leader(self, place: Place) -> Line | None:
        """The line with the best mean; None where no line has a rank."""
        return next((line for line in self.tables[place].lines if line.rank is not None), None)

    def tied(self, place: Place) -> list[Line]:
        """The lines tied with the leader by their seeds, including the leader; all lines if seeds are too few."""
        first = self.leader(place)
        ranked = [line for line in self.tables[place].lines if line.rank is not None]
        return [] if first is None else [line for line in ranked if line.tied_rank == first.tied_rank]

    def line(self, place: Place, row: str) -> Line | None:
        """The row's line at a place."""
        return next((line for line in self.tables[place].lines if line.row == row), None)

    def zero_shot(self) -> str | None:
        """The row that sends nothing and is ranked by one model for all; that is the model before training."""
        if ranks_own_models(self.headline):
            return None
        lines = (line for table in self.tables.values() for line in table.lines)
        return next((line.row for line in lines if line.rank is not None and line.sent == 0), None)

    def base(self) -> str | None:
        """The name of the row that others are compared with."""
        called = self.baseline.partition(" · ")[0]
        return next((row for row, label in self.labels.items() if called in (row, label)), None)

    def margins(self, row: str, test: Test = Test.t) -> dict[Place, Margin]:
        """The leader's margin over ``row`` wherever both have a common seed; of the row itself it is 0."""
        sign = -1 if lower_is_better(self.headline) else 1
        margins: dict[Place, Margin] = {}
        p_values: dict[Place, float] = {}
        for place in self.tables:
            first, other = self.leader(place), self.line(place, row)
            if first is None or other is None:
                continue
            seeds = sorted(first.scores.keys() & other.scores.keys())
            ours, theirs = [first.scores[seed] for seed in seeds], [other.scores[seed] for seed in seeds]
            gains = [sign * (a - b) for a, b in zip(ours, theirs, strict=True)]
            if gains:
                margins[place] = Margin(sum(gains) / len(gains), *interval(gains))
                p_values[place] = paired(ours, theirs, test).p_value
        tested = [place for place, p in p_values.items() if not math.isnan(p)]
        corrected = holm([p_values[place] for place in tested])
        return margins | {
            place: Margin(margins[place].mean, margins[place].low, margins[place].high, p)
            for place, p in zip(tested, corrected, strict=True)
        }

    def leaders(self) -> dict[Place, Square]:
        """The leader of every place and its mean."""
        squares = {}
        for place in self.tables:
            first, others = self.leader(place), len(self.tied(place)) - 1
            if first is None:
                squares[place] = Square(("no rank",))
                continue
            more = (f"= {others} more",) if others else ()
            mean = f"{first.cell(self.headline).mean:.1f}"
            squares[place] = Square((self.labels[first.row], mean, *more), first.row, is_tied=bool(others))
        return squares

    def leads_over(self, row: str) -> dict[Place, Square]:
        """The `margins` over ``row`` with half of their intervals."""
        squares = {}
        for place, margin in self.margins(row).items():
            half = () if math.isnan(margin.low) else (f"± {(margin.high - margin.low) / 2:.1f}",)
            words = (f"{margin.mean:+.1f}{' *' if margin.is_significant else ''}", *half)
            squares[place] = Square(words, value=margin.mean)
        return squares

    def cheapest(self) -> dict[Place, Square]:
        """The row that comes near the leader with the least traffic, and that traffic."""
        squares = dict.fromkeys(self.tables, Square(("none",)))
        for place, cost in self.costs.items():
            words = (self.labels[cost.row], f"{cost.bytes / MEGA:.3g} MB", f"to {cost.target:.1f} %")
            squares[place] = Square(words, cost.row)
        return squares

    def means(self, row: str) -> dict[Place, Square]:
        """The mean and rank of ``row`` wherever it has a mean."""
        squares = {}
        for place in self.tables:
            line = self.line(place, row)
            mean = math.nan if line is None else line.cell(self.headline).mean
            if line is not None and not math.isnan(mean):
                rank = () if line.shown_rank is None else (f"# {line.shown_rank}",)
                squares[place] = Square((f"{mean:.1f}", *rank), value=mean)
        return squares


def map_of(suite: Suite, board: Board, curves: pd.DataFrame) -> Map:
    """The map of ``board``, results of ``suite`` with their ``curves``.

    FedbenchError for a suite without axes, or a board without runs.
    """
    if not suite.axes:
        raise FedbenchError(
            f"suite {suite.name!r} has no axes; give it some, such as axes: {{dirichlet_alpha: [0.1, 1]}}."
        )
    at = {name: tuple(place.values()) for name, place in places(suite.axes).items()}
    tables: dict[Place, Table] = {}
    for table in board.tables:
        setting = next((line.setting for line in table.lines if line.setting), "")
        if setting in at:
            tables.setdefault(at[setting], table)
    if not tables:
        raise FedbenchError(
            f"there are no results of suite {suite.name!r} on its axes; run fedbench map --suite {suite.name}."
        )
    labels = labels_of(board)
    order = list(board.across.mean_ranks.index) if board.across is not None else _by_mean(tables)
    known = [*order, *(row for row in labels if row not in order)]
    headlines = [table.headline for table in tables.values()]
    headline = suite.headline if suite.headline in headlines else headlines[0]
    # a place whose runs lack what the others are ranked by is left out, as one without runs
    tables = {place: table for place, table in tables.items() if table.headline == headline}
    axes = {axis: tuple(values) for axis, values in suite.axes.items()}
    map_ = Map(axes, tables, {row: labels[row] for row in known}, headline, suite.baseline, {})
    costs = {place: _cheapest(map_, place, curves) for place in tables}
    return replace(map_, costs={place: cost for place, cost in costs.items() if cost is not None})


def _cheapest(map_: Map, place: Place, curves: pd.DataFrame) -> Cost | None:
    first = map_.leader(place)
    unknown = map_.headline not in curves or "bytes_total" not in curves
    if first is None or unknown or lower_is_better(map_.headline):
        return None
    target = first.cell(map_.headline).mean - NEAR
    costs = []
    for line in (line for line in map_.tables[place].lines if line.rank is not None):
        hits = reached(curves, list(line.mlflow_ids.values()), map_.headline, target)
        if len(hits) and hits["round"].notna().all():
            costs.append(Cost(line.row, target, float(np.mean(hits["bytes_total"].to_numpy()))))
    return min(costs, key=lambda cost: cost.bytes, default=None)


def _by_mean(tables: Mapping[Place, Table]) -> list[str]:
    """Rows by their mean rank over the places where they have one."""
    ranks: dict[str, list[int]] = {}
    for table in tables.values():
        for line in table.lines:
            if line.rank is not None:
                ranks.setdefault(line.row, []).append(line.rank)
    return sorted(ranks, key=lambda row: sum(ranks[row]) / len(ranks[row]))
