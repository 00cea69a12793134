"""A partition as two arrays, all clients' samples one after another and offsets; floors that forgive float error."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

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


@dataclass(frozen=True, eq=False)
class Parts(Sequence[IntArray]):
    """The samples of each client, as views of one array."""

    flat: IntArray
    """Samples client by client, in the order in which they were given out, (n,) int64."""
    offsets: IntArray
    """Offsets into ``flat``, (N + 1,) int64."""

    @property
    def sizes(self) -> IntArray:
        """Samples by client, (N,) int64."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, position: int) -> IntArray: ...
    @overload
    def __getitem__(self, position: slice) -> tuple[IntArray, ...]: ...
    def __getitem__(self, position: int | slice) -> IntArray | tuple[IntArray, ...]:
        if isinstance(position, slice):
            return tuple(self[one] for one in range(*position.indices(len(self))))
        at = range(len(self))[position]
        return self.flat[self.offsets[at] : self.offsets[at + 1]]

    def __iter__(self) -> Iterator[IntArray]:
        return (self[position] for position in range(len(self)))

    def ascending(self) -> IntArray:
        """``flat`` with every client's samples in ascending order."""
        span = int(self.flat.max(initial=0)) + 1
        first = np.repeat(np.arange(len(self)) * span, self.sizes)
        return np.sort(self.flat + first) - first


def equal_parts(samples: IntArray, count: int) -> Parts:
    """``samples`` (n,) cut in their order into ``count`` parts as `numpy.array_split` cuts: the first get one more."""
    return Parts(samples, _starts(equal_sizes(len(samples), count)))


def equal_sizes(total: int, count: int) -> IntArray:
    """The sizes of ``count`` equal parts of ``total``, ±1, larger ones first, (count,) int64."""
    return np.full(count, total // count) + (np.arange(count) < total % count)


def joined(parts: Sequence[IntArray]) -> IntArray:
    """The samples of all ``parts``, end to end, (n,) int64."""
    return parts.flat if isinstance(parts, Parts) else np.concatenate(parts)


def as_parts(parts: Sequence[IntArray]) -> Parts:
    """Convert ``parts``; returned unchanged if they are `Parts` already."""
    if isinstance(parts, Parts):
        return parts
    sizes = np.array([len(part) for part in parts], dtype=np.int64)
    return Parts(np.concatenate([np.zeros(0, dtype=np.int64), *parts]), _starts(sizes))


def deal_out(samples: IntArray, owners: IntArray, clients: int) -> Parts:
    """Give ``samples`` (n,) to the clients ``owners`` (n,), keeping the order of each client's samples."""
    return Parts(samples[np.argsort(owners, kind="stable")], _starts(np.bincount(owners, minlength=clients)))


def picked(samples: IntArray, sizes: IntArray, order: IntArray, each: int) -> Parts:
    """Cut ``samples`` into pieces of ``sizes``; clients take ``each`` pieces in turn in the given ``order``."""
    chosen = sizes[order]
    begin = _starts(chosen)
    # where every piece begins in ``samples``, less where it begins in the result
    shift = np.repeat(_starts(sizes)[order] - begin[:-1], chosen)
    return Parts(samples[np.arange(len(shift)) + shift], begin[::each].copy())


def shuffled_classes(labels: IntArray, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
    """The samples class by class, each class shuffled, (n,) int64, and the size of every class, (C,) int64."""
    sizes = np.bincount(labels)
    samples = np.argsort(labels, kind="stable")
    start = 0
    for size in sizes.tolist():
        # in place; it draws what a permutation draws, and nothing for a single sample
        if size > 1:
            rng.shuffle(samples[start : start + size])
        start += size
    return samples, sizes


def _starts(sizes: IntArray) -> IntArray:
    return np.concatenate([[0], np.cumsum(sizes)])
