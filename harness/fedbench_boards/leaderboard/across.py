"""Rows over all settings of a board: mean ranks, wins and losses, the mean score."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from fedbench.core.wording import heading, ranks_shown
from fedbench.kinds.measured import lower_is_better
from fedbench_boards.leaderboard.model import Board, Line, Table
from fedbench_boards.leaderboard.tables import Cell, Column, TextTable, probability, scored
from fedbench_boards.statistics import ALPHA, LOSSES, TIES, WINS, Across, Test, across

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def across_settings(tables: Sequence[Table], means: Collection[str], test: Test) -> Across | None:
    """Compare the rows that all settings have; None for too few, or if settings are ranked by different metrics.

    If a setting has several tables, the first counts. ``means`` are names of means over settings, which are left out.
    Rows go by their labels where a setting has one backbone and another setting another one.
    """
    settings: dict[str, Table] = {}
    for table in tables:
        names = {line.setting for line in table.lines}
        if len(names) == 1 and not names & {*means, ""}:
            settings.setdefault(names.pop(), table)
    if len({table.headline for table in settings.values()}) != 1:
        return None
    backbones = [{line.backbone for line in table.lines} for table in settings.values()]
    by_label = len(set.union(*backbones)) > 1 and all(len(names) == 1 for names in backbones)
    return across({name: _scores(table, by_label=by_label) for name, table in settings.items()}, test)


def _scores(table: Table, *, by_label: bool) -> dict[str, Mapping[int, float]]:
    """Row, or its label -> seed -> the headline of rows with a rank; larger is better."""
    sign = -1 if lower_is_better(table.headline) else 1
    return {
        line.label if by_label else line.row: {seed: sign * score for seed, score in line.scores.items()}
        for line in table.lines
        if line.rank is not None
    }


def labels_of(board: Board) -> dict[str, str]:
    """Row of ``board.across`` -> its name in tables: its label if all rows have one backbone."""
    several = len({line.backbone for line in board.lines}) > 1
    rows = {line.row: line.row if several else line.label for line in board.lines}
    return {line.label: line.label for line in board.lines} | rows


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
    places = [overall.rank_intervals[row] for row in rows]
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
        rank=Column("#", [Cell(ranks_shown(*ends), ends[0]) for ends in places], "rank", first="ascending"),
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
        "#: the places by mean rank that a row may have at 95 %, by paired tests over settings with Holm's correction",
        "rows that a setting lacks are left out",
        "settings count as independent, which neighbours on a grid, of the same data and seeds, are not",
        f"mean ranks less than {overall.critical_difference:.2f} apart are not told apart (Nemenyi, {ALPHA:g})",
        f"mean {heading(metric)}: over settings, ± half of the 95 % interval over seeds",
        f"{WINS}, {TIES}, {LOSSES}: against all other rows everywhere, by paired tests at {ALPHA:g}, not corrected",
    ]


def critical_differences(overall: Across, labels: Mapping[str, str]) -> Figure:
    """Mean ranks on a line, bars over rows that Nemenyi's test does not tell apart. ``labels``: row -> its name.

    The critical-difference diagram of Demšar (JMLR 2006), as scikit-posthocs draws it.
    """
    import scikit_posthocs  # takes seconds to import
    from matplotlib.figure import Figure

    ranks = overall.mean_ranks.rename(index=dict(labels))
    apart = scikit_posthocs.posthoc_nemenyi_friedman(overall.ranks.rename(columns=dict(labels)).reset_index(drop=True))
    fig = Figure(figsize=(7.0, 1.1 + 0.105 * len(ranks)), layout="constrained")
    axes = fig.subplots()
    drawn = scikit_posthocs.critical_difference_diagram(
        ranks,
        apart,
        ax=axes,
        label_fmt_left="{label} {rank:.1f} ",
        label_fmt_right=" {rank:.1f} {label}",
        label_props={"fontsize": 7},
        crossbar_props={"linewidth": 2.5, "color": "#808890"},
        elbow_props={"linewidth": 0.7},
        marker_props={"s": 9},
        color_palette=["#000000"] * len(ranks),
    )
    for (bar,) in drawn["crossbars"]:  # it joins the rows of a set, which has another order in every process
        bar.set_xdata(sorted(bar.get_xdata()))
    axes.set_title(
        f"mean rank over {len(overall.ranks)} settings; critical difference {overall.critical_difference:.2f}",
        fontsize=8,
    )
    return fig
