"""Comparison of rows over several settings: mean ranks and their test, wins and losses, mean scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from fedbench_boards.statistics.paired import ALPHA, Test, interval
from fedbench_boards.statistics.ties import Scores, p_value

LEAST_SETTINGS, LEAST_ROWS = 3, 3
"""The fewest settings and rows for Friedman's test."""
WINS, TIES, LOSSES = "wins", "ties", "losses"


@dataclass(frozen=True, eq=False)
class Across:
    """Rows (R) that have a score in each of the settings (S)."""

    ranks: pd.DataFrame
    """Ranks by setting and row, (S, R): 1 is best; equal means share the mean of their ranks."""
    p_value: float
    """p-value of Friedman's test: the probability of such ranks if rows do not differ."""
    outcomes: pd.DataFrame
    """Counts of `WINS`, `TIES` and `LOSSES` against all other rows in all settings, (R, 3)."""
    against: pd.DataFrame
    """Wins minus losses of a row against the row of the column, (R, R)."""
    scores: pd.DataFrame
    """Mean over settings, (R, 3): ``mean``, ``low`` and ``high`` with Student's 95 % interval over ``seeds``."""
    seeds: tuple[int, ...]

    @property
    def mean_ranks(self) -> pd.Series:
        """Mean rank by row, (R,), the best first."""
        return self.ranks.mean().sort_values(kind="stable")

    @property
    def critical_difference(self) -> float:
        """Nemenyi's critical difference: mean ranks closer than this are not told apart at `ALPHA`."""
        from scipy.stats import studentized_range

        settings, rows = self.ranks.shape
        quantile = float(studentized_range.ppf(1 - ALPHA, rows, math.inf)) / math.sqrt(2)
        return quantile * math.sqrt(rows * (rows + 1) / (6 * settings))


def across(settings: Mapping[str, Mapping[str, Mapping[int, float]]], test: Test = Test.t) -> Across | None:
    """Compare the rows that every setting has, over the seeds that all of them have in all settings.

    ``settings``: setting -> row -> seed -> score, larger is better. A row wins against another in a setting where its
    paired difference is significant (not corrected for the number of pairs), and ties where it is not. None for fewer
    than three settings, three such rows or one such seed.
    """
    named = [row for row in next(iter(settings.values()), {}) if all(row in rows for rows in settings.values())]
    each = [rows[row] for rows in settings.values() for row in named]
    seeds = [seed for seed in each[0] if all(seed in scores for scores in each)] if each else []
    if len(settings) < LEAST_SETTINGS or len(named) < LEAST_ROWS or not seeds:
        return None
    scores: Scores = np.array([[[rows[row][seed] for seed in seeds] for row in named] for rows in settings.values()])
    means = pd.DataFrame(scores.mean(axis=2), index=list(settings), columns=named)
    ranks = means.round(9).rank(axis=1, ascending=False)
    # (S, R, R): 1 where the row is significantly better than that of the column, -1 where it is worse
    won = np.array([[[_decided(ours, theirs, test) for theirs in rows] for ours in rows] for rows in scores])
    counts = {WINS: won == 1, TIES: won == 0, LOSSES: won == -1}
    outcomes = pd.DataFrame({name: has_it.sum(axis=(0, 2)) for name, has_it in counts.items()}, index=named)
    outcomes[TIES] -= len(settings)  # of a row with itself
    against = pd.DataFrame(won.sum(axis=0), index=named, columns=named)
    totals = scores.mean(axis=0)
    overall = pd.DataFrame([(row.mean(), *interval(list(row))) for row in totals], named, ["mean", "low", "high"])
    return Across(ranks, _friedman(ranks), outcomes, against, overall, tuple(seeds))


def _decided(ours: Scores, theirs: Scores, test: Test) -> int:
    """1 if the first is significantly better, -1 if the second is, else 0."""
    return int(np.sign(ours.mean() - theirs.mean())) if p_value(ours, theirs, test) < ALPHA else 0


def _friedman(ranks: pd.DataFrame) -> float:
    from scipy.stats import friedmanchisquare

    if (ranks.nunique(axis=1) == 1).all():  # all rows tie everywhere: the statistic is 0 / 0
        return 1.0
    return float(friedmanchisquare(*(ranks[row] for row in ranks)).pvalue)
