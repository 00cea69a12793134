"""Gradients of a linear head by class, and how far those of made-up features are from those of real ones (CLIP2FL,
Fig. 4).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.linalg import vector_norm

from fedbench.api import MeasureTask
from fedbench.toolkit.fedavg import EVALUATION_BATCH

EPSILON = 1e-6
"""Added to the product of norms, so that a row of zeros has cosine 0 with any other."""


@dataclass(frozen=True, eq=False)
class ClassGradients:
    """Gradients of a head by class: ``weight`` (k, C, d) and ``bias`` (k, C) for the k ``classes`` (k,) int64."""

    classes: Tensor
    weight: Tensor
    bias: Tensor


def class_gradients(features: Tensor, classes: Tensor, weight: Tensor, bias: Tensor, scale: float) -> ClassGradients:
    """G_c and h_c of features v = s z (k, n, d), n of each of the k ``classes``; weight W (C, d), bias b (C,)."""
    present = torch.arange(len(classes), device=features.device)
    residual = torch.softmax(features @ weight.T + scale * bias, dim=-1)
    wanted = torch.zeros_like(residual)
    wanted[present, :, classes] = 1
    residual = residual - wanted
    count = features.shape[1]
    return ClassGradients(classes, residual.transpose(1, 2) @ features / count, scale * residual.mean(dim=1))


def mean_over_owners(reports: list[ClassGradients]) -> ClassGradients:
    """Class by class the unweighted mean over the clients that own the class (Eq. 4 of CLIP2FL).

    ``reports`` come one a client, each with the classes it owns. Classes that nobody owns are left out.
    """
    classes = torch.unique(torch.cat([report.classes for report in reports]))
    weight = reports[0].weight.new_zeros(len(classes), *reports[0].weight.shape[1:])
    bias = weight.new_zeros(weight.shape[:2])
    owners = weight.new_zeros(len(classes))
    for report in reports:
        row = torch.searchsorted(classes, report.classes)
        weight[row] += report.weight
        bias[row] += report.bias
        owners[row] += 1
    return ClassGradients(classes, weight / owners[:, None, None], bias / owners[:, None])


def cosine(ours: Tensor, theirs: Tensor) -> Tensor:
    """Cosine along the last axis, the norms' product plus ``EPSILON``: (..., d) and (..., d) to (...)."""
    norms: Tensor = vector_norm(ours, dim=-1) * vector_norm(theirs, dim=-1)
    return (ours * theirs).sum(dim=-1) / (norms + EPSILON)


def dissimilarities(task: MeasureTask, features: Tensor) -> dict[str, Tensor]:
    """Of federated ``features`` (C, m, d), times the head's scale, for each class that the cohort has; (C,) each.

    ``gradient_dissimilarity`` is the mean over the head's rows of 1 - cos(G_c[j], G'_c[j]), of the mean gradients that
    the clients sent and those of the features at the same head (Eq. 6). ``feature_dissimilarity`` is 1 - cos of the
    means of the class's federated and real features, these by the model that the clients received. NaN for classes
    that no client of the cohort has.
    """
    received = next(iter(task.tasks.values())).payload
    names = ("classes", "gradients.weight", "gradients.bias")
    target = mean_over_owners([ClassGradients(*(update.payload[name] for name in names)) for update in task.updates])
    own, head = features[target.classes], (received["head.weight"], received["head.bias"])
    ours = class_gradients(own, target.classes, *head, task.model.linear_head.scale)
    gradients = (1 - cosine(ours.weight, target.weight)).mean(dim=1)
    apart = 1 - cosine(own.mean(dim=1), _real_means(task, features)[target.classes])
    found = {"gradient_dissimilarity": gradients, "feature_dissimilarity": apart}
    unknown = torch.full((len(features),), float("nan"), device=features.device)
    return {name: unknown.index_put((target.classes,), values) for name, values in found.items()}


def _real_means(task: MeasureTask, features: Tensor) -> Tensor:
    """The mean features of the cohort's samples by class, (C, d); zero where it has none."""
    sums, counts = torch.zeros_like(features[:, 0]), torch.zeros_like(features[:, 0, 0])
    for client in task.tasks.values():
        tensors = {**client.received, **client.buffers}
        for rows in torch.split(torch.arange(len(client.inputs)), EVALUATION_BATCH):
            labels = client.visible_labels[rows]
            of_batch = client.model.forward(tensors, client.inputs.read(rows), False).features
            sums.index_add_(0, labels, of_batch)
            counts.index_add_(0, labels, torch.ones_like(labels, dtype=counts.dtype))
    return sums / counts.clamp(min=1)[:, None]
