"""The schedule of a round: which clients take part, and which faults they have. It depends only on seed and round, so
all methods get the same.

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
from fedbench.scenarios.partitions.parts import floor


@dataclass(frozen=True)
class Schedule:
    """The clients of one round by their role, each in ascending order."""

    chosen: tuple[int, ...]
    """Sampled clients, which are sent the model."""
    training: tuple[int, ...]
    """Sampled clients that train; the others drop out."""
    late: frozenset[int] = frozenset()
    """Clients that train but whose updates never arrive."""
    work: Mapping[int, float] = field(default_factory=dict)
    """The share of its local steps that a straggler completes, by client; only clients that train."""
    corrupt: frozenset[int] = frozenset()
    """Clients whose updates arrive damaged."""
    hostile: frozenset[int] = frozenset()
    """Clients that attack, whether they are sampled or not."""

    def among(self, able: Tensor) -> Schedule:
        """The schedule without clients that are not ``able`` (N,) bool to take part."""
        if bool(able.all()):
            return self
        keep = frozenset(torch.nonzero(able).flatten().tolist())
        return Schedule(
            tuple(client for client in self.chosen if client in keep),
            tuple(client for client in self.training if client in keep),
            self.late & keep,
            {client: work for client, work in self.work.items() if client in keep},
            self.corrupt & keep,
            self.hostile & keep,
        )


def schedule(round: int, clients: int, scenario: Scenario, seed: int) -> Schedule:
    """The schedule of ``round`` for ``clients`` clients; it is possible that no client trains, or no update arrives."""
    chosen = cohort(round, clients, scenario.participation, 0.0, seed)
    training = cohort(round, clients, scenario.participation, scenario.dropout, seed)

    def failing(purpose: str, probability: float) -> list[int]:
        if not probability:
            return []
        draws = _uniform(purpose, round, clients, seed)
        return [client for client in training if draws[client] < probability]

    late = frozenset(failing("late dropout", scenario.late_dropout))
    stragglers = failing("stragglers", scenario.stragglers)
    shares = _uniform("straggler work", round, clients, seed) if stragglers else np.zeros(0)
    least = scenario.straggler_work
    return Schedule(
        chosen=tuple(chosen),
        training=tuple(training),
        late=late,
        work={client: least + (1 - least) * float(shares[client]) for client in stragglers},
        corrupt=frozenset(failing("corrupt", scenario.corrupt)) - late,
        hostile=attackers(scenario.attackers, clients, seed),
    )


def cohort(round: int, clients: int, participation: float, dropout: float, seed: int) -> list[int]:
    """The clients of ``round``, ascending: m = max(⌊participation·N⌋, 1) without replacement, less those that drop out.

    Each sampled client drops out with probability ``dropout``, drawn apart from the sampling; nobody may be left.
    """
    sampled = list(_sampled(round, clients, participation, seed))
    if dropout == 0:
        return sampled
    draws = _uniform("dropout", round, clients, seed)
    return [client for client in sampled if draws[client] >= dropout]


@lru_cache(maxsize=8)
def attackers(share: float, clients: int, seed: int) -> frozenset[int]:
    """The clients that attack in all rounds: ``share`` of them, rounded, one at least; none for 0."""
    if not share:
        return frozenset()
    drawn = numpy_generator(seed, "attackers").permutation(clients)
    return frozenset(drawn[: max(round(share * clients), 1)].tolist())


def _uniform(purpose: str, round: int, clients: int, seed: int) -> NDArray[np.float64]:
    """A uniform number in [0, 1) for every client."""
    return numpy_generator(seed, purpose, round).random(clients)


@lru_cache(maxsize=2)
def _sampled(round: int, clients: int, participation: float, seed: int) -> tuple[int, ...]:
    """The cohort as drawn; cached, since a round needs it with and without those who drop out."""
    size = max(floor(participation * clients), 1)
    return tuple(sorted(numpy_generator(seed, "cohort", round).choice(clients, size=size, replace=False).tolist()))
