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
    """Of the training samples ``kept`` what the federation's shots are; all where they are of clients."""
    return few_shots([kept], labels, scenario, seed)[0] if scenario.shots_of == "federation" else kept


def of_clients(found: ClientSamples, labels: IntArray, scenario: Scenario, seed: int) -> ClientSamples:
    """``found`` with each client's shots, in every stretch; as it is where they are of the federation."""
    if scenario.shots_of == "federation":
        return found
    later = tuple(few_shots(part, labels, scenario, seed) for part in found.later)
    return replace(found, train=few_shots(found.train, labels, scenario, seed), later=later)


def few_shots(parts: Sequence[IntArray], labels: IntArray, scenario: Scenario, seed: int) -> list[IntArray]:
    """Of each of ``parts``, indices into ``labels`` (n,), at most ``shots`` of every class; themselves where it is 0.

    One order of all n samples decides, so that those of fewer shots are among those of more.
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
