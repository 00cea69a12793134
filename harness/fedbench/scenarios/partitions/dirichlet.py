"""Label skew by Dirichlet draws, in four versions that papers call by the same name.

The same concentration means another skew in each, so results say which one was used.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedbench.core.errors import FedbenchError
from fedbench.scenarios.partitions.label_skew import MAX_REDRAWS
from fedbench.scenarios.partitions.parts import Parts, deal_out, equal_parts, equal_sizes, shuffled_classes
from fedbench.scenarios.partitions.rounding import IntArray, takers

VIRTUAL_WORKERS = 10
"""The number of workers that share one group of samples in CReFF's protocol."""
_MOST_SHARES = 300_000_000
"""The most shares drawn for a large federation (from 300,000 clients x classes on): about half a minute."""


def dirichlet_capped(
    labels: IntArray, clients: int, dirichlet_alpha: float, min_client_size: int, rng: np.random.Generator
) -> Parts:
    """Draw π ~ Dir(β·1_N) by class in order, over the clients that hold less than n/N so far (NIID-Bench, MOON,
    FedNTD).

    The cap is in the released codes, not in the papers. Drawn again until every client has ``min_client_size``.
    """
    return _by_class(labels, clients, dirichlet_alpha, min_client_size, _capped_owners, rng)


def dirichlet_uncapped(
    labels: IntArray, clients: int, dirichlet_alpha: float, min_client_size: int, rng: np.random.Generator
) -> Parts:
    """Draw π ~ Dir(β·1_N) by class over all clients: heavier size skew (FL-bench; what most papers describe)."""
    return _by_class(labels, clients, dirichlet_alpha, min_client_size, _uncapped_owners, rng)


def dirichlet_clientwise(
    labels: IntArray, clients: int, dirichlet_alpha: float, min_client_size: int, rng: np.random.Generator
) -> Parts:
    """Each client draws q ~ Dir(α·prior) and takes n/N samples by it, classes that run out apart (Hsu et al. 2019).

    Sizes differ by at most one, nothing is dropped.
    """
    _refuse_too_few(len(labels), clients, min_client_size)
    left = np.bincount(labels)
    concentration = dirichlet_alpha * (left / left.sum())
    wanted = []
    for size in equal_sizes(len(labels), clients).tolist():
        taken = _draw_client(size, concentration, left, rng)
        left -= taken
        wanted.append(np.repeat(np.arange(len(left)), taken))
    # class by class, and within a class client by client, as the samples are given out
    order = np.argsort(np.concatenate(wanted), kind="stable")
    owners = np.repeat(np.arange(clients), equal_sizes(len(labels), clients))[order]
    return deal_out(shuffled_classes(labels, rng)[0], owners, clients)


def creff_equal(labels: IntArray, clients: int, dirichlet_alpha: float, rng: np.random.Generator) -> Parts:
    """The partition of CReFF, CLIP2FL and RUCR: equal sizes (±1), neighbouring clients share virtual workers.

    Shuffle; one group of samples for every ten clients; within a group a capped Dirichlet split over as many virtual
    workers, drawn again until each holds half the mean; then lay all workers end to end and cut into N slices. A worker
    keeps its samples in class order, as released, so the slices stay skewed. The released code fixes the seed at 7.
    """
    workers = [min(VIRTUAL_WORKERS, clients - first) for first in range(0, clients, VIRTUAL_WORKERS)]
    ends = [VIRTUAL_WORKERS * len(labels) * (group + 1) // clients for group in range(len(workers) - 1)]
    laid = []
    for group, members in zip(np.split(rng.permutation(len(labels)), ends), workers, strict=True):
        least = len(group) // (2 * members)
        laid.append(group[_by_class(labels[group], members, dirichlet_alpha, least, _capped_owners, rng).flat])
    return equal_parts(np.concatenate(laid), clients)


def _by_class(
    labels: IntArray,
    clients: int,
    dirichlet_alpha: float,
    min_client_size: int,
    draw: Callable[[IntArray, int, float, np.random.Generator], IntArray],
    rng: np.random.Generator,
) -> Parts:
    _refuse_too_few(len(labels), clients, min_client_size)
    class_sizes = np.bincount(labels)
    draws = min(MAX_REDRAWS, max(_MOST_SHARES // max(clients * len(class_sizes), 1), 1))
    for _ in range(draws):
        owners = draw(class_sizes, clients, dirichlet_alpha, rng)
        if np.bincount(owners, minlength=clients).min() >= min_client_size:
            return deal_out(shuffled_classes(labels, rng)[0], owners, clients)
    raise FedbenchError(
        f"dirichlet_alpha={dirichlet_alpha:g} never gave each of {clients} clients at least {min_client_size} of "
        f"{len(labels)} training samples in {draws} draws; raise dirichlet_alpha, or lower clients or "
        "min_client_size (creff_equal: the minimum is half the mean size)"
    )


def _capped_owners(class_sizes: IntArray, clients: int, dirichlet_alpha: float, rng: np.random.Generator) -> IntArray:
    """The client of every sample, (n,) int64, class by class."""
    owners = [np.arange(0)]
    concentration = np.full(clients, dirichlet_alpha)
    held, capacity = np.zeros(clients, dtype=np.int64), class_sizes.sum() / clients
    for size in class_sizes.tolist():
        if size == 0:
            rng.dirichlet(concentration)  # drawn as for any class, so that what follows doesn't depend on it
            continue
        # A Dirichlet vector with entries struck out and renormalised is Dirichlet on the rest. Drawing it there
        # can't meet the 0/0 of a small concentration whose whole mass lies on clients that are full.
        below = (held < capacity).nonzero()[0]
        owners.append(below[takers(size, rng.dirichlet(concentration[: len(below)]))])
        held += np.bincount(owners[-1], minlength=clients)
    return np.concatenate(owners)


def _uncapped_owners(class_sizes: IntArray, clients: int, dirichlet_alpha: float, rng: np.random.Generator) -> IntArray:
    """The client of every sample, (n,) int64, class by class."""
    concentration = np.full(clients, dirichlet_alpha)
    return np.concatenate([takers(size, rng.dirichlet(concentration)) for size in class_sizes.tolist()])


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


def _refuse_too_few(samples: int, clients: int, min_client_size: int) -> None:
    if clients * min_client_size > samples:
        raise FedbenchError(
            f"{clients} clients with at least {min_client_size} samples each need {clients * min_client_size}, but "
            f"there are {samples} training samples; lower clients or min_client_size"
        )
