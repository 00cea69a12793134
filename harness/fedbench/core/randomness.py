"""Every random draw of a run comes from a child seed keyed by (seed, purpose, round, client).

So a client's batches depend neither on the order in which clients are trained nor on what other code drew before.
Nothing here draws from the global generators of Python, numpy and torch. A method from elsewhere may: for its sake
every round and evaluation has them seeded (`global_generators`), and afterwards they are as they were.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def global_generators(seed: int, purpose: str, *keys: int) -> Iterator[None]:
    """The global generators of Python, numpy and torch, seeded for one purpose; on leaving they are as they were.

    What a method draws from them in a round is then the same in a run that was resumed, and whatever ran before in this
    process. Not so where clients train side by side in threads (``cores`` above 1), who share these generators and draw
    in no fixed order: a method that is to give the same numbers there takes its draws from `torch_generator`.
    """
    words = [int(word) for word in seed_sequence(seed, purpose, *keys).generate_state(3, np.uint32)]
    is_in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = list(range(torch.cuda.device_count())) if is_in_use else []
    python, legacy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            random.seed(words[0])
            np.random.seed(words[1])
            # torch.manual_seed would queue a call for every round on a machine whose accelerator is not in use
            torch.default_generator.manual_seed(words[2])
            if devices:
                torch.cuda.manual_seed_all(words[2])
            yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)
