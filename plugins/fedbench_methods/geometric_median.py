"""RFA - Pillutla, Kakade, Harchaoui, "Robust Aggregation for Federated Learning", IEEE Transactions on Signal
Processing 2022; arXiv 1912.13445.

The server takes the geometric median of the clients' y_k, weighted by p_k, by R steps of the smoothed Weiszfeld
algorithm (Algorithm 2) from the mean v = Σ p_k y_k:
    β_k = p_k / max(ν, ‖v − y_k‖),      v ← Σ β_k y_k / Σ β_k
of all weights together.

Wraps: aggregate, to whose rest every client has sent v. So it stacks with any learner and any server step. Running
statistics are averaged by the last β_k; what else clients send is as they sent it. Nothing more is sent (with secure
sums the paper's form takes R exchanges; these are not counted). R = 0 is FedAvg bit for bit.
Left open: p_k are of the run's `weighting`; ν = 1e-6 and R = 3, as in the paper's experiments.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedbench.api import AggregationTask, Method, Tensors, Update, hyper, wrapper
from fedbench.toolkit.fedavg import participant_shares, weighted_mean
from fedbench.toolkit.losses import squared_distance
from fedbench.toolkit.wrapping import Aggregate, Aggregated
from fedbench_methods.shared.robust import answer_to, by_coordinate


@dataclass(frozen=True, kw_only=True)
class GeometricMedianParams:
    """Hyper-parameters of RFA."""

    steps: int = hyper(3, symbol="R", low=1, high=1000, neutral=0, search=False, source="paper: 3")
    smoothing: float = hyper(
        1e-6, symbol="ν", low=1e-12, high=1.0, log=True, search=False, needs="steps", source="paper"
    )


def next_shares(shares: Tensor, centre: Tensors, updates: tuple[Update, ...], smoothing: float) -> Tensor:
    """β_k / Σ β_k (m,) from p_k ``shares`` and the ``centre`` v, float64."""
    away = torch.stack([squared_distance(centre, u.weights).double().sqrt().cpu() for u in updates])
    weights = shares / away.clamp_min(smoothing)
    return weights / weights.sum()


class GeometricMedian(Method[GeometricMedianParams]):
    """Takes the geometric median of the clients' weights for the mean."""

    name = "geometric-median"
    citation = "Pillutla, Kakade, Harchaoui, Robust Aggregation for Federated Learning, IEEE TSP 2022"
    role = "defence"
    requires = ("global_model", "sent_weights")
    prevents: tuple[str, ...] = ("weighed_clients", "own_updates")

    def __init__(self, params: GeometricMedianParams) -> None:
        super().__init__(params)
        self.prevents = self.prevents if params.steps else ()

    @wrapper
    def aggregate(self, task: AggregationTask, rest: Aggregate) -> Aggregated:
        """The stack's answer to the geometric median."""
        if not self.params.steps or not task.weights:
            return rest(task)
        updates, own = task.updates, participant_shares(task.updates, task.spec.training.weighting)

        def mean_by(shares: Tensor) -> tuple[Update, ...]:
            return by_coordinate(updates, lambda values: weighted_mean(list(values), shares))

        shares = own
        for _ in range(self.params.steps):
            shares = next_shares(own, mean_by(shares)[0].weights, updates, self.params.smoothing)
        return answer_to(mean_by(shares), task, rest)
