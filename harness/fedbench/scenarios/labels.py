"""Classes and labels of a scenario: long tails, few shots, unseen classes, hidden and wrong labels.

Long tails thin class counts exponentially, as in the CReFF, CLIP2FL and CAPT protocols:

    n_c = floor(n_max * IF^(-c / (C - 1))),   c = 0 .. C-1, class 0 the biggest

``n_max`` is the smallest class count of the full data (n/C where it is balanced, as CIFAR is), so that every class can
fill its place. Test and validation splits stay as they are.

Few shots are k samples of every class (CoOp, Zhou et al., IJCV 2022, section 4.1: 1, 2, 4, 8 and 16 shots). Unseen
classes, the last of a data set, are left out of everything but a test of their own: in the base-to-new split of CoOp
and CoCoOp (CVPR 2022) the first ceil(K / 2) classes in label order are trained on, the others tested only, each half
among its own names. FedTPG (Qiu et al., ICLR 2024) splits alike.

A draw of hidden or wrong labels takes one number for every sample or client, whatever the rates: a higher rate keeps
the same labels wrong and adds further ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from fedbench.core.errors import FedbenchError
from fedbench.core.federation import Dataset, Federation, Split
from fedbench.core.randomness import numpy_generator
from fedbench.core.scenario import LABEL_FLIP, Scenario
from fedbench.kinds.kinds import ClientSamples
from fedbench.scenarios.participation import attackers
from fedbench.scenarios.partitions.feature_skew import pooled
from fedbench.scenarios.partitions.parts import IntArray, floor

FEWEST_BASE = 2
MISSING = -1
"""Stands for a label that a client does not have."""


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


def of_federation(kept: IntArray, labels: IntArray, scenario: Scenario, seed: int) -> IntArray:
    """The federation's shots among the training samples ``kept``; all of them if shots are of clients."""
    return few_shots([kept], labels, scenario, seed)[0] if scenario.shots_of == "federation" else kept


def of_clients(samples: ClientSamples, labels: IntArray, scenario: Scenario, seed: int) -> ClientSamples:
    """``samples`` reduced to each client's shots, in every stretch; unchanged if shots are of the federation."""
    if scenario.shots_of == "federation":
        return samples
    later = tuple(few_shots(part, labels, scenario, seed) for part in samples.later)
    return replace(samples, train=few_shots(samples.train, labels, scenario, seed), later=later)


def few_shots(parts: Sequence[IntArray], labels: IntArray, scenario: Scenario, seed: int) -> list[IntArray]:
    """At most ``shots`` of every class from each of ``parts``, indices into ``labels`` (n,); unchanged if shots is 0.

    One order of all n samples decides, so that fewer shots are a subset of more.
    """
    if not scenario.shots:
        return list(parts)
    position = numpy_generator(seed, "shots").permutation(len(labels))
    return [_first_of_class(part, labels, position, scenario.shots) for part in parts]


def _first_of_class(part: IntArray, labels: IntArray, position: IntArray, shots: int) -> IntArray:
    own = part[np.lexsort((position[part], labels[part]))]
    classes = labels[own]
    rank = np.arange(len(own)) - np.searchsorted(classes, classes)
    return np.sort(own[rank < shots])


def unseen_count(classes: int, share: float) -> int:
    """The number of unseen classes: ``share`` of ``classes``, rounded, halves down, but at least one; 0 for 0.

    FedbenchError if fewer than two classes would be left to train on.
    """
    if not share:
        return 0
    # K - ceil(K / 2) for one half: an odd number of classes has one more base class, as in CoOp's code
    count = max(-floor(0.5 - share * classes), 1)
    if classes - count < FEWEST_BASE:
        raise FedbenchError(
            f"unseen_classes={share:g} leaves {classes - count} of {classes} classes to train on, and "
            f"{FEWEST_BASE} are the fewest; set it lower."
        )
    return count


def by_class(dataset: Dataset, scenario: Scenario) -> tuple[Dataset, Dataset | None]:
    """The data sets of base classes and of unseen classes, whose labels count from 0; all and None if none are unseen.

    Both select from the same images, so that features are computed and kept once.
    """
    count = unseen_count(len(dataset.classnames), scenario.unseen_classes)
    if not count:
        return dataset, None
    if scenario.holdout_domain is not None and dataset.test is not None:
        # pooled as `cut_by_domain` would pool each part, but from one source of images
        dataset = replace(dataset, train=pooled(dataset.train, dataset.test), test=None)
    base = len(dataset.classnames) - count
    return _of_classes(dataset, 0, base), _of_classes(dataset, base, len(dataset.classnames))


def require_tested(unseen: Split, names: tuple[str, ...]) -> None:
    """Raise FedbenchError where there is no sample to test the unseen classes on."""
    if not len(unseen):
        raise FedbenchError(
            f"the test split has no sample of the unseen classes {', '.join(names)}; set unseen_classes=0."
        )


def _of_classes(dataset: Dataset, first: int, end: int) -> Dataset:
    """The data set restricted to the classes from ``first`` up to ``end``."""
    return replace(
        dataset,
        classnames=dataset.classnames[first:end],
        train=_split(dataset.train, first, end),
        test=None if dataset.test is None else _split(dataset.test, first, end),
        list_groups=_groups_left(dataset.list_groups, first, end),
    )


def _split(split: Split, first: int, end: int) -> Split:
    chosen = split.select(torch.nonzero((split.labels >= first) & (split.labels < end)).flatten())
    return replace(chosen, labels=chosen.labels - first)


def _groups_left(groups: Mapping[str, tuple[int, ...]], first: int, end: int) -> dict[str, tuple[int, ...]]:
    """The data set's own reporting groups; groups without classes are left out."""
    left = {name: tuple(c - first for c in classes if first <= c < end) for name, classes in groups.items()}
    return {name: classes for name, classes in left.items() if classes}


def as_clients_see_it(federation: Federation, scenario: Scenario, seed: int) -> Federation:
    """``federation`` with the labels that its clients have, `MISSING` where they have none.

    The result does not contain the true labels; scoring uses the original. It is ``federation`` itself if all labels
    are right, or hidden. ``scenario.partition_seed``, if set, replaces ``seed``, but for who attacks. FedbenchError
    where attackers flip labels that are hidden.
    """
    is_whole = scenario.labelled_clients == scenario.labelled_samples == 1
    flips = bool(scenario.attackers) and scenario.attack == LABEL_FLIP
    if flips and not federation.labels_visible:
        raise FedbenchError(f"attack={LABEL_FLIP} flips labels, which labels=hidden hides; choose another attack.")
    if not federation.labels_visible or (is_whole and not scenario.label_noise and not flips):
        return federation
    own_seed = seed
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
    if flips:
        hostile = attackers(scenario.attackers, len(federation.shards), own_seed)
        seen = np.where(np.isin(owner, list(hostile)), federation.num_classes - 1 - seen, seen)
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
