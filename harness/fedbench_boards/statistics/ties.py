"""Rows of a table that cannot be told from its best, and the probability of each row to be the best."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedbench_boards.statistics.paired import ALPHA, EQUAL, Test, holm, paired

_DRAWS = 10_000
"""Number of bootstrap samples: a probability of 0.5 has a standard error of 0.005."""
LEAST_SEEDS = 5
"""The fewest seeds for the bootstrap. With fewer it is far too sure: n seeds can be drawn in n^n ways only."""
Scores = NDArray[np.float64]
"""Scores (rows, seeds), larger is better; NaN where a row lacks a seed."""


def tied_ranks(scores: Scores, test: Test = Test.t) -> list[int | None]:
    """The rank of each row, shared by rows that cannot be told apart: 1, 1, 1, 4, ...

    The first group is the row with the best mean and those behind it down to the first whose paired difference from it
    is significant, by Holm over all rows compared with it. That row begins the next group in the same way: a worse mean
    never has a better rank, however much it varies. A row without any score has None. Too few seeds tell nothing apart.

    Of rows with independent normal errors the one that is best in truth is in the first group with at least 95 %
    (`tests.statistics.test_ties` simulates it).
    """
    means = _means(scores)
    left = [int(row) for row in np.argsort(-means, kind="stable") if not math.isnan(means[row])]
    ranks: list[int | None] = [None] * len(scores)
    rank = 1
    while left:
        best, *others = left
        adjusted = holm([p_value(scores[best], scores[other], test) for other in others])
        end = next((place for place, p in enumerate(adjusted, start=1) if p < ALPHA), len(left))
        for row in left[:end]:
            ranks[row] = rank
        rank, left = rank + end, left[end:]
    return ranks


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


def _means(scores: Scores) -> Scores:
    known = ~np.isnan(scores)
    with np.errstate(invalid="ignore"):
        means: Scores = np.where(known, scores, 0.0).sum(axis=1) / known.sum(axis=1)
    return means


def p_value(ours: Sequence[float] | Scores, theirs: Sequence[float] | Scores, test: Test) -> float:
    """The p-value over common seeds; 1 if there is no test, 0 if both rows are constant over seeds and differ."""
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if not (math.isnan(a) or math.isnan(b))]
    outcome = paired([a for a, _ in pairs], [b for _, b in pairs], test)
    if outcome.reason == EQUAL:  # t is infinite; only of numbers that no seed moves is that more than rounding
        return 0.0 if len({*pairs}) == 1 and round(pairs[0][0] - pairs[0][1], 9) else 1.0
    return 1.0 if outcome.reason else outcome.p_value
