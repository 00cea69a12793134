"""Shards from a partition's answer: the clients' samples in every stretch of the run, and those they are measured
on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from fedbench.core.errors import FedbenchError
from fedbench.core.partition import Measured, Shards
from fedbench.core.randomness import numpy_generator
from fedbench.core.scenario import Scenario
from fedbench.core.wording import counted
from fedbench.kinds.kinds import ClientSamples
from fedbench.scenarios.partitions.parts import as_parts
from fedbench.scenarios.partitions.rounding import IntArray


def shards_of(answer: ClientSamples, scenario: Scenario, samples: int) -> Shards:
    """The clients' shards in the first stretch; FedbenchError if one has none of the ``samples`` training samples."""
    parts = as_parts(answer.train)
    sizes = torch.from_numpy(parts.sizes)
    empty = torch.nonzero(sizes == 0).flatten()
    if len(empty) or not len(parts):
        others = f" and {counted(len(empty) - 1, 'other')} of {len(parts)}" if len(empty) > 1 else f" of {len(parts)}"
        who = f"client {empty[0]}{others}" if len(empty) else "every client"
        raise FedbenchError(
            f"partition {scenario.partition!r} leaves {who} without a sample; {samples} training samples are too few, "
            "lower the number of clients"
        )
    # ascending: what a client holds is a set, and the order of its batches is drawn elsewhere
    indices = torch.from_numpy(parts.ascending())
    shards = Shards(indices, torch.from_numpy(parts.offsets), torch.arange(len(parts)))
    return _measured(shards, answer.test, answer.validation)


def _measured(shards: Shards, test: Sequence[IntArray] | None, validation: Sequence[IntArray] | None) -> Shards:
    """``shards`` with the samples that clients are measured on."""
    if test is None and validation is None:
        return replace(shards, measured=(Measured(),), measured_on=None)
    nothing = [None] * len(shards)
    pairs = list(zip(test or nothing, validation or nothing, strict=True))
    # what clients share is kept once
    number: dict[tuple[int, int], int] = {}
    which = [number.setdefault((id(test), id(validation)), len(number)) for test, validation in pairs]
    first = {place: pairs[position] for position, place in reversed(list(enumerate(which)))}
    measured = tuple(Measured(*map(_sorted, first[place])) for place in range(len(number)))
    return replace(shards, measured=measured, measured_on=torch.tensor(which))


def later_stretches(answer: ClientSamples, first: Shards) -> Iterator[Shards]:
    """The shards of the clients of ``first`` in each later stretch, in which some may be empty.

    FedbenchError if the number of clients changes.
    """
    for number, part in enumerate(answer.later):
        parts = as_parts(part)
        if len(parts) != len(first):
            raise FedbenchError(f"a partition gives {len(first)} clients first and {len(parts)} later; they must stay.")
        indices, offsets = torch.from_numpy(parts.ascending()), torch.from_numpy(parts.offsets)
        held = replace(first, indices=indices, offsets=offsets)
        yield _measured(held, answer.later_test[number], answer.validation) if answer.later_test else held


def without_held_out(shards: Shards, scenario: Scenario, seed: int) -> tuple[Shards, Shards | tuple[()], list[int]]:
    """The clients that train, the held-out clients, and the positions of both among ``shards``."""
    count = len(shards)
    if not scenario.holdout_clients:
        return shards, (), list(range(count))
    held = max(round(scenario.holdout_clients * count), 1)
    if held >= count:
        raise FedbenchError(
            f"holdout_clients={scenario.holdout_clients:g} leaves none of {count} clients to train; set it lower."
        )
    drawn = numpy_generator(seed, "holdout-clients").permutation(count)
    training, new = np.sort(drawn[held:]).tolist(), np.sort(drawn[:held]).tolist()
    return subset(shards, training, 0), subset(shards, new, len(training)), [*training, *new]


def subset(shards: Shards, places: Sequence[int], first: int) -> Shards:
    """The clients at ``places``, numbered from ``first`` on; ``shards`` itself if that is all of them."""
    if len(places) == len(shards):
        return shards
    return Shards.of([replace(shards[place], id=first + number) for number, place in enumerate(places)])


def _sorted(samples: IntArray | None) -> torch.Tensor | None:
    return None if samples is None else torch.from_numpy(np.sort(samples))
