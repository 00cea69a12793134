"""Quantity skew: clients of unequal sizes, whose samples are drawn iid. Label and feature distributions stay alike."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedbench.core.errors import FedbenchError
from fedbench.core.method.hyper import hyper
from fedbench.kinds.kinds import Partition, PartitionTask
from fedbench.scenarios.partitions.label_skew import MAX_REDRAWS
from fedbench.scenarios.partitions.parts import Parts, deal_out
from fedbench.scenarios.partitions.rounding import takers


@dataclass(frozen=True, kw_only=True)
class LogNormalParams:
    """The skew of client sizes."""

    sigma: float = hyper(1.0, symbol="σ", source="FedLab (Zeng et al. 2023) has 0.3", low=0.0, high=5.0, search=False)


class LogNormal(Partition[LogNormalParams]):
    """Client sizes in proportion to exp(σ z), z standard normal; samples iid (min_client_size)."""

    name = "lognormal"

    def clients(self, task: PartitionTask) -> Parts:
        least = task.scenario.min_client_size
        for _ in range(MAX_REDRAWS):
            weights = np.exp(self.params.sigma * task.rng.standard_normal(task.scenario.clients))
            owners = takers(len(task.train), weights / weights.sum())
            if np.bincount(owners, minlength=len(weights)).min() >= least:
                return deal_out(task.rng.permutation(len(task.train)), owners, len(weights))
        raise FedbenchError(
            f"sigma={self.params.sigma:g} never gave each of {task.scenario.clients} clients at least {least} of "
            f"{len(task.train)} training samples in {MAX_REDRAWS} draws; lower sigma, clients or min_client_size."
        )


@dataclass(frozen=True, kw_only=True)
class PowerLawParams:
    """The skew of client sizes."""

    exponent: float = hyper(
        1.0, symbol="a", source="Li et al., FedProx (2020), have sizes by a power law", low=0.0, high=5.0, search=False
    )


class PowerLaw(Partition[PowerLawParams]):
    """Client sizes in proportion to k^-a, k = 1 .. N, in an order that is drawn; samples iid (min_client_size)."""

    name = "power_law"

    def clients(self, task: PartitionTask) -> Parts:
        count, least = task.scenario.clients, task.scenario.min_client_size
        weights: NDArray[np.float64] = task.rng.permutation(np.arange(1, count + 1) ** -float(self.params.exponent))
        owners = takers(len(task.train), weights / weights.sum())
        smallest = int(np.bincount(owners, minlength=count).min())
        if smallest < least:
            raise FedbenchError(
                f"exponent={self.params.exponent:g} gives the smallest of {count} clients {smallest} of "
                f"{len(task.train)} training samples, and min_client_size is {least}; lower one of the three."
            )
        return deal_out(task.rng.permutation(len(task.train)), owners, count)
