"""FedAdagrad - Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive Federated Optimization",
ICLR 2021 (Algorithm 2).

As `fedadam`, but v is the sum of all squares, so that steps only get shorter: with Δ = Σ_k p_k y_k − x,
    m ← β₁ m + (1 − β₁) Δ,    v ← v + Δ²,    x ← x + η_g m / (√v + τ)      (m = 0, v = τ² before round 1)

Wraps: aggregate, whose answer takes the place of Σ p_k y_k. Stacks with any method but another server step.
Nothing more is sent; the server keeps m and v. Running statistics are averaged. Adagrad has no momentum, so β₁ = 0 by
default; the algorithm has room for it. On the choice of η_g see `fedadam`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedbench.api import AggregationTask, Method, wrapper
from fedbench.toolkit.wrapping import Aggregate, Aggregated
from fedbench_methods.shared import adaptive_step as server


@dataclass(frozen=True, kw_only=True)
class FedAdagradParams:
    """Hyper-parameters of FedAdagrad."""

    server_lr: float = server.server_lr_field()
    beta1: float = server.beta1_field(0.0, "Adagrad's own; Flower's FedAdagrad")
    tau: float = server.tau_field()


def next_scale(v: Tensor, change: Tensor) -> Tensor:
    """v ← v + Δ², all of one shape."""
    return v + change.square()


class FedAdagrad(Method[FedAdagradParams]):
    """Adagrad on the server."""

    name = "fedadagrad"
    citation = "Reddi et al., Adaptive Federated Optimization, ICLR 2021"
    requires = ("global_model",)

    @wrapper
    def aggregate(self, task: AggregationTask, rest: Aggregate) -> Aggregated:
        """A step of Adagrad along the mean change."""
        p = self.params
        return server.adapted(task, rest(task), self.name, next_scale, server_lr=p.server_lr, beta1=p.beta1, tau=p.tau)
