"""Power of a paired t-test: the least difference that it detects, and the seeds that a gap needs."""

from __future__ import annotations

import math

from fedbench_boards.statistics.paired import ALPHA

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
