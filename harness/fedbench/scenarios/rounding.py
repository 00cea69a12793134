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


def cut(total: int, shares: NDArray[np.float64]) -> IntArray:
    """``total`` items cut at ⌊cumsum(shares)·total⌋, (parts,) int64; the shares sum to 1 and nothing is lost."""
    cuts = np.floor(np.cumsum(shares)[:-1] * total + SLACK * max(1, total)).astype(np.int64)
    return np.diff(cuts, prepend=0, append=total)
