"""Checks of a partition's answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedbench.core.errors import FedbenchError
from fedbench.kinds.kinds import ClientSamples, PartitionTask
from fedbench.scenarios.partitions.parts import Parts, as_parts, joined
from fedbench.scenarios.partitions.rounding import IntArray


def refuse_malformed(answer: ClientSamples, name: str) -> None:
    """Raise FedbenchError for an answer that is no array of indices for each client, or names only some clients."""
    further = [parts for parts in (answer.test, answer.validation) if parts is not None]
    for parts in (answer.train, *further, *answer.later, *answer.later_test):
        shapes = () if isinstance(parts, Parts) else map(np.ndim, parts) if isinstance(parts, Sequence) else (0,)
        if any(shape != 1 for shape in shapes):
            raise FedbenchError(
                f"partition {name!r} gives what is no list of arrays (n_k,), one for each client, but a "
                f"{type(parts).__name__}."
            )
    if answer.names and (len(answer.names) != len(answer.train) or len(set(answer.names)) < len(answer.names)):
        raise FedbenchError(
            f"partition {name!r} gives {len(answer.names)} names, {len(set(answer.names))} of them different, to "
            f"{len(answer.train)} clients; it must give each a name of its own, or none any."
        )
    for what, measured in (("test", answer.test), ("validation", answer.validation)):
        if measured is not None and len(twice := _twice(measured)):
            raise FedbenchError(f"partition {name!r} gives a client the {what} sample {twice[0]} twice.")


def _twice(parts: Sequence[IntArray]) -> IntArray:
    """Samples that a client has more than once. A set shared by clients is checked once."""
    whole = as_parts(parts if isinstance(parts, Parts) else list({id(part): part for part in parts}.values()))
    owners, samples = np.repeat(np.arange(len(whole)), whole.sizes), whole.ascending()
    again: IntArray = samples[1:][(samples[1:] == samples[:-1]) & (owners[1:] == owners[:-1])]
    return again


def refuse_wrong(answer: ClientSamples, task: PartitionTask, name: str) -> None:
    """Raise FedbenchError for an answer with samples that do not exist, or one sample twice."""
    for what, split, parts in (
        ("training", task.train, answer.train),
        ("test", task.test, answer.test),
        ("validation", task.validation, answer.validation),
    ):
        if parts is None:
            continue
        if len(parts) != len(answer.train):
            raise FedbenchError(
                f"partition {name!r} gives {what} samples to {len(parts)} clients and training samples to "
                f"{len(answer.train)}; it must give every client its own."
            )
        flat = joined(parts) if len(parts) else np.zeros(0, dtype=np.int64)
        if flat.dtype != np.int64 or (len(flat) and not 0 <= flat.min() <= flat.max() < len(split or ())):
            raise FedbenchError(
                f"partition {name!r} gives {what} samples that there are not; it must give int64 indices from 0 to "
                f"{len(split or ()) - 1}."
            )
        if what == "training" and len(flat) and np.bincount(flat).max() > 1:
            raise FedbenchError(
                f"partition {name!r} gives the training sample {int(np.bincount(flat).argmax())} to several clients, "
                "or twice to one; it must give each to one client at most."
            )
