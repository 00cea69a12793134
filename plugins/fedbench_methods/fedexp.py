"""FedExP - Jhunjhunwala, Wang, Joshi, "FedExP: Speeding Up Federated Averaging via Extrapolation", ICLR 2023.

Where clients' changes Δ_k = y_k − x cancel, the server goes further along their mean Δ = Σ_k p_k Δ_k:
    η_g = max(1, Σ_k p_k ‖Δ_k‖² / (2 (‖Δ‖² + ε))),    x ← x + η_g Δ
Predictions are by the mean of the last two iterates, (x^t + x^{t−1}) / 2; after round 1 by x¹.

Wraps: aggregate (whose answer is x + Δ), evaluate (global model only: a client's own weights are as they are). Stacks
with methods that change what clients do (the paper's `scaffold` and `fedprox` rows), not with another server step. The
weights p_k are the run's `weighting`; of a stack that weighs otherwise, Δ is that of its answer. Running statistics
are averaged, and those of the last round predict. Nothing more is sent; the server keeps one copy of the weights.
Left open / contradicted: ε is m ε in the released code, for a cohort of m (`epsilon_of=client`). There it falls every
round with the square of the clients' learning rate, as ‖Δ‖² does: so here, with the run's rate. The recorded metric
`fedexp_server_lr` is η_g.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedbench.api import AggregationTask, EvaluationTask, Method, Predictions, Tensors, Update, hyper, wrapper
from fedbench.toolkit.fedavg import participant_shares
from fedbench.toolkit.local_training import learning_rate
from fedbench.toolkit.losses import squared_distance
from fedbench.toolkit.wrapping import Aggregate, Aggregated, Evaluate, weights_of, with_weights


@dataclass(frozen=True, kw_only=True)
class FedExPParams:
    """Hyper-parameters of FedExP."""

    epsilon: float = hyper(
        1e-3, symbol="ε", low=1e-6, high=10.0, log=True, search=(1e-4, 0.1), source="released code: 0.001; EMNIST 0.1"
    )
    epsilon_of: Literal["cohort", "client"] = hyper(
        "cohort", symbol="ε or m ε", source="cohort: paper; client: released code"
    )


def squared_norms(received: Tensors, updates: tuple[Update, ...]) -> Tensor:
    """‖y_k − x‖² over all weights, (m,) float64."""
    return torch.stack([squared_distance(received, u.weights).double() for u in updates])


def step_size(changes: Tensor, shares: Tensor, mean_change: Tensor, epsilon: float) -> float:
    """η_g from ‖Δ_k‖² and p_k, (m,) each, and ‖Δ‖², a scalar, all float64."""
    return max(1.0, float((shares * changes).sum() / (2 * (mean_change + epsilon))))


class FedExP(Method[FedExPParams]):
    """Extrapolates along the mean change."""

    name = "fedexp"
    citation = "Jhunjhunwala, Wang, Joshi, FedExP: Speeding Up Federated Averaging via Extrapolation, ICLR 2023"
    requires = ("global_model", "own_updates")

    @wrapper
    def aggregate(self, task: AggregationTask, rest: Aggregate) -> Aggregated:
        """A step η_g times as long; the iterate before it is kept."""
        answer = rest(task)
        means = weights_of(answer)
        if not task.weights:
            return answer
        training = task.spec.training
        epsilon = self.params.epsilon * (learning_rate(training, task.round) / training.lr) ** 2
        epsilon *= len(task.updates) if self.params.epsilon_of == "client" else 1
        shares = participant_shares(task.updates, training.weighting)
        changes = squared_norms(task.weights, task.updates)
        rate = step_size(changes, shares.to(changes.device), squared_distance(task.weights, means).double(), epsilon)
        task.metrics["fedexp_server_lr"] = rate
        if task.round > 1 or task.exchange:
            task.state[self.name] = dict(task.weights)
        return with_weights(answer, {name: torch.lerp(x, means[name], rate) for name, x in task.weights.items()})

    @wrapper
    def evaluate(self, task: EvaluationTask, rest: Evaluate) -> Predictions:
        """The stack's predictions at the mean of the last two iterates."""
        before = task.state.get(self.name, {})
        if task.client is not None or not before:
            return rest(task)
        weights = {n: torch.lerp(before[n], x, 0.5) if n in before else x for n, x in task.weights.items()}
        return rest(replace(task, weights=weights))
