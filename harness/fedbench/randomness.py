"""Every random draw of a run comes from a child seed keyed by (seed, purpose, round, client).

So a client's batches depend neither on the order in which clients are trained nor on what other code drew before,
and the global generators of numpy and torch are never touched.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch


def seed_sequence(seed: int, purpose: str, *keys: int) -> np.random.SeedSequence:
    """The child seed for one purpose ("partition", "cohort", "batches", ...) and its round / client keys (all >= 0)."""
    return np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), *keys])


def numpy_generator(seed: int, purpose: str, *keys: int) -> np.random.Generator:
    """A numpy generator of its own for one purpose."""
    return np.random.default_rng(seed_sequence(seed, purpose, *keys))


def torch_generator(seed: int, purpose: str, *keys: int) -> torch.Generator:
    """A torch generator of its own for one purpose; on the CPU, so that every device sees the same numbers."""
    state = seed_sequence(seed, purpose, *keys).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state) & 0x7FFF_FFFF_FFFF_FFFF)
