"""Clients made one: the bound that no federation has."""

from __future__ import annotations

import torch

from fedbench.core.federation import Federation
from fedbench.core.partition import ClientShard


def pooled(federation: Federation) -> Federation:
    """The same federation with all samples on client 0, in the order of client ids."""
    shards = federation.clients
    tests = [s.test_indices for s in shards if s.test_indices is not None]
    test = torch.cat(tests) if len(tests) == len(shards) else None
    return federation.with_clients((ClientShard(0, torch.cat([s.indices for s in shards]), test),))
