"""Rows over several settings: mean ranks and whether they differ, wins and losses, and the score over all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from fedbench.statistics.paired import ALPHA, EQUAL, Test, interval, paired
from fedbench.statistics.ties import Scores

LEAST_SETTINGS, LEAST_ROWS = 3, 3
"""Friedman's test compares no fewer."""
WINS, TIES, LOSSES = "wins", "ties", "losses"


@dataclass(frozen=True, eq=False)
class Across:
    """Rows (R) that have a score in each of the settings (S)."""

    ranks: pd.DataFrame
    """(S, R): 1 is best; equal means share the mean of their ranks."""
    p_value: float
    """Friedman's: how likely such ranks are if the rows did not differ."""
    outcomes: pd.DataFrame
    """(R, 3): `WINS`, `TIES`, `LOSSES` against all other rows in all settings."""
    against: pd.DataFrame
    """(R, R): wins minus losses of a row against the one of the column."""
    scores: pd.DataFrame
    """(R, 3): ``mean``, ``low``, ``high`` of the mean over settings, Student's 95 % interval over the shared seeds."""

    @property
    def mean_ranks(self) -> pd.Series:
        """(R,), the best first."""
        return self.ranks.mean().sort_values(kind="stable")

    @property
    def critical_difference(self) -> float:
        """Nemenyi's: mean ranks closer than this are not told apart at `ALPHA`."""
        from scipy.stats import studentized_range

        settings, rows = self.ranks.shape
        quantile = float(studentized_range.ppf(1 - ALPHA, rows, math.inf)) / math.sqrt(2)
        return quantile * math.sqrt(rows * (rows + 1) / (6 * settings))


def across(settings: Mapping[str, Mapping[str, Mapping[int, float]]], test: Test = Test.t) -> Across | None:
    """Compare the rows that every setting has; None for fewer than three settings or three such rows.

    ``settings``: setting -> row -> seed -> score, larger is better. A row wins against another in a setting where its
    paired difference is significant (not corrected for the number of pairs), and ties where it is not.
    """
    named = [row for row in next(iter(settings.values()), {}) if all(row in rows for rows in settings.values())]
    if len(settings) < LEAST_SETTINGS or len(named) < LEAST_ROWS:
        return None
    means = pd.DataFrame({s: {row: np.mean(list(rows[row].values())) for row in named} for s, rows in settings.items()})
    ranks = means.round(9).rank(ascending=False).T
    # (S, R, R): 1 where the row is significantly better than that of the column, -1 where it is worse
    won = np.array([[[_decided(rows[a], rows[b], test) for b in named] for a in named] for rows in settings.values()])
    counts = {WINS: won == 1, TIES: won == 0, LOSSES: won == -1}
    outcomes = pd.DataFrame({name: found.sum(axis=(0, 2)) for name, found in counts.items()}, index=named)
    outcomes[TIES] -= len(settings)  # of a row with itself
    against = pd.DataFrame(won.sum(axis=0), index=named, columns=named)
    return Across(ranks, _friedman(ranks), outcomes, against, _scores(settings, named))


def _decided(ours: Mapping[int, float], theirs: Mapping[int, float], test: Test) -> int:
    """1 where the first is significantly better, -1 where the second is, else 0."""
    shared = [seed for seed in ours if seed in theirs]
    first, second = [ours[seed] for seed in shared], [theirs[seed] for seed in shared]
    outcome = paired(first, second, test)
    if not shared or (outcome.reason and outcome.reason != EQUAL) or outcome.p_value >= ALPHA:
        return 0
    return int(np.sign(round(float(np.mean(first) - np.mean(second)), 9)))


def _friedman(ranks: pd.DataFrame) -> float:
    from scipy.stats import friedmanchisquare

    if (ranks.nunique(axis=1) == 1).all():  # all rows tie everywhere: the statistic is 0 / 0
        return 1.0
    return float(friedmanchisquare(*(ranks[row] for row in ranks)).pvalue)


def _scores(settings: Mapping[str, Mapping[str, Mapping[int, float]]], named: Sequence[str]) -> pd.DataFrame:
    """The mean over settings, for every row over the seeds that it has in all of them."""
    found = {}
    for row in named:
        runs = [rows[row] for rows in settings.values()]
        seeds = [seed for seed in runs[0] if all(seed in run for run in runs)]
        totals: Scores = np.array([np.mean([run[seed] for run in runs]) for seed in seeds])
        low, high = interval(list(totals))
        found[row] = {"mean": totals.mean() if len(totals) else math.nan, "low": low, "high": high}
    return pd.DataFrame.from_dict(found, orient="index")
