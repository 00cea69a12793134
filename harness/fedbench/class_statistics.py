"""What a client can say about its classes: the features of its samples, and their mean and count by class."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedbench.defaults import EVALUATION_BATCH
from fedbench.errors import FedbenchError
from fedbench.hookspecs import ClientTask
from fedbench.types import Tensors


@dataclass(frozen=True, eq=False)
class ClassMeans:
    """``means`` (k, d) and ``counts`` (k,) int64 of the k ``classes`` (k,) int64 that occur, ascending."""

    classes: Tensor
    means: Tensor
    counts: Tensor


def visible_labels(task: ClientTask, method: str) -> Tensor:
    """The client's labels (n_k,); FedbenchError where the scenario hides them."""
    if task.labels is None:
        raise FedbenchError(f"{method} looks at the labels of its samples, which are hidden; set labels=visible.")
    return task.labels


@torch.no_grad()
def client_features(task: ClientTask, weights: Tensors, buffers: Tensors) -> Tensor:
    """Features (n_k, d) of the client's samples under a model: eval mode, not augmented."""
    tensors = {**weights, **buffers}
    chunks = torch.split(torch.arange(len(task.inputs)), EVALUATION_BATCH)
    return torch.cat([task.model.forward(tensors, task.inputs.read(chunk), False).features for chunk in chunks])


def class_means(features: Tensor, labels: Tensor) -> ClassMeans:
    """Means and counts by class of ``features`` (n, d) with ``labels`` (n,) int64."""
    classes, which, counts = torch.unique(labels, return_inverse=True, return_counts=True)
    sums = features.new_zeros(len(classes), features.shape[1], dtype=torch.float64)
    sums.index_add_(0, which, features.double())
    return ClassMeans(classes, (sums / counts[:, None]).to(features.dtype), counts)
