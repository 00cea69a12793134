"""Linear heads beside the model's own: drawn anew, trained again on features by class, evaluated in its place.

Logits are s (W z + b) with the model's fixed scale s. Training is on v = s z, on which the head is W v + s b.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedbench.core.method.tasks import EvaluationTask
from fedbench.core.types import Model, Predictions
from fedbench.toolkit.fedavg import largest_logit

RETRAIN_BATCH = 32


def fresh_head(num_classes: int, width: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Weight (C, d) and bias (C,), uniform in ±1/√d: torch's default for linear layers."""
    drawn = (2 * torch.rand(num_classes, width + 1, generator=generator) - 1) * width**-0.5
    return drawn[:, :-1], drawn[:, -1]


@torch.no_grad()
def retrained(
    features: Tensor,
    weight: Tensor,
    bias: Tensor,
    scale: float,
    epochs: int,
    lr: float,
    generator: torch.Generator,
    *,
    classes: Tensor | None = None,
    batch_size: int = RETRAIN_BATCH,
) -> tuple[Tensor, Tensor]:
    """Weight and bias after ``epochs`` of minibatch SGD on the mean cross-entropy of ``features`` (C, m, d) (Eq. 10).

    The gradient of the head W v + s b has a closed form; its bias s b is the variable of a step. If not every class has
    features, they are (k, m, d), those of the k ``classes`` (k,) int64.
    """
    if epochs == 0:
        return weight, bias
    # a column of ones makes the bias a column of the weight
    inputs = torch.nn.functional.pad(features.flatten(0, 1), (0, 1), value=1.0)
    by_class = torch.eye(len(weight), device=features.device)
    wanted = (by_class if classes is None else by_class[classes]).repeat_interleave(features.shape[1], dim=0)
    head = torch.cat([weight, scale * bias[:, None]], dim=1)
    for _ in range(epochs):
        order = torch.randperm(len(inputs), generator=generator).to(features.device)
        batches, targets = (torch.split(table[order], batch_size) for table in (inputs, wanted))
        for batch, target in zip(batches, targets, strict=True):
            residual = torch.softmax(batch @ head.T, dim=1).sub_(target)
            head.addmm_(residual.T, batch, alpha=-lr / len(batch))
    return head[:, :-1].contiguous(), head[:, -1] / scale


def largest_logit_with_kept_head(task: EvaluationTask, method: str) -> Predictions:
    """The largest logit with "head.weight" (C, d) and "head.bias" (C,) of the server state of ``method``.

    The model's own head serves where the state has none yet, and for a client's fine-tuned model, whose head is tuned.
    """
    kept = task.state.get(method, {})
    if "head.weight" not in kept or task.client is not None:
        return largest_logit(task)
    head = task.model.linear_head
    swapped = {head.weight: kept["head.weight"], head.bias: kept["head.bias"]}
    return largest_logit(replace(task, weights={**task.weights, **swapped}))


@torch.no_grad()
def feature_width(model: Model, device: str) -> int:
    """The width d of the features (b, d) of ``model``; for a model without a head from a black image on ``device``."""
    if model.head is not None:
        return model.weights[model.head.weight].shape[1]
    # no network needs a larger image
    pixels = torch.zeros(1, 3, 64, 64, dtype=torch.uint8, device=device)
    make = model.encoder or model.transform
    assert make is not None
    tensors = {name: tensor.to(device) for name, tensor in {**model.weights, **model.buffers}.items()}
    return model.forward(tensors, make(pixels).float(), False).features.shape[1]
