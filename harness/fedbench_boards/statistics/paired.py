"""Paired tests of the difference between two rows, corrected for the number of tests, and intervals."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
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
