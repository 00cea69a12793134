"""FLTrust - Cao, Fang, Liu, Gong, "FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping", NDSS 2021.

The server trains on a few labelled samples of its own, and trusts a client as far as its change points the same way.
From the received weights x, with g_k = y_k − x and the server's own change g_0 (Eqs. 2 to 4):
    TS_k = relu(cos(g_k, g_0)),    ḡ_k = (‖g_0‖ / ‖g_k‖) g_k,    x ← x + α Σ_k TS_k ḡ_k / Σ_k TS_k
of all weights together.

Wraps: aggregate, to whose rest every client has sent the new x. So it stacks with any learner and any server step.
Needs labelled samples at the server (scenario.server_samples). Running statistics are averaged by TS_k; what else
clients send is as they sent it. Nothing more is sent. Where no TS_k is above zero, x and running statistics
stay.
Left open: g_0 is of as many epochs, in batches as large and at the rate that the clients have in the round, by plain
SGD on cross-entropy. α = 1 is the paper's global learning rate; another server step may stand in its place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedbench.api import AggregationTask, GlobalModel, Method, Tensors, Update, hyper, wrapper
from fedbench.toolkit import server_training as server
from fedbench.toolkit.fedavg import weighted_mean
from fedbench.toolkit.local_training import learning_rate, round_table
from fedbench.toolkit.wrapping import Aggregate
from fedbench_methods.shared.robust import answer_to, by_coordinate, inner


@dataclass(frozen=True, kw_only=True)
class FLTrustParams:
    """Hyper-parameters of FLTrust."""

    server_lr: float = hyper(1.0, symbol="α", low=0.01, high=10.0, log=True, search=False, source="paper: 1")


def trust(change: Tensors, own: Tensors) -> Tensor:
    """TS of a ``change`` g_k beside the server's ``own`` g_0, by name: a scalar, float64; 0 for no change."""
    lengths = (inner(change, change) * inner(own, own)).sqrt()
    return torch.nan_to_num(inner(own, change) / lengths).clamp_min(0)


def trusted(updates: tuple[Update, ...], received: Tensors, own: Tensors, rate: float) -> tuple[Tensors, Tensor]:
    """x after a round, by name, and TS_k (m,), from the clients' updates, x ``received`` and g_0 ``own``."""
    changes = [{name: u.weights[name] - x for name, x in received.items()} for u in updates]
    scores = torch.stack([trust(change, own) for change in changes])
    if not scores.any():
        return received, scores
    factors = [
        float((inner(own, own) / inner(c, c)).sqrt()) if score else 0.0
        for c, score in zip(changes, scores, strict=True)
    ]
    shares = scores / scores.sum()
    step = {n: weighted_mean([c[n] * by for c, by in zip(changes, factors, strict=True)], shares) for n in received}
    return {name: x + rate * step[name] for name, x in received.items()}, scores


class FLTrust(Method[FLTrustParams]):
    """Trusts clients whose changes point as the server's own does."""

    name = "fltrust"
    citation = "Cao et al., FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping, NDSS 2021"
    role = "defence"
    requires = ("server_labels", "whole_model", "global_model", "sent_weights")
    prevents: tuple[str, ...] = ("weighed_clients", "own_updates")

    @wrapper
    def aggregate(self, task: AggregationTask, rest: Aggregate) -> GlobalModel:
        """The stack's answer to the trusted mean."""
        if not task.weights:
            return answer_to(task.updates, task, rest)
        weights, scores = trusted(task.updates, task.weights, self._own_change(task), self.params.server_lr)
        task.metrics["fltrust_trusted"] = float((scores > 0).double().mean())
        if scores.any():
            shares = scores / scores.sum()
            updates = by_coordinate(task.updates, lambda values: weighted_mean(list(values), shares))
        else:
            updates = tuple(replace(u, buffers=task.buffers) for u in task.updates)
        return answer_to(tuple(replace(u, weights=weights) for u in updates), task, rest)

    def _own_change(self, task: AggregationTask) -> Tensors:
        """g_0, by name."""
        data, training = server.granted(task), task.spec.training
        assert data.labels is not None, "the harness grants what `requires` names"
        labels, rate = data.labels, learning_rate(training, task.round)
        course = server.Course(
            round_table(len(data.inputs), training, task.generator("the server's own batches")),
            lambda weights: torch.optim.SGD(weights.values(), lr=rate),
        )

        def gradient(logits: Tensor, index: Tensor) -> Tensor:
            of = one_hot(labels[index.to(labels.device)].to(logits.device), logits.shape[1])
            return (torch.softmax(logits, dim=1) - of) / len(logits)

        start = GlobalModel(task.weights, task.buffers)
        trained = server.trained_copy(task.model, start, data.inputs, gradient, course)
        return {name: trained.weights[name] - x for name, x in task.weights.items()}
