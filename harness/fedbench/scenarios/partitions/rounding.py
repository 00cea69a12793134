"""Floors that forgive float error: 0.29 * 100 is 28.999999999999996, and a published count is 29."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
SLACK = 1e-9


def floor(value: float) -> int:
    """⌊value⌋, where a value within 1e-9 (relative above 1) below an integer counts as that integer."""
    return math.floor(value + SLACK * max(1.0, abs(value)))


def takers(total: int, shares: NDArray[np.float64]) -> IntArray:
    """The part that takes each of ``total`` items, which are cut at ⌊cumsum(shares)·total⌋, (total,) int64, ascending.

    The shares sum to 1, and nothing is lost.
    """
    cuts = shares.cumsum()[:-1] * total + SLACK * max(1, total)
    # item j lies behind the cut x where ⌊x⌋ <= j, that is x < j + 1
    return cuts.searchsorted(np.arange(1, total + 1))
