"""The order in which clients train one after another."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fedbench.core.randomness import torch_generator


def drawn_order(clients: Iterable[int], round: int, seed: int) -> list[int]:
    """``clients`` in an order drawn anew every round. Any two keep their order, whoever else takes part."""

    def drawn(client: int) -> float:
        return float(torch.rand((), generator=torch_generator(seed, "turns", round, client)))

    return sorted(clients, key=drawn)
