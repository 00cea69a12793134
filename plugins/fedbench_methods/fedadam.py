"""FedAdam - Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive Federated Optimization",
ICLR 2021 (Algorithm 2).

The server takes the mean change of a round, Δ = Σ_k p_k y_k − x, for a gradient and steps by Adam:
    m ← β₁ m + (1 − β₁) Δ,    v ← β₂ v + (1 − β₂) Δ²,    x ← x + η_g m / (√v + τ)      (m = 0, v = τ² before round 1)

Wraps: aggregate, whose answer takes the place of Σ p_k y_k. Stacks with any method but another server step.
Nothing more is sent; the server keeps m and v. Running statistics are averaged. As τ grows with η_g = 2 τ and β₂ is
near 1, it becomes `fedavgm` with form=ema.
Left open / contradicted: there is no bias correction in the paper, and none here; the FedExP authors' code divides by
round 1's for ever and has τ inside the root. v starts at 0 in some code; the paper wants τ² at least. Where |Δ| is far
above τ a coordinate moves by about η_g whatever Δ is, so η_g = 1 is far too large; tune it with the clients' rate.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedbench.api import AggregationTask, Method, wrapper
from fedbench.toolkit.wrapping import Aggregate, Aggregated
from fedbench_methods.shared import adaptive_step as server


@dataclass(frozen=True, kw_only=True)
class FedAdamParams:
    """Hyper-parameters of FedAdam."""

    server_lr: float = server.server_lr_field()
    beta1: float = server.beta1_field(0.9, "paper")
    beta2: float = server.beta2_field()
    tau: float = server.tau_field()


def next_scale(v: Tensor, change: Tensor, beta2: float) -> Tensor:
    """v ← β₂ v + (1 − β₂) Δ², all of one shape."""
    return beta2 * v + (1 - beta2) * change.square()


class FedAdam(Method[FedAdamParams]):
    """Adam on the server."""

    name = "fedadam"
    citation = "Reddi et al., Adaptive Federated Optimization, ICLR 2021"
    requires = ("global_model",)

    @wrapper
    def aggregate(self, task: AggregationTask, rest: Aggregate) -> Aggregated:
        """A step of Adam along the mean change."""
        p = self.params

        def scale(v: Tensor, change: Tensor) -> Tensor:
            return next_scale(v, change, p.beta2)

        return server.adapted(task, rest(task), self.name, scale, server_lr=p.server_lr, beta1=p.beta1, tau=p.tau)
