"""Partitions without a Dirichlet draw: iid, shards, and a fixed number of classes a client.

Each takes the training labels (n,) and a generator, and answers with the disjoint index arrays of the clients.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedbench.core.errors import FedbenchError
from fedbench.scenarios.partitions.parts import (
    Parts,
    deal_out,
    equal_parts,
    equal_sizes,
    joined,
    picked,
    shuffled_classes,
)
from fedbench.scenarios.partitions.rounding import IntArray

MAX_REDRAWS = 1000


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
