"""Dynamic regularisation, which FedDyn, FedDC and FedSpeed share: the drift of every client, and a pull against it.

The drift h_k is the sum of all changes y_k − x of client k, over the rounds whose updates arrived; 0 at first. A
client minimises its loss plus α (⟨w − x, h_k⟩ + ‖w − x‖²/2), so it is held near x − h_k: −α h_k is what the paper keeps
as the gradient of k's loss (Acar et al., ICLR 2021). Client and server both know y_k and x, so nothing is sent for it;
the server keeps h_k here, and hands it down as what the client holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from fedbench.api import AggregationTask, Broadcast, BroadcastTask, StartTask, Tensors, Update, hyper

DRIFT, MEAN = "drift/", "drift of all/"
SHARE = "share"

Scaling = Literal["uniform", "samples"]
Weighting = Literal["uniform", "run"]


def scaling_field() -> Scaling:
    """The hyper-parameter α_k."""
    return hyper("uniform", symbol="α_k", source="uniform: α for all, paper; samples: α / ω_k, released code")


def weighting_field() -> Weighting:
    """The hyper-parameter 1/m."""
    return hyper("uniform", symbol="1/m", source="uniform: paper and released code; run: as the run or the stack says")


def sizes_relative_to_the_mean(task: StartTask) -> Tensor:
    """ω_k = N n_k / Σ_j n_j, (N,) float32."""
    sizes = torch.tensor([report.num_examples for report in task.clients], dtype=torch.float64)
    return (sizes / sizes.mean()).float()


def with_drift(answer: Broadcast, task: BroadcastTask, kept: Tensors) -> Broadcast:
    """``answer`` with h_k of the client, zero before it has taken part, as what it holds: of all weights it is sent."""
    held = {DRIFT + name: kept.get(f"{task.client}/{name}", torch.zeros_like(x)) for name, x in task.weights.items()}
    return replace(answer, held={**answer.held, **held})


def drift_of(payload: Tensors) -> Tensors:
    """h_k by the names of the weights, from what `with_drift` hands down."""
    return {name.removeprefix(DRIFT): h for name, h in payload.items() if name.startswith(DRIFT)}


def dynamic_term(weights: Tensors, received: Tensors, drift: Tensors) -> Tensor:
    """⟨w − x, h_k⟩ + ‖w − x‖²/2 over the weights in ``drift``, a scalar with the gradient w − x + h_k."""
    moved = {name: weights[name] - received[name] for name in drift}
    return torch.stack([(away * (drift[name] + 0.5 * away)).sum() for name, away in moved.items()]).sum()


def drifted(task: AggregationTask, kept: Tensors, updates: Sequence[Update]) -> Tensors:
    """``kept`` with h_k ← h_k + y_k − x of the clients of ``updates``, and the mean of all N clients' moved with it."""
    found = dict(kept)
    for name, x in task.weights.items():
        total = torch.zeros_like(x)
        for update in updates:
            key, change = f"{update.client}/{name}", update.weights[name] - x
            found[key] = kept[key] + change if key in kept else change
            total = total + change
        found[MEAN + name] = kept.get(MEAN + name, torch.zeros_like(x)) + total / task.num_clients
    return found


def weighted_as(task: AggregationTask, weighting: Weighting) -> AggregationTask:
    """``task`` in which all participants weigh alike; as it is, where ``weighting`` says so."""
    if weighting == "run":
        return task
    training = task.spec.training.model_copy(update={"weighting": "uniform"})
    return replace(task, spec=task.spec.model_copy(update={"training": training}))
