"""Label skew: Dirichlet draws in four versions, shards, a fixed number of classes a client; and iid.

Papers call the four Dirichlet versions by the same name. The same concentration means another skew in each, so results
say which one was used. Each function takes the training labels (n,) and a generator, and answers with the disjoint
index arrays of the clients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fedbench.core.errors import FedbenchError
from fedbench.scenarios.partitions.parts import (
    IntArray,
    Parts,
    deal_out,
    equal_parts,
    equal_sizes,
    joined,
    picked,
    shuffled_classes,
    takers,
)

MAX_REDRAWS = 1000

VIRTUAL_WORKERS = 10
"""The number of workers that share one group of samples in CReFF's protocol."""
_MOST_SHARES = 300_000_000
"""The most shares drawn for a large federation (from 300,000 clients x classes on): about half a minute."""


def iid(labels: IntArray, clients: int, rng: np.random.Generator) -> Parts:
    """Permute and split: sizes differ by at most one, nothing is dropped (NIID-Bench, MOON)."""
    return equal_parts(rng.permutation(len(labels)), clients)


def shards_sorted(labels: IntArray, clients: int, shards_per_client: int, rng: np.random.Generator) -> Parts:
    """Sort by label, cut into N·s equal shards, give each client s at random (McMahan et al. 2017).

    Drops the last n mod N·s samples of the sorted order. A shard may straddle two classes.
    """
    shards = clients * shards_per_client
    if shards > len(labels):
        raise FedbenchError(
            f"partition 'shards' cannot cut {len(labels)} training samples into {clients} clients x "
            f"{shards_per_client} shards; lower clients or shards_per_client"
        )
    shuffled = rng.permutation(len(labels))  # so that the seed decides which samples of a class share a shard
    by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
    sizes = np.full(shards, len(labels) // shards)
    return picked(by_label, sizes, rng.permutation(shards), shards_per_client)


def shards_deck(labels: IntArray, clients: int, shards_per_client: int, rng: np.random.Generator) -> Parts:
    """Cut each class into R = N·s/C shards and deal a shuffled deck with R cards of every class, s a client (FedNTD).

    A client holds at most s labels, fewer when it gets one twice. Nothing is dropped.
    """
    copies = _copies("shards", "shards_per_client", clients, shards_per_client, len(np.unique(labels)))
    samples, class_sizes = shuffled_classes(labels, rng)
    sizes = np.concatenate([equal_sizes(size, copies) for size in class_sizes.tolist() if size])
    return picked(samples, sizes, rng.permutation(len(sizes)), shards_per_client)


def classes_round_robin(labels: IntArray, clients: int, classes_per_client: int, rng: np.random.Generator) -> Parts:
    """Client i holds class i mod C and other random classes; holders share a class equally (NIID-Bench, "#label k").

    Sizes are unequal. With fewer clients than classes the draw is repeated until every class has a holder.
    """
    classes = _enough_classes(labels, classes_per_client)
    for _ in range(MAX_REDRAWS if clients * classes_per_client >= len(classes) else 0):
        held = np.zeros((clients, len(classes)), dtype=bool)
        for client in range(clients):
            first = client % len(classes)
            others = rng.choice(len(classes) - 1, size=classes_per_client - 1, replace=False)
            held[client, first] = True
            held[client, others + (others >= first)] = True
        if held.any(axis=0).all():
            return _deal_to_holders(labels, held, rng)
    raise FedbenchError(
        f"classes_per_client={classes_per_client} with {clients} clients leaves some of the {len(classes)} classes "
        "without a client; raise clients or classes_per_client, or set class_scheme='equal'"
    )


def classes_equal(labels: IntArray, clients: int, classes_per_client: int, rng: np.random.Generator) -> Parts:
    """Every client holds exactly c classes, every class has N·c/C holders that share it equally (FedGLCL's setting).

    The hands are drawn client by client. A class with as many copies left as clients must be taken now, the others are
    drawn by copies left; so no hand has a duplicate and, unlike with a shuffled deck, none has to be drawn again.
    """
    classes = _enough_classes(labels, classes_per_client)
    copies = _copies("classes_per_client", "classes_per_client", clients, classes_per_client, len(classes))
    left = np.full(len(classes), copies)
    held = np.zeros((clients, len(classes)), dtype=bool)
    for served, client in enumerate(rng.permutation(clients)):
        must = np.flatnonzero(left == clients - served)
        may = np.where(left == clients - served, 0, left)
        if (free := classes_per_client - len(must)) > 0:
            held[client, rng.choice(len(classes), size=free, replace=False, p=may / may.sum())] = True
        held[client, must] = True
        left -= held[client]
    return _deal_to_holders(labels, held, rng)


def recut(parts: Sequence[IntArray]) -> Parts:
    """Cut the same samples in the same order again into as many slices of equal size, ±1 (CReFF)."""
    return equal_parts(joined(parts), len(parts))


def _enough_classes(labels: IntArray, classes_per_client: int) -> IntArray:
    classes = np.unique(labels)
    if classes_per_client > len(classes):
        raise FedbenchError(
            f"classes_per_client={classes_per_client} is more than the {len(classes)} classes of the training data; "
            f"set it to at most {len(classes)}"
        )
    return classes


def _copies(partition: str, field: str, clients: int, per_client: int, classes: int) -> int:
    copies, rest = divmod(clients * per_client, classes)
    if rest:
        raise FedbenchError(
            f"partition {partition!r} needs clients x {field} divisible by the {classes} classes, but {clients} x "
            f"{per_client} = {clients * per_client} is not; change clients or {field}"
        )
    return copies


def _deal_to_holders(labels: IntArray, held: np.ndarray, rng: np.random.Generator) -> Parts:
    """The samples of each class in equal parts to its holders, from ``held`` (clients, classes with samples) bool."""
    samples, class_sizes = shuffled_classes(labels, rng)
    owners = []
    for column, size in zip(held.T, class_sizes[class_sizes > 0].tolist(), strict=True):
        holders = np.flatnonzero(column)
        owners.append(np.repeat(holders, equal_sizes(size, len(holders))))
    return deal_out(samples, np.concatenate(owners), len(held))


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
