"""Blocks of defences: distances between updates, changes cut in length, an answer of the stack to other updates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fedbench.api import AggregationTask, GlobalModel, Tensors, Update
from fedbench.toolkit.fedavg import average_buffers
from fedbench.toolkit.losses import squared_distance
from fedbench.toolkit.wrapping import Aggregate


def squared_distances(updates: tuple[Update, ...]) -> Tensor:
    """‖y_i − y_j‖² over all weights, (m, m) float64."""
    total = torch.zeros(len(updates), len(updates), dtype=torch.float64)
    for name in updates[0].weights:
        rows = torch.stack([u.weights[name].flatten().double() for u in updates])
        total += torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").square().cpu()
    return total


def inner(one: Tensors, other: Tensors) -> Tensor:
    """⟨one, other⟩ over all tensors of the first, a scalar, float64, on the CPU."""
    return torch.stack([(value.double() * other[name].double()).sum() for name, value in one.items()]).sum().cpu()


def by_coordinate(updates: tuple[Update, ...], centre: Callable[[Tensor], Tensor]) -> tuple[Update, ...]:
    """The updates with the ``centre`` of all, (m, ...) -> (...), in the place of their weights and running statistics.

    Counters (integers) stay as they are.
    """

    def centres(of: list[Tensors]) -> Tensors:
        shared = {name for name in of[0] if all(name in tensors for tensors in of)}
        stacked = {
            n: torch.stack([t[n] for t in of])
            for n, value in of[0].items()
            if n in shared and value.is_floating_point()
        }
        return {name: centre(values) for name, values in stacked.items()}

    weights, buffers = centres([u.weights for u in updates]), centres([u.buffers for u in updates])
    return tuple(replace(u, weights=weights, buffers={**u.buffers, **buffers}) for u in updates)


def shortened(update: Update, received: Tensors, bound: float) -> Update:
    """The update with a change of length ``bound`` at most; itself where it is no longer."""
    length = float(squared_distance(update.weights, received).double().sqrt())
    if length <= bound:
        return update
    weights = {n: received[n] + (w - received[n]) * (bound / length) for n, w in update.weights.items()}
    return replace(update, weights=weights)


def answer_to(updates: tuple[Update, ...], task: AggregationTask, rest: Aggregate) -> GlobalModel:
    """The stack's answer had clients sent these ``updates``; running statistics are their mean."""
    answer = rest(replace(task, updates=updates))
    if isinstance(answer, GlobalModel):
        return answer
    return GlobalModel(answer, average_buffers(updates, task.spec.training.weighting, task.buffers))
