"""What numbers over seeds and settings can decide: paired tests and intervals, ties, power, ranks over settings."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

ALPHA = 0.05
"""Level of two-sided tests, after correction."""
BASELINE, NO_BASELINE, EQUAL = "is the baseline", "no baseline", "differences are all equal"
SIGNIFICANT, NOT_SIGNIFICANT = "significant", "not significant"
_DIGITS = 9
"""Differences of percentages that agree to so many digits are equal; the rest is floating-point noise."""
_MOST_WITH_TIES = 16
"""The most tied differences for which all 2^n signs are tried; that takes next to no time."""


class Test(enum.Enum):
    """A paired, two-sided test of a difference."""

    __test__ = False  # pytest would take it for a class of tests

    t = "t"
    wilcoxon = "wilcoxon"

    @property
    def title(self) -> str:
        """The test's name in tables."""
        return "paired t-test" if self is Test.t else "Wilcoxon signed-rank test"

    @property
    def needed(self) -> int:
        """The fewest pairs for the test. With five pairs Wilcoxon's smallest p is 2/32, above 0.05 whatever the
        data."""
        return 3 if self is Test.t else 6


@dataclass(frozen=True)
class Outcome:
    """A test's p-value, or NaN and the ``reason`` why there is none."""

    p_value: float
    reason: str = ""


def paired(ours: Sequence[float], theirs: Sequence[float], test: Test = Test.t) -> Outcome:
    """The two-sided p-value of paired numbers, (n,) each in the same order; with a reason where there is none.

    Wilcoxon's test leaves out pairs without a difference and is exact, also with ties.
    """
    differences = np.round(np.asarray(ours, dtype=float) - np.asarray(theirs, dtype=float), _DIGITS)
    if len(differences) < test.needed:
        return Outcome(float("nan"), f"needs {test.needed} seeds, has {len(differences)}")
    if np.ptp(differences) == 0:
        return Outcome(float("nan"), EQUAL)
    if test is Test.t:
        return Outcome(_paired_t(np.asarray(ours, dtype=float) - np.asarray(theirs, dtype=float)))
    return _wilcoxon(differences[differences != 0])


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Student's interval of the mean of ``differences``, (n,), at the level 1 - ALPHA; NaN for fewer than two.

    It is for one difference: of twenty such intervals one is expected to miss its true value.
    """
    from scipy.special import stdtrit  # the inverse of `stdtr`

    given = np.asarray(differences, dtype=float)
    if len(given) < 2:
        return float("nan"), float("nan")
    half = float(stdtrit(len(given) - 1, 1 - ALPHA / 2)) * given.std(ddof=1) / np.sqrt(len(given))
    return float(given.mean() - half), float(given.mean() + half)


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values corrected by Holm's step-down procedure: the i-th smallest of m times m - i + 1, at most 1.

    None is below a smaller one's. All must be numbers.
    """
    given = np.asarray(p_values, dtype=float)
    order = np.argsort(given, kind="stable")
    stepped = np.maximum.accumulate(given[order] * np.arange(len(given), 0, -1))
    corrected = np.empty_like(given)
    corrected[order] = np.minimum(stepped, 1.0)
    return [float(p) for p in corrected]


def verdict(p_adjusted: float) -> str:
    """The verdict on a p-value in the words of tables."""
    return SIGNIFICANT if p_adjusted < ALPHA else NOT_SIGNIFICANT


def _paired_t(differences: NDArray[np.float64]) -> float:
    """The p-value of `scipy.stats.ttest_rel` bit for bit, without importing that module, which takes a second."""
    from scipy.special import stdtr  # Student's distribution

    count, mean = len(differences), differences.mean()
    variance = np.square(differences - mean).mean() * (count / (count - 1))
    return float(2 * stdtr(count - 1, -abs(mean / np.sqrt(variance / count))))


def _wilcoxon(differences: NDArray[np.float64]) -> Outcome:
    """Wilcoxon's exact test of ``differences`` without zeros."""
    count = len(differences)
    if count < Test.wilcoxon.needed:
        return Outcome(float("nan"), f"needs {Test.wilcoxon.needed} seeds that differ, has {count}")
    from scipy import stats

    if len(np.unique(np.abs(differences))) == count:
        return Outcome(float(stats.wilcoxon(differences, method="exact").pvalue))
    if count > _MOST_WITH_TIES:
        return Outcome(float("nan"), f"ties among more than {_MOST_WITH_TIES} differences")
    # the table of exact p-values knows no ties; trying all signs does
    every_sign = stats.PermutationMethod(n_resamples=2**count)
    return Outcome(float(stats.wilcoxon(differences, method=every_sign).pvalue))


_DRAWS = 10_000
"""Number of bootstrap samples: a probability of 0.5 has a standard error of 0.005."""
LEAST_SEEDS = 5
"""The fewest seeds for the bootstrap. With fewer it is far too sure: n seeds can be drawn in n^n ways only."""
Scores = NDArray[np.float64]
"""Scores (rows, seeds), larger is better; NaN where a row lacks a seed."""


def rank_intervals(scores: Scores, test: Test = Test.t) -> list[tuple[int, int] | None]:
    """The ranks, (low, high), that each row may have: 1 is best; None for a row without any score.

    Low is one more than the rows that are significantly better than it, high so many less than all as are significantly
    worse: by paired differences, with Holm's correction over all rows compared with it. So the rank by true means is in
    the interval with at least 95 % (Mogstad et al., Review of Economic Studies 2024, who take the bootstrap where this
    takes ``test``, since seeds are few; `tests.statistics.test_ranks` simulates it).
    """
    rows = [row for row in range(len(scores)) if not np.isnan(scores[row]).all()]
    p_values, leads = np.ones((len(scores), len(scores))), np.zeros((len(scores), len(scores)))
    for one, other in combinations(rows, 2):
        p_values[one, other] = p_values[other, one] = p_value(scores[one], scores[other], test)
        leads[one, other] = np.nan_to_num(scores[one] - scores[other]).sum()  # over the seeds that both have
        leads[other, one] = -leads[one, other]
    intervals: list[tuple[int, int] | None] = [None] * len(scores)
    for row in rows:
        others = [other for other in rows if other != row]
        told = [
            leads[row, other] for other, p in zip(others, holm(list(p_values[row, others])), strict=True) if p < ALPHA
        ]
        better = int(sum(lead < 0 for lead in told))
        intervals[row] = 1 + better, len(rows) - (len(told) - better)
    return intervals


def probability_best(scores: Scores, seed: int = 0, least: int = LEAST_SEEDS) -> list[float]:
    """Bootstrap probability of each row to have the best mean: seeds are drawn with replacement, the same for all rows.

    Seeds are those that all rows with a score share; all results are NaN if these are fewer than ``least``. Rows that
    are best together share a draw.
    """
    has_some = ~np.isnan(scores).all(axis=1)
    shared = scores[:, ~np.isnan(scores[has_some]).any(axis=0)]
    count = shared.shape[1]
    probabilities = np.full(len(scores), np.nan)
    if count >= least and has_some.any():
        drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=_DRAWS)
        means = np.round(drawn @ shared[has_some].T / count, 9)
        best = means == means.max(axis=1, keepdims=True)
        probabilities[has_some] = (best / best.sum(axis=1, keepdims=True)).mean(axis=0)
    return [float(p) for p in probabilities]


def p_value(ours: Sequence[float] | Scores, theirs: Sequence[float] | Scores, test: Test) -> float:
    """The p-value over common seeds; 1 if there is no test, 0 if both rows are constant over seeds and differ."""
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if not (math.isnan(a) or math.isnan(b))]
    outcome = paired([a for a, _ in pairs], [b for _, b in pairs], test)
    if outcome.reason == EQUAL:  # t is infinite; only of numbers that no seed moves is that more than rounding
        return 0.0 if len({*pairs}) == 1 and round(pairs[0][0] - pairs[0][1], 9) else 1.0
    return 1.0 if outcome.reason else outcome.p_value


POWER = 0.8
"""The probability to detect a difference."""
_MOST = 10_000
"""The number of seeds beyond which a gap counts as out of reach."""


def detectable(spread: float, seeds: int) -> float:
    """The difference that a two-sided paired t-test over ``seeds`` finds with `POWER`, uncorrected.

    ``spread`` is the sample standard deviation of the paired differences. NaN for fewer than two seeds.
    """
    from scipy.special import nctdtrinc, stdtrit

    if seeds < 2 or math.isnan(spread):
        return math.nan
    # the noncentrality at which t exceeds its critical value with that power; the other tail has next to nothing
    freedom = seeds - 1
    noncentrality = float(nctdtrinc(freedom, 1 - POWER, float(stdtrit(freedom, 1 - ALPHA / 2))))
    return noncentrality * spread / math.sqrt(seeds)


def seeds_for(gap: float, spread: float) -> int | None:
    """The fewest seeds at which `detectable` is at most ``gap``; None where more than 10,000 are needed."""
    if gap <= 0 or math.isnan(gap) or math.isnan(spread):
        return None
    low, high = 2, 2
    while detectable(spread, high) > gap:
        if high >= _MOST:
            return None
        low, high = high, min(2 * high, _MOST)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if detectable(spread, middle) <= gap else (middle + 1, high)
    return low


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

    @cached_property
    def rank_intervals(self) -> dict[str, tuple[int, int]]:
        """Row -> the places by mean rank, (low, high), that it may have: `rank_intervals` over settings for seeds."""
        ends = rank_intervals(-self.ranks.to_numpy().T)
        return {row: of for row, of in zip(map(str, self.ranks), ends, strict=True) if of is not None}

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
