"""CLIMB - Shen, Cervino, Hassani, Ribeiro, "An Agnostic Approach to Federated Learning with Class Imbalance", ICLR
2022.

No client's loss is to exceed the mean over clients by more than ε. With a dual variable λ_k for every client, zero at
first, and the loss L_k of the model that a round begins with on the client's data, which every client reports:
    w_k = 1 + λ_k − (1/N) Σ_j λ_j
    x ← x + Σ_{k∈S} p_k w_k (y_k − x)                                      (the round, by the λ before it)
    λ_k ← clip(λ_k + (η_λ / N) (L_k − (1/N) Σ_j L_j − ε), 0, λ_max)
p_k are the run's shares within the cohort; the paper counts clients alike (`weighting=uniform` of the run).

Answers: start, survey, report, reported. Wraps: aggregate, of whose answer it weights the clients. Stacks with any
learner that is trained on labels, with methods that change losses and with server steps. Classes play no part.
Left open / contradicted: the released code's default ε is 1; then λ stays 0, and this is FedAvg, until some client's
loss lies 1 above the mean. Here it is 0.01. w_k can fall below zero where the mean λ exceeds 1; the code goes on with
that, here it counts as 0. λ_max is 100 in the code, 5 in an earlier state of it. L_k is cross-entropy whatever the loss
that is trained. Weights follow the losses of the rounds before, as in the code. λ of a client that did not report
stays. η_λ = 0 is FedAvg, but for the bytes.
Cost: each round one float up from every client, and the model down to those that do not train in it; running statistics
are averaged by the same weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

import fedbench.api as fb
from fedbench.toolkit.fedavg import participant_shares
from fedbench.toolkit.wrapping import Aggregate, Aggregated, weights_of, with_weights
from fedbench_methods.shared.reweighting import loss_and_accuracy, reweighted


@dataclass(frozen=True, kw_only=True)
class ClimbParams:
    """Hyper-parameters of CLIMB."""

    dual_lr: float = fb.hyper(1.0, symbol="η_λ", low=0.01, high=100.0, log=True, neutral=0.0, source="released code: 1")
    tolerance: float = fb.hyper(
        0.01, symbol="ε", low=1e-3, high=1.0, log=True, off=0.0, needs="dual_lr", source="ours; released code: 1"
    )
    most: float = fb.hyper(
        100.0, symbol="λ_max", low=1.0, high=1000.0, log=True, search=False, needs="dual_lr", source="released code"
    )


def next_dual(dual: Tensor, losses: Tensor, dual_lr: float, tolerance: float, most: float) -> Tensor:
    """λ (N,) after a round from λ before it and the clients' ``losses`` (N,), NaN for one that is not known."""
    known = ~losses.isnan()
    over = losses - losses[known].mean() - tolerance
    moved = (dual + dual_lr * over / len(dual)).clamp(0, most)
    return torch.where(known, moved, dual)


def client_weights(dual: Tensor) -> Tensor:
    """w (N,) of λ (N,), at least 0."""
    return (1 + dual - dual.mean()).clamp(min=0)


class Climb(fb.Method[ClimbParams]):
    """Weights clients so that none has a loss far above the mean."""

    name = "climb"
    citation = "Shen et al., An Agnostic Approach to Federated Learning with Class Imbalance, ICLR 2022"
    role = "aggregation"
    requires = ("labels", "global_model", "weighed_clients")

    @fb.hookimpl
    def start(self, task: fb.StartTask) -> None:
        """λ = 0 of all clients."""
        zero = torch.zeros(len(task.clients), dtype=torch.float64)
        task.state[self.name] = {"dual": zero, "weights": client_weights(zero)}

    @fb.hookimpl
    def survey(self, round: int, spec: fb.RunSpec, state: Mapping[str, fb.Tensors]) -> str:
        """Everyone, before every round; nobody where λ stays 0."""
        return "everyone" if self.params.dual_lr and round <= spec.training.rounds else "nobody"

    @fb.hookimpl
    def report(self, task: fb.ClientTask) -> fb.Tensors:
        """L_k of the received model, a scalar."""
        loss, _ = loss_and_accuracy(task, task.received, task.buffers)
        return {"climb.loss": torch.tensor(loss)}

    @fb.hookimpl
    def reported(self, task: fb.ReportedTask) -> None:
        """The weights of this round by the λ so far; then λ of the next."""
        dual, params = task.state[self.name]["dual"].cpu(), self.params
        losses = torch.full_like(dual, torch.nan)
        for client, report in task.reports.items():
            losses[client] = report["climb.loss"]
        after = next_dual(dual, losses, params.dual_lr, params.tolerance, params.most)
        task.state[self.name] = {"dual": after, "weights": client_weights(dual)}

    @fb.wrapper
    def aggregate(self, task: fb.AggregationTask, rest: Aggregate) -> Aggregated:
        """x + Σ p_k w_k (y_k − x): the stack's mean by the shares p_k w_k, as far away from x as these add up to."""
        weights = task.state[self.name]["weights"].cpu()[[update.client for update in task.updates]]
        if bool((weights == 1).all()):
            return rest(task)
        counted = participant_shares(task.updates, task.spec.training.weighting) * weights
        total = float(counted.sum())
        if total == 0:
            return dict(task.weights)
        answer = reweighted(task, counted, rest)
        means = weights_of(answer)
        return with_weights(answer, {name: torch.lerp(x, means[name], total) for name, x in task.weights.items()})
