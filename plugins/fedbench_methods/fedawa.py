"""FedAWA - Shi, Zhao, Zhang, Zhou, Guo, Chang, "FedAWA: Adaptive Optimization of Aggregation Weights in Federated
Learning Using Client Vectors", CVPR 2025.

The server learns the weights of the mean without data, so that clients whose changes Δ_k = y_k − x agree with the mean
change, and whose models with x, weigh more. With a logit T_k of every client, kept from round to round,
    π = softmax(T) over the participants,    min_T  Σ_k π_k (1 − cos(x, y_k)) + Σ_k π_k ‖Δ_k − Σ_j π_j Δ_j‖
    x ← Σ_k π_k y_k
by a few steps of Adam a round; vectors are all weights of the model in one.

Answers: aggregate. Stacks with methods that change what clients do, and under any server step. T_k = log n_k + a_k with
a_k = 0 at first: no steps is FedAvg bit for bit. Nothing more is sent; the server keeps a_k, N floats. Running
statistics are averaged by the harness, by the run's weights.
Left open / contradicted:
- The released code starts at T_k = p_k, not log p_k, so that π is nearly uniform (`logits=shares`).
- It averages by the π from before the last step: what is learned counts a round later (`applied=before`).
- It keeps T by the position in the cohort, which under partial participation is another client's. Here by client.
- Adam starts anew every round, there and here: with one step a logit moves by about η_T, whatever its gradient is.
- The paper's variant by layers (FedAWA-L) is not here.
Distances below rounding (1e-6 of the longest change) count as zero, where all clients agree and no weight is better.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedbench.api import AggregationTask, Method, Tensors, hookimpl, hyper
from fedbench.toolkit.fedavg import average, participant_shares, weighted_mean

ROUNDING = 1e-12
"""Of squared distances, relative to the largest squared change."""


@dataclass(frozen=True, kw_only=True)
class FedAWAParams:
    """Hyper-parameters of FedAWA."""

    steps: int = hyper(
        1, symbol="E_s", low=1, high=1000, log=True, neutral=0, search=(1, 100), source="released code: 1"
    )
    lr: float = hyper(
        1e-3, symbol="η_T", low=1e-5, high=1.0, log=True, search=(1e-3, 0.1), needs="steps", source="released code"
    )
    logits: Literal["log", "shares"] = hyper("log", symbol="T⁰", neutral="log", source="shares: released code")
    applied: Literal["after", "before"] = hyper("after", symbol="π", source="before: released code")


def products(received: Tensors, trained: list[Tensors]) -> tuple[Tensor, Tensor]:
    """⟨Δ_j, Δ_k⟩ (m, m), and 1 − cos(x, y_k) (m,), over all weights in one; float64 on the CPU."""
    m, device = len(trained), next(iter(received.values())).device
    gram, dots = torch.zeros(m, m, device=device).double(), torch.zeros(m, device=device).double()
    squares, square = dots.clone(), dots.new_zeros(())
    for name, x in received.items():
        flat, rows = x.flatten().double(), torch.stack([y[name].flatten().double() for y in trained])
        changes = rows - flat
        gram, dots, squares = gram + changes @ changes.T, dots + rows @ flat, squares + rows.square().sum(1)
        square = square + flat.square().sum()
    away = 1 - dots / (squares.sqrt() * square.sqrt()).clamp_min(1e-12)
    return gram.cpu(), away.cpu()


def objective(weights: Tensor, gram: Tensor, away: Tensor) -> Tensor:
    """Σ π_k (1 − cos_k) + Σ π_k ‖Δ_k − Σ π_j Δ_j‖, a scalar, from π (m,) and the two of `products`."""
    mixed = gram @ weights
    squared = gram.diagonal() - 2 * mixed + weights @ mixed
    far = squared > ROUNDING * gram.diagonal().max()
    # the inner where keeps the derivative of the root finite at zero
    distance = torch.where(far, torch.where(far, squared, 1.0).sqrt(), 0.0)
    return (weights * away).sum() + (weights * distance).sum()


class FedAWA(Method[FedAWAParams]):
    """Learns the weights of the mean from the changes alone."""

    name = "fedawa"
    citation = "Shi et al., FedAWA: Adaptive Optimization of Aggregation Weights, CVPR 2025"
    requires = ("global_model", "own_updates")

    @hookimpl
    def aggregate(self, task: AggregationTask) -> Tensors:
        """The mean by π; a_k is kept."""
        params = self.params
        if not task.weights or (not params.steps and params.logits == "log"):
            return average(task)
        clients = torch.tensor([u.client for u in task.updates])
        kept = task.state.get(self.name, {}).get("learned", torch.zeros(task.num_clients, dtype=torch.float64)).cpu()
        shares = participant_shares(task.updates, task.spec.training.weighting)
        first = shares.log() if params.logits == "log" else shares
        gram, away = products(task.weights, [u.weights for u in task.updates])
        learned = kept[clients].clone().requires_grad_()
        optimiser = torch.optim.Adam([learned], lr=params.lr, betas=(0.5, 0.999))
        weights = before = torch.softmax(first + learned.detach(), 0)
        for _ in range(params.steps):
            before = weights
            optimiser.zero_grad(set_to_none=True)
            objective(torch.softmax(first + learned, 0), gram, away).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            weights = torch.softmax(first + learned.detach(), 0)
        task.state[self.name] = {"learned": kept.index_put((clients,), learned.detach())}
        used = before if params.applied == "before" else weights
        return {name: weighted_mean([u.weights[name] for u in task.updates], used) for name in task.weights}
