"""The mean of a round's clients by other weights than their samples, and how a model does on a client's own data."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedbench.api import AggregationTask, ClientTask, GlobalModel, Tensors
from fedbench.toolkit.fedavg import EVALUATION_BATCH, average_buffers
from fedbench.toolkit.losses import mean_cross_entropy
from fedbench.toolkit.wrapping import Aggregate, Aggregated

_UNIT = 2**50
"""Shares become whole numbers of samples by it: to 1e-15, and without a change where they are equal."""


def reweighted(task: AggregationTask, weights: Tensor, rest: Aggregate) -> Aggregated:
    """What ``rest`` answers where the updates count by ``weights`` (m,) >= 0, not all 0, in place of their samples.

    Running statistics are averaged by them too, unless ``rest`` has its own.
    """
    shares = weights.double() / weights.double().sum()
    counted = (replace(u, num_examples=round(p * _UNIT)) for u, p in zip(task.updates, shares.tolist(), strict=True))
    training = task.spec.training.model_copy(update={"weighting": "samples"})
    spec = task.spec.model_copy(update={"training": training})
    given = replace(task, updates=tuple(counted), spec=spec)
    answer = rest(given)
    if isinstance(answer, GlobalModel) or not task.buffers:
        return answer
    return GlobalModel(answer, average_buffers(given.updates, "samples", task.buffers))


@torch.no_grad()
def loss_and_accuracy(task: ClientTask, weights: Tensors, buffers: Tensors) -> tuple[float, float]:
    """Mean cross-entropy and accuracy (0 to 1) of a model on the client's own samples, in eval mode, not augmented."""
    tensors, labels = {**weights, **buffers}, task.visible_labels
    loss = right = 0.0
    for index in torch.split(torch.arange(len(task.inputs)), EVALUATION_BATCH):
        logits = task.model.forward(tensors, task.inputs.read(index), False).logits
        wanted = labels[index.to(labels.device)]
        loss += float(mean_cross_entropy(logits, wanted)) * len(index)
        right += float((logits.argmax(1) == wanted).sum())
    return loss / len(task.inputs), right / len(task.inputs)
