"""The sequential executor: the one local training loop of fedbench, and the order of samples it reads."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedbench.errors import Unworkable
from fedbench.hookspecs import ClientTask, LocalStep
from fedbench.spec import Training
from fedbench.types import Batch, LabelledBatch, Tensors, UnlabelledBatch, Update


def batch_table(num_examples: int, epochs: int, batch_size: int, generator: torch.Generator) -> list[Tensor]:
    """The sample indices of every local step, drawn before training: a new permutation each epoch, cut into batches.

    A last batch of one sample joins the batch before it, since batch-norm and in-batch losses are undefined on one
    sample; nothing is dropped.
    """
    table: list[Tensor] = []
    for _ in range(epochs):
        batches = list(torch.split(torch.randperm(num_examples, generator=generator), batch_size))
        if len(batches) > 1 and len(batches[-1]) == 1:
            batches[-2:] = [torch.cat(batches[-2:])]
        table.extend(batches)
    return table


def local_sgd(task: ClientTask) -> Update:
    """Epochs of minibatch steps on `local_loss` + `loss_terms` from the received weights (McMahan et al. 2017, Alg. 1).

    The optimiser is built anew at every participation. Raises Unworkable when the loss is no longer finite.
    """
    weights = {name: value.detach().clone().requires_grad_() for name, value in task.received.items()}
    buffers = {name: value.clone() for name, value in task.buffers.items()}
    losses = []
    if weights:
        training = task.training
        optimiser = build_optimiser(training, weights, task.round, task.model.lr_factors)
        order = task.generator("batches")
        noise = task.generator("augmentation")
        table = batch_table(len(task.inputs), training.local_epochs, training.batch_size, order)
        for number, index in enumerate(table):
            step = LocalStep(weights, buffers, _batch(task, index, noise), task, number)
            loss = task.hooks.local_loss(step=step)
            for term in task.hooks.loss_terms(step=step):
                loss = loss + term
            optimiser.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            losses.append(loss.detach())
    mean_loss = float(torch.stack(losses).mean()) if losses else 0.0
    if not torch.isfinite(torch.tensor(mean_loss)):
        raise Unworkable(
            f"training diverged: the loss of client {task.client} in round {task.round} is {mean_loss}; "
            f"lower the learning rate (lr={task.training.lr:g}, momentum={task.training.momentum:g})."
        )
    return Update(
        client=task.client,
        weights={name: value.detach() for name, value in weights.items()},
        buffers=buffers,
        num_examples=len(task.inputs),
        metrics={"train_loss": mean_loss},
    )


def build_optimiser(
    training: Training, weights: Tensors, round: int, lr_factors: Mapping[str, float] | None = None
) -> torch.optim.Optimizer:
    """A fresh optimiser over ``weights``, at the learning rate of the round (round 1 is the first).

    ``lr_factors`` multiply it by name of a weight.
    """
    lr = training.lr * training.lr_decay ** (round - 1)
    by_factor: dict[float, list[Tensor]] = {}
    for name, value in weights.items():
        by_factor.setdefault((lr_factors or {}).get(name, 1.0), []).append(value)
    groups = [{"params": values, "lr": lr * factor} for factor, values in by_factor.items()]
    betas = (training.beta1, training.beta2)
    if training.optimizer == "adam":
        return torch.optim.Adam(groups, lr, betas=betas, eps=training.eps, weight_decay=training.weight_decay)
    if training.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr, betas=betas, eps=training.eps, weight_decay=training.weight_decay)
    return torch.optim.SGD(groups, lr, momentum=training.momentum, weight_decay=training.weight_decay)


def _batch(task: ClientTask, index: Tensor, noise: torch.Generator) -> Batch:
    inputs = task.inputs.read(index)
    if task.inputs.is_image and task.training.augment != "none":
        inputs = crop_and_flip(inputs, per_sample=task.training.augment == "sample", generator=noise)
    side = {name: rows[index.to(rows.device)] for name, rows in task.side.items()}
    if task.labels is None:
        return UnlabelledBatch(inputs, index, side)
    return LabelledBatch(inputs, index, task.labels[index.to(task.labels.device)], side)


def crop_and_flip(images: Tensor, *, per_sample: bool, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Random crop after zero padding, and horizontal flip, of already normalised images (b, c, h, w).

    With ``per_sample`` false one offset and one flip decision serve the whole batch, as in the CReFF family's code.
    """
    count, _, height, width = images.shape
    draws = count if per_sample else 1
    top = torch.randint(0, 2 * padding + 1, (draws,), generator=generator)
    left = torch.randint(0, 2 * padding + 1, (draws,), generator=generator)
    flip = torch.rand(draws, generator=generator) < 0.5
    rows = top[:, None] + torch.arange(height)
    columns = left[:, None] + torch.arange(width)
    columns = torch.where(flip[:, None], columns.flip(1), columns)
    padded = torch.nn.functional.pad(images, (padding,) * 4)
    which = torch.arange(count)
    cropped = padded[which[:, None, None], :, rows.expand(count, -1)[:, :, None], columns.expand(count, -1)[:, None, :]]
    # the permuted view is already channels-last, the layout convolutions train fastest in
    return cropped.permute(0, 3, 1, 2)
