"""Coordinate-wise median - Yin, Chen, Ramchandran, Bartlett, "Byzantine-Robust Distributed Learning", ICML 2018.

The server takes  w[j] <- median_k w_k[j]  for every coordinate j (Option I of their Algorithm 1).

Answers: aggregate. Stacks with any method that does not aggregate otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedbench.api import AggregationTask, Tensors, hookimpl


@dataclass(frozen=True, kw_only=True)
class FedMedianParams:
    """The median has no hyper-parameter."""


class FedMedian:
    """Aggregates by the coordinate-wise median."""

    name: ClassVar[str] = "example-median"
    citation: ClassVar[str] = "Yin et al., Byzantine-Robust Distributed Learning, ICML 2018"
    Params: ClassVar[type] = FedMedianParams
    recipe: ClassVar[Mapping[str, object]] = {}

    def __init__(self, params: FedMedianParams) -> None:
        self.params = params

    @hookimpl
    def aggregate(self, task: AggregationTask) -> Tensors:
        """The coordinate-wise median of the clients' weights."""
        stacked = {name: torch.stack([u.weights[name] for u in task.updates]) for name in task.weights}
        return {name: tensors.quantile(0.5, dim=0) for name, tensors in stacked.items()}
