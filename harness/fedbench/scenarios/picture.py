"""A partition in numbers: how many samples of which class every client holds, and how skewed that is.

The measures read a count matrix, (clients, classes) int64, and nothing else. Every client must hold a sample.

    effective classes  exp(-sum_c p_c ln p_c)          p: the client's class shares; 1 for one class, C for equal shares
    divergence         JS(p, g) = KL(p | m) / 2 + KL(g | m) / 2,   m = (p + g) / 2, logarithms to base 2

g is the class distribution of all clients together. The divergence is 0 for a client like the whole and below 1 for
every other, since g holds what the client holds: two clients of equal size without a common class have 0.311 each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.spatial.distance import jensenshannon
from scipy.special import entr

from fedbench.core.errors import FedbenchError
from fedbench.core.federation import ClientShard, Federation
from fedbench.scenarios.partitions.parts import IntArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ClientPicture:
    """The samples of one client."""

    id: int
    counts: tuple[int, ...]
    """The number of training samples by class."""
    effective_classes: float
    divergence: float
    """Jensen-Shannon divergence (base 2) from the class distribution of all clients together."""
    domains: tuple[str, ...] = ()
    """Domains of its training samples, in the data set's order; empty for data without domains."""
    test_samples: int | None = None
    """The number of its test samples; None if clients share one test split."""
    validation_samples: int | None = None

    @property
    def samples(self) -> int:
        """The number of training samples."""
        return sum(self.counts)

    @property
    def classes_held(self) -> int:
        """Classes of which the client holds a sample."""
        return sum(count > 0 for count in self.counts)

    @property
    def largest_share(self) -> float:
        """Share of the client's most frequent class, in 0..1."""
        return max(self.counts) / self.samples


@dataclass(frozen=True)
class PartitionPicture:
    """The samples of all clients, for training and measuring."""

    clients: tuple[ClientPicture, ...]
    classnames: tuple[str, ...]
    test_samples: int
    domain_names: tuple[str, ...] = ()
    held_out_domain: str | None = None
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Class indices by reporting group; empty where the scenario has none."""
    validation_samples: int | None = None
    """The number of validation samples; None if the scenario has no validation split."""
    labels_visible: bool = True
    names: tuple[str, ...] = ()
    """The clients' names; empty if they have none."""
    new_clients: int = 0
    """The number of clients that never train; they are not in ``clients``."""
    drift: tuple[float, ...] = ()
    """The drift of every later stretch of the run: mean over clients of the Jensen-Shannon divergence (base 2) of their
    classes from the first stretch. Empty if the data do not drift."""

    def name_of(self, client: ClientPicture) -> str:
        """The client's name, else its number."""
        return self.names[client.id] if self.names else str(client.id)

    @cached_property
    def counts(self) -> IntArray:
        """Training samples, (clients, classes) int64."""
        return np.array([client.counts for client in self.clients], dtype=np.int64)

    @property
    def class_counts(self) -> tuple[int, ...]:
        """Training samples by class over all clients."""
        return tuple(self.counts.sum(axis=0).tolist())

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of training samples by client."""
        return tuple(self.counts.sum(axis=1).tolist())

    @property
    def samples(self) -> int:
        """Training samples of all clients."""
        return sum(self.sizes)

    @property
    def imbalance_factor(self) -> float:
        """Largest over smallest class count, see ``imbalance_factor``."""
        return imbalance_factor(self.counts)

    @property
    def mean_divergence(self) -> float:
        """Mean divergence of the clients, weighted by their samples."""
        return float(np.average([client.divergence for client in self.clients], weights=self.sizes))

    @property
    def by_divergence(self) -> tuple[ClientPicture, ...]:
        """The clients from the most to the least skewed; ties are in the order of ids."""
        return tuple(sorted(self.clients, key=lambda client: -client.divergence))


def picture_of(federation: Federation) -> PartitionPicture:
    """The picture of a federation's clients. FedbenchError where a client holds no sample."""
    _refuse_empty(federation.shards.sizes.numpy())
    held_out, table = federation.held_out_domain, federation.class_table
    together = table.totals().numpy()
    return PartitionPicture(
        clients=tuple(client for span in table.blocks() for client in _clients(federation, together, *span)),
        classnames=federation.classnames,
        test_samples=len(federation.test),
        domain_names=federation.domain_names,
        held_out_domain=None if held_out is None else federation.domain_names[held_out],
        groups=federation.groups,
        validation_samples=None if federation.validation is None else len(federation.validation),
        labels_visible=federation.labels_visible,
        names=federation.client_names,
        new_clients=len(federation.new_clients),
        drift=tuple(_drift(federation)),
    )


def _drift(federation: Federation) -> Iterator[float]:
    first, rounds = federation.class_table.rows(0, len(federation.clients)).numpy(), 1 + len(federation.later)
    for number in range(2, rounds + 1):
        then = federation.in_round(number, rounds).class_table.rows(0, len(federation.clients)).numpy()
        there = then.sum(axis=1) > 0
        divergence = np.square(jensenshannon(_shares(first[there]), _shares(then[there]), base=2, axis=1))
        yield float(divergence.mean()) if there.any() else math.nan


def _clients(federation: Federation, together: IntArray, first: int, last: int) -> Iterator[ClientPicture]:
    """The clients from ``first`` up to ``last``; ``together`` (C,) are the samples by class of all clients."""
    counts = federation.class_table.rows(first, last).numpy()
    measures = zip(counts, effective_classes(counts), divergences(counts, together), strict=True)
    for position, (row, effective, divergence) in enumerate(measures, start=first):
        shard = federation.clients[position]
        yield ClientPicture(
            id=shard.id,
            counts=tuple(row.tolist()),
            effective_classes=float(effective),
            divergence=float(divergence),
            domains=_domains(federation, shard),
            test_samples=None if shard.test_indices is None else len(shard.test_indices),
            validation_samples=None if shard.validation_indices is None else len(shard.validation_indices),
        )


def effective_classes(counts: IntArray) -> Floats:
    """exp of the entropy of every client's class shares, (clients,), in 1..C."""
    effective: Floats = np.exp(entr(_shares(counts)).sum(axis=1))
    return effective


def divergences(counts: IntArray, together: IntArray | None = None) -> Floats:
    """Jensen-Shannon divergence (base 2) of every client's class shares from those of all clients, (clients,).

    ``together`` (C,) are the samples by class of all clients, where ``counts`` are those of some.
    """
    shares = _shares(counts)
    whole = np.broadcast_to(_shares((counts.sum(axis=0) if together is None else together)[None]), shares.shape)
    # scipy gives the distance, the root of the divergence, which rounding may make a little less than zero
    with np.errstate(invalid="ignore"):
        divergence: Floats = np.square(jensenshannon(shares, whole, base=2, axis=1))
    return np.nan_to_num(divergence)


def imbalance_factor(counts: IntArray) -> float:
    """Largest over smallest class count of all clients together; infinite where nobody holds a class."""
    totals = counts.sum(axis=0)
    return float(totals.max() / totals.min()) if totals.min() else math.inf


def binned(counts: IntArray, bins: int) -> IntArray:
    """Sum ``counts`` (..., classes) over neighbouring classes into at most ``bins`` bins of equal width.

    The last bin may be narrower; with as many bins as classes the counts are unchanged.
    """
    width = class_bin(counts.shape[-1], bins)
    sums: IntArray = np.add.reduceat(counts, np.arange(0, counts.shape[-1], width), axis=-1)
    return sums


def class_bin(classes: int, bins: int) -> int:
    """The number of neighbouring classes in a bin if ``classes`` go into at most ``bins``."""
    return -(-classes // bins)


def _shares(counts: IntArray) -> Floats:
    sizes = counts.sum(axis=1, keepdims=True)
    _refuse_empty(sizes)
    shares: Floats = counts / sizes
    return shares


def _refuse_empty(sizes: IntArray) -> None:
    if not sizes.all():
        raise FedbenchError(
            f"client {int(sizes.argmin())} holds no sample, so it has no class shares to picture; "
            "every client needs a sample, lower the number of clients."
        )


def _domains(federation: Federation, shard: ClientShard) -> tuple[str, ...]:
    if federation.train.domains is None or not federation.domain_names:
        return ()
    present = torch.unique(federation.train.domains[shard.indices])
    return tuple(federation.domain_names[domain] for domain in present.tolist())
