"""The server's step with a learning rate of every coordinate's own, which FedAdam, FedYogi and FedAdagrad share.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive Federated Optimization", ICLR 2021, Alg. 2.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedbench.api import AggregationTask, hyper
from fedbench.toolkit.wrapping import Aggregated, weights_of, with_weights

MOMENTUM, SCALE = "m/", "v/"

NextScale = Callable[[Tensor, Tensor], Tensor]
"""v after a round from v before it and Δ, all of one shape."""


def server_lr_field() -> float:
    """The hyper-parameter η_g: about the largest move of a coordinate in a round, wherever |Δ| is far above τ."""
    return hyper(
        0.01,
        symbol="η_g",
        low=1e-4,
        high=10.0,
        log=True,
        search=(1e-3, 1.0),
        source="the paper tunes it for every task; 0.01 as in Flower's FedYogi; FL-bench 0.1",
    )


def beta1_field(default: float, source: str) -> float:
    """The hyper-parameter β₁ of the momentum."""
    return hyper(default, symbol="β₁", low=0.0, high=0.999, search=False, source=source)


def beta2_field() -> float:
    """The hyper-parameter β₂ of the scale."""
    return hyper(0.99, symbol="β₂", low=0.0, high=0.9999, search=False, source="paper; FL-bench 0.999")


def tau_field() -> float:
    """The hyper-parameter τ."""
    return hyper(
        1e-3, symbol="τ", low=1e-9, high=1e3, log=True, search=(1e-5, 1e-1), source="paper; Flower's FedAdam 1e-9"
    )


def adapted(
    task: AggregationTask,
    answer: Aggregated,
    name: str,
    next_scale: NextScale,
    *,
    server_lr: float,
    beta1: float,
    tau: float,
) -> Aggregated:
    """``answer`` with x + η_g m / (√v + τ) in place of its weights; m and v are kept in the server's state ``name``.

    Δ is the answer's weights less x; m ← β₁ m + (1 − β₁) Δ from 0, v by ``next_scale`` from τ², as large as x each. No
    bias correction. Running statistics are the answer's.
    """
    means, kept = weights_of(answer), task.state.get(name, {})
    state, stepped = {}, {}
    for weight, x in task.weights.items():
        change = means[weight] - x
        m = beta1 * kept.get(MOMENTUM + weight, torch.zeros_like(x)) + (1 - beta1) * change
        v = next_scale(kept.get(SCALE + weight, torch.full_like(x, tau**2)), change)
        state[MOMENTUM + weight], state[SCALE + weight] = m, v
        stepped[weight] = x + server_lr * m / (v.sqrt() + tau)
    task.state[name] = state
    return with_weights(answer, stepped)
