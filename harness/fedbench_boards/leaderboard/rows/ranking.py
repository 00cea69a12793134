"""Computations over a whole table: ranks, Holm correction, which cell is bold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from fedbench.kinds.measured import lower_is_better, says_nothing_of_quality
from fedbench_boards.leaderboard.model import Line
from fedbench_boards.leaderboard.rows.untrained import is_of_global_model
from fedbench_boards.statistics.paired import Test, holm, verdict
from fedbench_boards.statistics.ties import Scores, probability_best, tied_ranks

_DIGITS = 9
"""Means of percentages that agree to so many digits share a rank."""


def compared(lines: Sequence[Line], headline: str, test: Test = Test.t) -> tuple[Line, ...]:
    """The lines of one table in order, with ranks, ``p_best``, ``whole``, ``p_adjusted`` and the verdict on the
    difference; ties are told by ``test``.

    ``whole`` is a line that lost no seed which another one finished. Rank 1 has the best ``headline``; equal means
    share the smaller rank. It is None for a line without a mean, one that is not whole, and the accuracy of a global
    model that is never trained.
    """
    finished = {seed for line in lines for seed in line.runs}
    lines = [replace(line, whole=not line.has_failed and not _lost(line) & finished) for line in lines]
    means = [line.cell(headline).mean if may_be_best(line, headline) else math.nan for line in lines]
    ranks = pd.Series(means, dtype=float).round(_DIGITS).rank(method="min", ascending=lower_is_better(headline))
    tested = [number for number, line in enumerate(lines) if not math.isnan(line.delta.p_value)]
    adjusted = dict(zip(tested, holm([lines[number].delta.p_value for number in tested]), strict=True))
    scores = _scores(lines, [not math.isnan(rank) for rank in ranks], headline)
    tied = tied_ranks(scores, test) if _can_be_told(scores, test) else [None] * len(lines)
    best = probability_best(scores)
    ranked = []
    for number, (line, rank) in enumerate(zip(lines, ranks, strict=True)):
        delta = line.delta
        if number in adjusted:
            delta = replace(delta, p_adjusted=adjusted[number], significance=verdict(adjusted[number]))
        own = None if math.isnan(rank) else int(rank)
        ranked.append(replace(line, rank=own, tied_rank=tied[number], p_best=best[number], delta=delta))
    return tuple(sorted(ranked, key=lambda line: (line.rank or len(lines) + 1, -len(line.runs))))


def _scores(lines: Sequence[Line], ranked: Sequence[bool], headline: str) -> Scores:
    """Scores (rows, seeds), larger is better, NaN for rows without a rank."""
    seeds = sorted({seed for line in lines for seed in line.scores})
    sign = -1 if lower_is_better(headline) else 1
    rows = [
        [sign * line.scores.get(seed, math.nan) if has_rank else math.nan for seed in seeds]
        for line, has_rank in zip(lines, ranked, strict=True)
    ]
    return np.array(rows, dtype=float).reshape(len(lines), len(seeds))


def _can_be_told(scores: Scores, test: Test) -> bool:
    """Whether any two rows share as many seeds as the test needs."""
    known = (~np.isnan(scores)).astype(int)
    shared = known @ known.T
    return bool((shared - np.diag(np.diag(shared)) >= test.needed).any())


def may_be_best(line: Line, metric: str) -> bool:
    """Whether the row may have its table's best ``metric``."""
    return line.whole and not says_nothing_of_quality(metric) and not (line.untrained and is_of_global_model(metric))


def best_of(lines: Sequence[Line], metric: str) -> list[bool]:
    """Whether each line has the best ``metric`` at the shown precision, one decimal; False for a single line."""
    means = [line.cell(metric).mean for line in lines]
    eligible = [may_be_best(line, metric) and not math.isnan(mean) for line, mean in zip(lines, means, strict=True)]
    choose = min if lower_is_better(metric) else max
    best = choose((round(mean, 1) for mean, may in zip(means, eligible, strict=True) if may), default=math.nan)
    return [len(lines) > 1 and may and round(mean, 1) == best for mean, may in zip(means, eligible, strict=True)]


def _lost(line: Line) -> set[int]:
    """Seeds with a failed run and no finished one."""
    return {failure.seed for failure in line.status.failures} - line.runs.keys()
