"""Few-shot training sets: k samples of every class, as in the protocols of CoOp and its successors (Zhou et al., IJCV
2022, section 4.1: 1, 2, 4, 8 and 16 shots)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedbench.core.randomness import numpy_generator
from fedbench.core.scenario import Scenario
from fedbench.kinds.kinds import ClientSamples
from fedbench.scenarios.partitions.rounding import IntArray


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
    place = numpy_generator(seed, "shots").permutation(len(labels))
    return [_first_of_class(part, labels, place, scenario.shots) for part in parts]


def _first_of_class(part: IntArray, labels: IntArray, place: IntArray, shots: int) -> IntArray:
    own = part[np.lexsort((place[part], labels[part]))]
    classes = labels[own]
    rank = np.arange(len(own)) - np.searchsorted(classes, classes)
    return np.sort(own[rank < shots])
