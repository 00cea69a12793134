"""The clients of a federation made one, or in the order in which they train one after another."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fedbench.api import ClientShard, Federation, torch_generator


def pooled(federation: Federation) -> Federation:
    """The same federation with all samples on client 0, in the order of client ids."""
    shards = federation.clients
    tests = [s.test_indices for s in shards if s.test_indices is not None]
    test = torch.cat(tests) if len(tests) == len(shards) else None
    return federation.with_clients((ClientShard(0, torch.cat([s.indices for s in shards]), test),))


def drawn_order(clients: Iterable[int], round: int, seed: int) -> list[int]:
    """``clients`` in an order drawn anew every round. Any two keep their order, whoever else takes part."""

    def drawn(client: int) -> float:
        return float(torch.rand((), generator=torch_generator(seed, "turns", round, client)))

    return sorted(clients, key=drawn)
