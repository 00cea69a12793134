"""Who takes part in a round: a schedule that depends on the seed and the round alone, so every method gets the same."""

from __future__ import annotations

from functools import lru_cache

from fedbench.randomness import numpy_generator
from fedbench.scenarios.rounding import floor


def cohort(round: int, clients: int, participation: float, dropout: float, seed: int) -> list[int]:
    """The clients of ``round``, ascending: m = max(⌊participation·N⌋, 1) without replacement, less those that drop out.

    Each sampled client drops out with probability ``dropout``, drawn apart from the sampling; one always survives.
    """
    sampled = list(_sampled(round, clients, participation, seed))
    if dropout == 0:
        return sampled
    # one draw for every client, sampled or not: whether a client fails doesn't depend on who else was sampled
    luck = numpy_generator(seed, "dropout", round).random(clients)
    return [client for client in sampled if luck[client] >= dropout] or [max(sampled, key=lambda c: luck[c])]


@lru_cache(maxsize=2)
def _sampled(round: int, clients: int, participation: float, seed: int) -> tuple[int, ...]:
    """Those who are asked; a round wants to know it twice, with those who drop out and without."""
    size = max(floor(participation * clients), 1)
    return tuple(sorted(numpy_generator(seed, "cohort", round).choice(clients, size=size, replace=False).tolist()))
