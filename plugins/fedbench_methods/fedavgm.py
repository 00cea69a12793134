"""FedAvgM - Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", arXiv 1909.06335, 2019.

The server takes the mean change of a round for a gradient and descends on it with momentum: from weights x and the
clients' y_k,
    Δ = x − Σ_k p_k y_k,    v ← β v + Δ,    x ← x − η_g v        (v = 0 before round 1)

Wraps: aggregate, whose answer takes the place of Σ p_k y_k. Stacks with any method but another server step. β = 0 with
η_g = 1 is FedAvg bit for bit. Nothing more is sent; the server keeps v, as large as the weights. Running statistics
have no velocity: the harness averages them (a released implementation counts them in when it takes its flat vector
apart, which shifts every later tensor).
Left open / contradicted: three forms of the momentum are in use, offered as `form`. `accumulating`, above, is the
paper's and the default; `ema` is v ← β v + (1 − β) Δ, whose steps are 1 − β times as long; `nesterov` steps by
Δ + β v with the accumulating v, as torch's SGD does. The paper tries β of 0, 0.7, 0.9, 0.97, 0.99 and 0.997. In the
long run a step is 1 / (1 − β) times as long as FedAvg's, so the clients' learning rate has to fall as β rises, or the
run diverges late. Default β = 0.7, the smallest of these above 0 and that of the FedNTD authors' baseline; others run
0.9, and the FedFA authors' "FedAvgM" 0.01, which is hardly any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedbench.api import AggregationTask, Method, hyper, wrapper
from fedbench.toolkit.wrapping import Aggregate, Aggregated, weights_of, with_weights

Form = Literal["accumulating", "ema", "nesterov"]


@dataclass(frozen=True, kw_only=True)
class FedAvgMParams:
    """Hyper-parameters of FedAvgM."""

    beta: float = hyper(
        0.7,
        symbol="β",
        low=0.0,
        high=0.999,
        neutral=0.0,
        search=(0.3, 0.99),
        source="the paper tries 0 and 0.7 to 0.997; 0.7 as in the FedNTD authors' baseline",
    )
    server_lr: float = hyper(
        1.0, symbol="η_g", low=0.01, high=10.0, log=True, neutral=1.0, search=(0.1, 1.0), source="paper: 1"
    )
    form: Form = hyper(
        "accumulating",
        symbol="form",
        needs="beta",
        source="accumulating: paper; ema: the MOON authors' code; nesterov: torch's SGD, in FL-bench",
    )


def next_velocity(velocity: Tensor, received: Tensor, mean: Tensor, beta: float, form: Form) -> Tensor:
    """v after a round from v before it, all of one shape; Δ = ``received`` − ``mean``."""
    fresh = 1 - beta if form == "ema" else 1.0
    return beta * velocity + fresh * (received - mean)


def moved(received: Tensor, mean: Tensor, velocity: Tensor, beta: float, server_lr: float, form: Form) -> Tensor:
    """x after a round, from x, Σ p_k y_k and the v *before* the round, all of one shape.

    The step is a Δ + b v: x − η_g (a Δ + b v) is x moved to the mean by the share η_g a, less η_g b v. So the mean
    itself comes back, to the last bit, where β = 0 and η_g = 1.
    """
    a, b = {"accumulating": (1.0, beta), "ema": (1 - beta, beta), "nesterov": (1 + beta, beta**2)}[form]
    return torch.lerp(received, mean, server_lr * a) - server_lr * b * velocity


class FedAvgM(Method[FedAvgMParams]):
    """Momentum on the server."""

    name = "fedavgm"
    citation = "Hsu, Qi, Brown, Effects of Non-Identical Data Distribution, arXiv 1909.06335, 2019"
    requires = ("global_model",)

    @wrapper
    def aggregate(self, task: AggregationTask, rest: Aggregate) -> Aggregated:
        """A step along the velocity; the velocity is kept for the next round."""
        beta, form, answer = self.params.beta, self.params.form, rest(task)
        means = weights_of(answer)
        before = task.state.get(self.name) or {name: torch.zeros_like(x) for name, x in task.weights.items()}
        task.state[self.name] = {
            name: next_velocity(before[name], x, means[name], beta, form) for name, x in task.weights.items()
        }
        lr = self.params.server_lr
        return with_weights(answer, {n: moved(x, means[n], before[n], beta, lr, form) for n, x in task.weights.items()})
