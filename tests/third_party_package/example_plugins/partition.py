"""A partition: clients whose sizes fall by half from one to the next."""

from dataclasses import dataclass

import numpy as np

from fedbench.api import Partition, PartitionTask, hyper


@dataclass(frozen=True, kw_only=True)
class HalvingParams:
    """How fast sizes fall."""

    ratio: float = hyper(0.5, symbol="r", source="ours", low=0.01, high=1.0)


class Halving(Partition[HalvingParams]):
    """Client k has ratio^k of the first one's samples, drawn at random."""

    name = "example-halving"

    def clients(self, task: PartitionTask) -> list[np.ndarray]:
        """All samples are given out."""
        shares = self.params.ratio ** np.arange(task.scenario.clients)
        cuts = np.round(np.cumsum(shares / shares.sum()) * len(task.train)).astype(int)[:-1]
        return np.split(task.rng.permutation(len(task.train)), cuts)
