"""Who takes part in a round, and what goes wrong with whom: a schedule of the seed and the round alone, so that every
method gets the same.

Each fault is drawn apart from the others and from the sampling, with one number for every client, sampled or not:
whether a client fails does not depend on who else takes part, nor on which other faults the scenario has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbench.core.randomness import numpy_generator
from fedbench.core.scenario import Scenario
from fedbench.scenarios.partitions.rounding import floor


@dataclass(frozen=True)
class Schedule:
    """The clients of one round by what they do in it, each ascending."""

    chosen: tuple[int, ...]
    """Sampled; they are sent the model."""
    training: tuple[int, ...]
    """Those of them that train; the others drop out."""
    late: frozenset[int] = frozenset()
    """Those who train but whose updates never arrive."""
    work: Mapping[int, float] = field(default_factory=dict)
    """By straggler among those who train, the share of its local steps that it gets done."""
    corrupt: frozenset[int] = frozenset()
    """Those whose updates arrive damaged."""

    def among(self, able: Tensor) -> Schedule:
        """The same without the clients that are not ``able`` (N,) bool to take part."""
        if bool(able.all()):
            return self
        keep = frozenset(torch.nonzero(able).flatten().tolist())
        return Schedule(
            tuple(client for client in self.chosen if client in keep),
            tuple(client for client in self.training if client in keep),
            self.late & keep,
            {client: work for client, work in self.work.items() if client in keep},
            self.corrupt & keep,
        )


def schedule(round: int, clients: int, scenario: Scenario, seed: int) -> Schedule:
    """Who takes part in ``round`` of ``clients``, and what goes wrong; perhaps nobody trains, or nothing arrives."""
    chosen = cohort(round, clients, scenario.participation, 0.0, seed)
    training = cohort(round, clients, scenario.participation, scenario.dropout, seed)

    def luckless(purpose: str, probability: float) -> list[int]:
        if not probability:
            return []
        luck = _luck(purpose, round, clients, seed)
        return [client for client in training if luck[client] < probability]

    late = frozenset(luckless("late dropout", scenario.late_dropout))
    stragglers = luckless("stragglers", scenario.stragglers)
    shares = _luck("straggler work", round, clients, seed) if stragglers else np.zeros(0)
    least = scenario.straggler_work
    return Schedule(
        chosen=tuple(chosen),
        training=tuple(training),
        late=late,
        work={client: least + (1 - least) * float(shares[client]) for client in stragglers},
        corrupt=frozenset(luckless("corrupt", scenario.corrupt)) - late,
    )


def cohort(round: int, clients: int, participation: float, dropout: float, seed: int) -> list[int]:
    """The clients of ``round``, ascending: m = max(⌊participation·N⌋, 1) without replacement, less those that drop out.

    Each sampled client drops out with probability ``dropout``, drawn apart from the sampling; nobody may be left.
    """
    sampled = list(_sampled(round, clients, participation, seed))
    if dropout == 0:
        return sampled
    luck = _luck("dropout", round, clients, seed)
    return [client for client in sampled if luck[client] >= dropout]


def _luck(purpose: str, round: int, clients: int, seed: int) -> NDArray[np.float64]:
    """A number in [0, 1) for every client."""
    return numpy_generator(seed, purpose, round).random(clients)


@lru_cache(maxsize=2)
def _sampled(round: int, clients: int, participation: float, seed: int) -> tuple[int, ...]:
    """The cohort as drawn; a round needs it twice, with those who drop out and without."""
    size = max(floor(participation * clients), 1)
    return tuple(sorted(numpy_generator(seed, "cohort", round).choice(clients, size=size, replace=False).tolist()))
