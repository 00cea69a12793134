"""Facts about a client's classes: the features of its samples, and their mean and count by class.

Methods that send class means (prototypes) share how these are sent, merged over clients and compared with.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbench.core.method.tasks import ClientTask, EvaluationTask
from fedbench.core.types import Tensors
from fedbench.models.text.classifier import unit
from fedbench.toolkit.fedavg import EVALUATION_BATCH


@dataclass(frozen=True, eq=False)
class ClassMeans:
    """``means`` (k, d) and ``counts`` (k,) int64 of the k ``classes`` (k,) int64 that occur, ascending."""

    classes: Tensor
    means: Tensor
    counts: Tensor


@torch.no_grad()
def client_features(task: ClientTask | EvaluationTask, weights: Tensors, buffers: Tensors) -> Tensor:
    """Features (n, d) of the task's samples under a model: eval mode, not augmented."""
    tensors = {**weights, **buffers}
    chunks = torch.split(torch.arange(len(task.inputs)), EVALUATION_BATCH)
    return torch.cat([task.model.forward(tensors, task.inputs.read(chunk), False).features for chunk in chunks])


def class_means(features: Tensor, labels: Tensor) -> ClassMeans:
    """Means and counts by class of ``features`` (n, d) with ``labels`` (n,) int64."""
    classes, which, counts = torch.unique(labels, return_inverse=True, return_counts=True)
    sums = features.new_zeros(len(classes), features.shape[1], dtype=torch.float64)
    sums.index_add_(0, which, features.double())
    return ClassMeans(classes, (sums / counts[:, None]).to(features.dtype), counts)


def sent_means(task: ClientTask, features: Tensor, method: str) -> Tensors:
    """What a client sends of its ``features`` (n_k, d): the ``means`` (k, d) of the k classes it has.

    They ascend by class; ``holds`` (C,) bool says which classes these are. FedbenchError if labels are hidden.
    """
    return {"means": class_means(features, task.visible_labels).means, "holds": task.visible_counts > 0}


def spread(rows: Tensor, holds: Tensor) -> Tensor:
    """Place ``rows`` (k, ...) of the k classes that ``holds`` (C,) bool names among all classes: (C, ...), zero
    elsewhere."""
    everywhere = rows.new_zeros(len(holds), *rows.shape[1:])
    everywhere[holds] = rows
    return everywhere


def mean_over_holders(means: Tensor, weights: Tensor) -> Tensor:
    """sum_k w_kc m_kc / sum_k w_kc by class c: (C, d) from ``means`` (m, C, d) of m clients and ``weights`` (m, C).

    The weight of a client without the class is 0; a class that nobody has is zero.
    """
    total = weights.double().sum(0)
    shares = torch.where(total > 0, weights / total, 0.0)
    return (shares[..., None] * means).sum(0).to(means.dtype)


def merged(reports: Collection[Tensors], *, unit_length: bool = False) -> Tensor:
    """The clients' means by class weighted by their counts, (C, d); of unit means with ``unit_length``.

    Each of ``reports`` has "means" (k, d) of the client's k classes and "counts" (C,). A class that nobody has is zero.
    """
    counts = torch.stack([report["counts"] for report in reports])
    means = torch.stack([spread(report["means"], report["counts"] > 0) for report in reports])
    return mean_over_holders(unit(means) if unit_length else means, counts)


def nearest_class(features: Tensor, means: Tensor, allowed: Tensor) -> Tensor:
    """The class of the nearest of ``means`` (C, d) among those ``allowed`` (C,) bool, for ``features`` (n, d): (n,).

    Nearest in Euclidean distance, which is nearest in mean squared error.
    """
    distances = torch.cdist(features, means, compute_mode="donot_use_mm_for_euclid_dist")
    return distances.masked_fill(~allowed, torch.inf).argmin(1)
