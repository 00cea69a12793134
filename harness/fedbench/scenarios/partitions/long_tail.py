"""Long-tailed training sets: class counts that fall exponentially, as in the CReFF, CLIP2FL and CAPT protocols.

    n_c = floor(n_max * IF^(-c / (C - 1))),   c = 0 .. C-1, class 0 the biggest

``n_max`` is the smallest class count of the full data (n/C where it is balanced, as CIFAR is), so that every class can
fill its place. Test and validation splits stay as they are.
"""

from __future__ import annotations

import numpy as np

from fedbench.core.errors import FedbenchError
from fedbench.scenarios.partitions.rounding import IntArray, floor


def exponential_counts(largest: int, classes: int, imbalance_factor: float) -> IntArray:
    """n_c by rank, (classes,): truncated, not rounded, as the published totals (12,406 for CIFAR-10, IF 100) require.

    The floor forgives float error, since the last count is often an exact integer (5000 / 100 = 50).
    """
    steps = max(classes - 1, 1)
    return np.array([floor(largest * imbalance_factor ** (-rank / steps)) for rank in range(classes)], dtype=np.int64)


def thin(labels: IntArray, order: IntArray, imbalance_factor: float, rng: np.random.Generator) -> IntArray:
    """Positions of the kept samples, ascending: a random subset of each class, ``order`` (C,) biggest class first."""
    available = np.bincount(labels, minlength=len(order))
    largest = int(available.min())
    if largest == 0:
        raise FedbenchError(
            f"imbalance 'exponential' needs samples of every class, but class {int(available.argmin())} has no "
            "training sample; set imbalance='natural' or leave the class out of the data set"
        )
    counts = exponential_counts(largest, len(order), imbalance_factor)
    if counts[-1] == 0:
        raise FedbenchError(
            f"imbalance_factor={imbalance_factor:g} leaves the smallest class without a sample: the biggest class can "
            f"have {largest} (the smallest class count of the full data); set imbalance_factor to at most {largest}"
        )
    kept = [
        rng.permutation(np.flatnonzero(labels == label))[:count] for label, count in zip(order, counts, strict=True)
    ]
    return np.sort(np.concatenate(kept))
