"""Rows over all settings of a board: mean ranks, wins and losses, the score over all of them, as a table."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from fedbench.core.wording import heading, spread
from fedbench.kinds.measured import lower_is_better
from fedbench_boards.leaderboard.model import Board, Line, Table
from fedbench_boards.leaderboard.tables import TextColumn, TextTable
from fedbench_boards.statistics.across import LOSSES, TIES, WINS, Across, across
from fedbench_boards.statistics.paired import ALPHA, Test


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
    counts = [
        TextColumn(name, [str(count) for count in overall.outcomes.loc[rows, name]]) for name in (WINS, TIES, LOSSES)
    ]
    first: Line = board.tables[0].lines[0]
    return TextTable(
        caption=f"all {len(overall.ranks)} settings · {len(rows)} rows that each of them has · {_seeds(overall)}"
        + (f" · {first.backbone}" if len({line.backbone for line in board.lines}) == 1 else ""),
        rank=TextColumn("#", [str(place) for place in range(1, len(rows) + 1)]),
        names=(names := [TextColumn("row" if labels[rows[0]] == rows[0] else "method", [labels[row] for row in rows])]),
        short=names,
        letters="",
        scores=[
            TextColumn("mean rank", [f"{rank:.2f}" for rank in overall.mean_ranks]),
            TextColumn(
                f"mean {heading(metric)}",
                [spread(sign * mean, half) for mean, half in zip(scores["mean"], halves, strict=True)],
            ),
            *counts,
        ],
        status=[],
        further=[],
        notes=list(_notes(overall, metric)),
        failures=[],
        common={},
        rows=[],
    )


def _seeds(overall: Across) -> str:
    count = len(overall.seeds)
    return f"{count} seed{'s' if count > 1 else ''} that all of them have"


def _notes(overall: Across, metric: str) -> list[str]:
    verdict = "ranks differ" if overall.p_value < ALPHA else "no difference is shown"
    p = "p < 0.001" if overall.p_value < 0.001 else f"p = {overall.p_value:.2g}"
    return [
        f"mean rank by {heading(metric)}, 1 is best; Friedman's test: {p}, {verdict}",
        "settings count as independent, which neighbours on a grid, of the same data and seeds, are not",
        f"mean ranks less than {overall.critical_difference:.2f} apart are not told apart (Nemenyi, {ALPHA:g})",
        f"mean {heading(metric)}: over settings, ± half of the 95 % interval over seeds",
        f"{WINS}, {TIES}, {LOSSES}: against all other rows everywhere, by paired tests at {ALPHA:g}, not corrected",
    ]
