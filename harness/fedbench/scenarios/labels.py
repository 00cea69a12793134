"""The labels that clients have: all or a part of their samples' labels, some of them wrong.

A draw takes one number for every sample or client, whatever the rates: a higher rate keeps the same labels wrong and
adds further ones.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from fedbench.core.federation import Federation
from fedbench.core.randomness import numpy_generator
from fedbench.core.scenario import Scenario
from fedbench.scenarios.partitions.rounding import IntArray

MISSING = -1
"""Stands for a label that a client does not have."""


def as_clients_see_it(federation: Federation, scenario: Scenario, seed: int) -> Federation:
    """``federation`` with the labels that its clients have, `MISSING` where they have none.

    The result does not contain the true labels; scoring uses the original. It is ``federation`` itself if all labels
    are right, or hidden. ``scenario.partition_seed``, if set, replaces ``seed``.
    """
    is_whole = scenario.labelled_clients == scenario.labelled_samples == 1
    if not federation.labels_visible or (is_whole and not scenario.label_noise):
        return federation
    seed = seed if scenario.partition_seed is None else scenario.partition_seed
    stretches = (federation.shards, *federation.later)
    held = federation.held.numpy()
    labels = np.full(len(federation.train), MISSING)
    owner = np.concatenate([np.repeat(np.arange(len(shards)), shards.sizes.numpy()) for shards in stretches])
    if federation.later:
        # a client's samples of all stretches together
        order = np.argsort(owner, kind="stable")
        owner, held = owner[order], held[order]
    sizes = np.bincount(owner, minlength=len(federation.shards))
    seen = _noisy(federation.train.labels.numpy()[held], owner, federation.num_classes, scenario, seed)
    labels[held] = np.where(_labelled(sizes, owner, scenario, seed), seen, MISSING)
    return replace(federation, train=replace(federation.train, labels=torch.from_numpy(labels)))


def _noisy(labels: IntArray, owner: IntArray, classes: int, scenario: Scenario, seed: int) -> IntArray:
    """``labels`` (n,) with the scenario's noise; ``owner`` (n,) is the client of each sample."""
    clients = int(owner.max()) + 1
    by_client, by_sample = numpy_generator(seed, "noisy clients"), numpy_generator(seed, "label noise")
    rates = np.full(clients, scenario.label_noise)
    is_noisy = by_client.permutation(clients) < _share(scenario.noisy_clients, clients)
    draws = by_client.random(clients)
    if scenario.noise_rates == "drawn":
        rates = draws * rates
    is_wrong = by_sample.random(len(labels)) < np.where(is_noisy, rates, 0.0)[owner]
    # one to the last of the other classes, counted on from the right one
    away = 1 + by_sample.integers(max(classes - 1, 1), size=len(labels))
    if scenario.noise_kind == "pairwise":
        away = np.ones_like(away)
    return np.where(is_wrong, (labels + away) % classes, labels)


def _labelled(
    sizes: IntArray, owner: IntArray, scenario: Scenario, seed: int
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Whether a sample has a label, (n,) bool, client by client."""
    rng = numpy_generator(seed, "labelled")
    has_labels = rng.permutation(len(sizes)) < _share(scenario.labelled_clients, len(sizes))
    first = np.cumsum(sizes) - sizes
    # a client's samples in an order of its own: the place of each in it
    order = np.lexsort((rng.random(len(owner)), owner))
    place = np.empty(len(owner), dtype=np.int64)
    place[order] = np.arange(len(owner)) - first[owner]
    kept = np.array([_share(scenario.labelled_samples, int(size)) for size in sizes])
    return has_labels[owner] & (place < kept[owner])


def _share(of: float, whole: int) -> int:
    return max(round(of * whole), 1)
