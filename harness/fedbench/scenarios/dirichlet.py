"""Label skew by Dirichlet draws, in the four versions that papers call by one name.

The same concentration means another skew in each, so results say which one was used.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedbench.errors import FedbenchError
from fedbench.scenarios.label_skew import MAX_REDRAWS, recut
from fedbench.scenarios.rounding import IntArray, cut

VIRTUAL_WORKERS = 10
"""Workers that one group of samples is dealt to in CReFF's protocol."""


def dirichlet_capped(
    labels: IntArray, clients: int, dirichlet_alpha: float, min_client_size: int, rng: np.random.Generator
) -> list[IntArray]:
    """By class in order, π ~ Dir(β·1_N) over the clients that hold less than n/N so far (NIID-Bench, MOON, FedNTD).

    The cap is in the released codes, not in the papers. Drawn again until every client has ``min_client_size``.
    """
    return _by_class(labels, clients, dirichlet_alpha, min_client_size, _capped_counts, rng)


def dirichlet_uncapped(
    labels: IntArray, clients: int, dirichlet_alpha: float, min_client_size: int, rng: np.random.Generator
) -> list[IntArray]:
    """By class, π ~ Dir(β·1_N) over all clients: heavier size skew (FL-bench; what most papers describe)."""
    return _by_class(labels, clients, dirichlet_alpha, min_client_size, _uncapped_counts, rng)


def dirichlet_clientwise(
    labels: IntArray, clients: int, dirichlet_alpha: float, min_client_size: int, rng: np.random.Generator
) -> list[IntArray]:
    """Each client draws q ~ Dir(α·prior) and takes n/N samples by it, classes that run out apart (Hsu et al. 2019).

    Sizes differ by at most one, nothing is dropped.
    """
    _refuse_too_few(len(labels), clients, min_client_size)
    left = np.bincount(labels)
    prior = left / left.sum()
    counts = np.zeros((clients, len(left)), dtype=np.int64)
    for client, piece in enumerate(np.array_split(np.arange(len(labels)), clients)):
        counts[client] = _draw_client(len(piece), dirichlet_alpha * prior, left, rng)
        left -= counts[client]
    return _deal(labels, counts, rng)


def creff_equal(labels: IntArray, clients: int, dirichlet_alpha: float, rng: np.random.Generator) -> list[IntArray]:
    """The partition of CReFF, CLIP2FL and RUCR: equal sizes (±1), neighbouring clients share virtual workers.

    Shuffle; one group of samples for every ten clients; within a group a capped Dirichlet split over as many virtual
    workers, drawn again until each holds half the mean; then lay all workers end to end and cut into N slices. A worker
    keeps its samples in class order, as released, so the slices stay skewed. The released code fixes the seed at 7.
    """
    workers = [min(VIRTUAL_WORKERS, clients - first) for first in range(0, clients, VIRTUAL_WORKERS)]
    ends = [VIRTUAL_WORKERS * len(labels) * (group + 1) // clients for group in range(len(workers) - 1)]
    parts: list[IntArray] = []
    for group, members in zip(np.split(rng.permutation(len(labels)), ends), workers, strict=True):
        least = len(group) // (2 * members)
        dealt = _by_class(labels[group], members, dirichlet_alpha, least, _capped_counts, rng)
        parts.extend(group[piece] for piece in dealt)
    return recut(parts)


def _by_class(
    labels: IntArray,
    clients: int,
    dirichlet_alpha: float,
    min_client_size: int,
    draw: Callable[[IntArray, int, float, np.random.Generator], IntArray],
    rng: np.random.Generator,
) -> list[IntArray]:
    _refuse_too_few(len(labels), clients, min_client_size)
    class_sizes = np.bincount(labels)
    for _ in range(MAX_REDRAWS):
        counts = draw(class_sizes, clients, dirichlet_alpha, rng)
        if counts.sum(axis=1).min() >= min_client_size:
            return _deal(labels, counts, rng)
    raise FedbenchError(
        f"dirichlet_alpha={dirichlet_alpha:g} never gave each of {clients} clients at least {min_client_size} of "
        f"{len(labels)} training samples in {MAX_REDRAWS} draws; raise dirichlet_alpha, or lower clients or "
        "min_client_size (creff_equal: the minimum is half the mean size)"
    )


def _capped_counts(class_sizes: IntArray, clients: int, dirichlet_alpha: float, rng: np.random.Generator) -> IntArray:
    counts = np.zeros((clients, len(class_sizes)), dtype=np.int64)
    held, capacity = np.zeros(clients, dtype=np.int64), class_sizes.sum() / clients
    for label, size in enumerate(class_sizes):
        # A Dirichlet vector with entries struck out and renormalised is Dirichlet on the rest. Drawing it there
        # can't meet the 0/0 of a small concentration whose whole mass lies on clients that are full.
        below = np.flatnonzero(held < capacity) if size else np.arange(clients)
        counts[below, label] = cut(int(size), rng.dirichlet(np.full(len(below), dirichlet_alpha)))
        held += counts[:, label]
    return counts


def _uncapped_counts(class_sizes: IntArray, clients: int, dirichlet_alpha: float, rng: np.random.Generator) -> IntArray:
    shares = rng.dirichlet(np.full(clients, dirichlet_alpha), size=len(class_sizes))
    return np.stack([cut(int(size), share) for size, share in zip(class_sizes, shares, strict=True)], axis=1)


def _draw_client(size: int, concentration: np.ndarray, left: IntArray, rng: np.random.Generator) -> IntArray:
    """Counts (C,) of one client: draws from q that meet an empty class are drawn again from the classes left."""
    taken = np.zeros_like(left)
    q = np.zeros(len(left))
    while (missing := size - int(taken.sum())) > 0:
        open_classes = left > taken
        q = np.where(open_classes, q, 0.0)
        if q.sum() == 0:  # at the start, and when a small concentration puts all mass on classes that ran out
            q[open_classes] = rng.dirichlet(concentration[open_classes])
        taken += np.minimum(rng.multinomial(missing, q / q.sum()), left - taken)
    return taken


def _deal(labels: IntArray, counts: IntArray, rng: np.random.Generator) -> list[IntArray]:
    """Random samples of each class by ``counts`` (clients, C); a client's are in class order."""
    pieces = [
        np.split(rng.permutation(np.flatnonzero(labels == label)), np.cumsum(column)[:-1])
        for label, column in enumerate(counts.T)
    ]
    return [np.concatenate(of_client) for of_client in zip(*pieces, strict=True)]


def _refuse_too_few(samples: int, clients: int, min_client_size: int) -> None:
    if clients * min_client_size > samples:
        raise FedbenchError(
            f"{clients} clients with at least {min_client_size} samples each need {clients * min_client_size}, but "
            f"there are {samples} training samples; lower clients or min_client_size"
        )
