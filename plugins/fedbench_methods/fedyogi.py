"""FedYogi - Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive Federated Optimization",
ICLR 2021 (Algorithm 2).

As `fedadam`, but v moves by at most (1 − β₂) Δ², so that it forgets large changes slowly: with Δ = Σ_k p_k y_k − x,
    m ← β₁ m + (1 − β₁) Δ,    v ← v − (1 − β₂) Δ² sign(v − Δ²),    x ← x + η_g m / (√v + τ)
    (m = 0, v = τ² before round 1)

Wraps: aggregate, whose answer takes the place of Σ p_k y_k. Stacks with any method but another server step.
Nothing more is sent; the server keeps m and v. Running statistics are averaged. No bias correction. v stays at or
above 0: it falls by (1 − β₂) Δ² only where it is above Δ². On the choice of η_g see `fedadam`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedbench.api import AggregationTask, Method, wrapper
from fedbench.toolkit.wrapping import Aggregate, Aggregated
from fedbench_methods.shared import adaptive_step as server


@dataclass(frozen=True, kw_only=True)
class FedYogiParams:
    """Hyper-parameters of FedYogi."""

    server_lr: float = server.server_lr_field()
    beta1: float = server.beta1_field(0.9, "paper")
    beta2: float = server.beta2_field()
    tau: float = server.tau_field()


def next_scale(v: Tensor, change: Tensor, beta2: float) -> Tensor:
    """v ← v − (1 − β₂) Δ² sign(v − Δ²), all of one shape."""
    square = change.square()
    return v - (1 - beta2) * square * (v - square).sign()


class FedYogi(Method[FedYogiParams]):
    """Yogi on the server."""

    name = "fedyogi"
    citation = "Reddi et al., Adaptive Federated Optimization, ICLR 2021"
    requires = ("global_model",)

    @wrapper
    def aggregate(self, task: AggregationTask, rest: Aggregate) -> Aggregated:
        """A step of Yogi along the mean change."""
        p = self.params

        def scale(v: Tensor, change: Tensor) -> Tensor:
            return next_scale(v, change, p.beta2)

        return server.adapted(task, rest(task), self.name, scale, server_lr=p.server_lr, beta1=p.beta1, tau=p.tau)
