"""One whole model a cluster of clients, kept by the server as stacked tensors: (M, ...) of M clusters by name; and a
head on the features of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedbench.api import AggregationTask, Model, Outputs, Tensors
from fedbench.models.heads import scaled_logits
from fedbench.toolkit.fedavg import average, average_buffers

WEIGHT, BIAS = "wide.weight", "wide.bias"


def stacked_models(model: Model, clusters: int, device: str) -> Tensors:
    """``clusters`` copies of the weights and running statistics of ``model``, each (M, ...)."""
    # copies: what one cluster learns must not show in another
    return {
        name: torch.stack([tensor] * clusters).to(device) for name, tensor in {**model.weights, **model.buffers}.items()
    }


def model_of(stacked: Tensors, cluster: int) -> Tensors:
    """Weights and running statistics of one cluster, by name."""
    return {name: tensor[cluster] for name, tensor in stacked.items()}


def averaged_in_clusters(task: AggregationTask, stacked: Tensors, cluster_of: Sequence[int]) -> Tensors:
    """FedAvg inside each cluster that has participants; the others keep their model. ``cluster_of`` client k, (N,)."""
    moved = {name: tensor.clone() for name, tensor in stacked.items()}
    for cluster in sorted(set(cluster_of)):
        members = tuple(update for update in task.updates if cluster_of[update.client] == cluster)
        if members:
            means = average(replace(task, updates=members))
            means |= average_buffers(members, task.spec.training.weighting, task.buffers)
            for name, mean in means.items():
                moved[name][cluster] = mean
    return moved


def concatenated(model: Model, encoders: Tensors) -> Model:
    """``model`` on the features of all encoders side by side, (b, M d), under a wide head WEIGHT (C, M d), BIAS (C,).

    ``encoders`` are weights and running statistics by name, (M, ...). They are read in eval mode, without gradients.
    """
    head = model.linear_head
    width = model.weights[head.weight].shape[1]

    def forward(tensors: Tensors, inputs: Tensor, training: bool) -> Outputs:
        weight, bias = tensors[WEIGHT], tensors[BIAS]
        parts = []
        with torch.no_grad():
            for m in range(weight.shape[1] // width):
                own = {name: tensor[m] for name, tensor in encoders.items()}
                # the model wants a head to run; the logits of this one go unread
                own |= {head.weight: weight[:, :width], head.bias: bias}
                parts.append(model.forward(own, inputs, False).features)
        features = torch.cat(parts, dim=1)
        return Outputs(scaled_logits(features, weight, bias, head.scale), features)

    return replace(model, forward=forward)
