"""One client's local training: the order of its samples, the loss of a step, the optimiser, and the loop over them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from math import cos, pi

import torch
from torch import Tensor

from fedbench.core.errors import diverged
from fedbench.core.method.answers import require_gradients, require_loss
from fedbench.core.method.tasks import ClientTask, LocalStep
from fedbench.core.spec import Training
from fedbench.core.types import (
    Batch,
    InputSource,
    LabelledBatch,
    Model,
    StepGradients,
    Tensors,
    UnlabelledBatch,
    Update,
)
from fedbench.models.inputs import FeatureInputs
from fedbench.scenarios.partitions.parts import floor


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


def round_table(num_examples: int, training: Training, generator: torch.Generator) -> list[Tensor]:
    """The `batch_table` of a round: for the run's epochs, or for its local steps, in as many passes as these take."""
    if training.local_steps is None:
        return batch_table(num_examples, training.local_epochs, training.batch_size, generator)
    table: list[Tensor] = []
    while len(table) < training.local_steps:
        table += batch_table(num_examples, 1, training.batch_size, generator)
    return table[: training.local_steps]


def batches_of(task: ClientTask) -> list[Tensor]:
    """The client's batch table for this round and exchange, which both executors read.

    A straggler takes the first ⌊work · steps⌋ steps, but at least one.
    """
    table = round_table(len(task.inputs), task.training, task.generator("batches"))
    return table if task.work == 1 else table[: max(floor(task.work * len(table)), 1)]


def summed_loss(step: LocalStep) -> Tensor:
    """`local_loss` and all `loss_terms` of a step, a scalar. Raises FedbenchError where one is none."""
    loss = require_loss(step.task.hooks.local_loss(step=step), step, "local_loss")
    for term in step.task.hooks.loss_terms(step=step):
        loss = loss + require_loss(term, step, "loss_terms")
    return loss


def in_precision(step: LocalStep) -> AbstractContextManager[None]:
    """A context in which the forward passes of ``step`` have the precision that the run asks for."""
    half = step.task.training.precision == "bfloat16"
    return torch.autocast(step.batch.inputs.device.type, torch.bfloat16) if half else nullcontext()


def step_loss(step: LocalStep) -> Tensor:
    """The `local_objective` of a step, a scalar, in the precision that the run asks for.

    Raises FedbenchError for one that is no scalar, or through which no weight gets a gradient.

    With bfloat16 a step of fedavg-cnn takes about 0.6 of the time and one of resnet8 0.74, on a CPU core that has such
    instructions; convnet gains nothing (tests/bench/bench_channels_last.py).
    """
    with in_precision(step):
        return require_loss(step.task.hooks.local_objective(step=step), step, "local_objective")


def loss_gradients(step: LocalStep) -> StepGradients:
    """The gradients of `step_loss` in all weights of the step that require them; these must be leaves."""
    loss = step_loss(step)
    leaves = {name: weight for name, weight in step.weights.items() if weight.requires_grad}
    loss.backward(inputs=list(leaves.values()))  # type: ignore[no-untyped-call]
    found = {name: weight.grad for name, weight in leaves.items() if weight.grad is not None}
    for weight in leaves.values():
        weight.grad = None
    return StepGradients(found, loss.detach())


def local_sgd(task: ClientTask) -> Update:
    """Epochs of minibatch steps on `local_loss` + `loss_terms` from the received weights (McMahan et al. 2017, Alg. 1).

    The optimiser is built anew at every participation. Raises Unworkable when the loss is no longer finite.
    """
    weights = {name: value.detach().clone().requires_grad_() for name, value in task.received.items()}
    buffers = {n: value if n in task.model.of_server else value.clone() for n, value in task.buffers.items()}
    losses = []
    if weights:
        optimiser = build_optimiser(task.training, weights, task.round, task.model.lr_factors)
        noise = task.generator("augmentation")
        for number, index in enumerate(_beside_rows(batches_of(task), task.inputs)):
            step = LocalStep(weights, buffers, batch_at(task, index, noise), task, number)
            found = require_gradients(task.hooks.local_gradients(step=step), step)
            for name, weight in weights.items():
                weight.grad = found.by_name.get(name)
            if task.training.clip_norm is not None:
                for names in each_model(weights, task.model.own):
                    torch.nn.utils.clip_grad_norm_([weights[name] for name in names], task.training.clip_norm)
            optimiser.step()
            # the next gradients are not added to these; a loop, since zero_grad is 5 % of a linear head's step
            for weight in weights.values():
                weight.grad = None
            losses.append(found.loss)
    mean_loss = float(torch.stack(losses).mean()) if losses else 0.0
    weights = {name: value.detach() for name, value in weights.items()}
    return trained(task, weights, buffers, mean_loss)


def _beside_rows(table: list[Tensor], inputs: InputSource) -> list[Tensor]:
    """The batch ``table`` where the rows of resident samples are: in one copy, since each waits for the device."""
    if not isinstance(inputs, FeatureInputs):
        return table
    device = (inputs.features if inputs.rows is None else inputs.rows).device
    return table if device.type == "cpu" else list(torch.split(torch.cat(table).to(device), [*map(len, table)]))


def each_model(names: Collection[str], own: Collection[str]) -> list[list[str]]:
    """Split ``names`` into those of the model that is sent and of the one that a client keeps (``own``), without empty
    parts.

    Gradients of each are clipped by a norm of their own.
    """
    parts = [[name for name in names if name not in own], [name for name in names if name in own]]
    return [part for part in parts if part]


def trained(task: ClientTask, weights: Tensors, buffers: Tensors, mean_loss: float) -> Update:
    """The update of a client that ended at ``weights``; Unworkable where its mean loss is not finite."""
    if not torch.isfinite(torch.tensor(mean_loss)):
        raise diverged(
            f"the loss of client {task.client} in round {task.round} is {mean_loss}; "
            f"lower the learning rate (lr={task.training.lr:g}, momentum={task.training.momentum:g})."
        )
    return Update(
        client=task.client,
        weights=weights,
        buffers=buffers,
        num_examples=len(task.inputs),
        metrics={"train_loss": mean_loss},
    )


def learning_rate(training: Training, round: int) -> float:
    """The learning rate eta of ``round`` (1 is the first): decayed, in the warm-up or on the cosine after it.

    Rounds after the last keep its rate. With w rounds of warm-up out of T, the cosine's factor in round t > w is (1 +
    cos(π (t - w - 1) / (T - w))) / 2.
    """
    lr = training.lr * training.lr_decay ** (round - 1)
    warmup = training.warmup_rounds
    if round <= warmup:
        return lr * round / (warmup + 1)
    if training.lr_schedule == "cosine":
        last = max(training.rounds, warmup + 1)
        return lr * (1 + cos(pi * (min(round, last) - warmup - 1) / (last - warmup))) / 2
    return lr


def learning_rates(
    training: Training, names: Mapping[str, object], round: int, lr_factors: Mapping[str, float] | None = None
) -> dict[float, list[str]]:
    """The names by their learning rate in the round (round 1 is the first); ``lr_factors`` multiply it by name."""
    lr = learning_rate(training, round)
    by_rate: dict[float, list[str]] = {}
    for name in names:
        by_rate.setdefault(lr * (lr_factors or {}).get(name, 1.0), []).append(name)
    return by_rate


def build_optimiser(
    training: Training, weights: Tensors, round: int, lr_factors: Mapping[str, float] | None = None
) -> torch.optim.Optimizer:
    """A fresh optimiser over ``weights``, at the learning rate of the round (see `learning_rates`)."""
    rates = learning_rates(training, weights, round, lr_factors)
    groups = [{"params": [weights[name] for name in names], "lr": lr} for lr, names in rates.items()]
    betas = (training.beta1, training.beta2)
    if training.optimizer == "adam":
        return torch.optim.Adam(groups, betas=betas, eps=training.eps, weight_decay=training.weight_decay)
    if training.optimizer == "adamw":
        return torch.optim.AdamW(groups, betas=betas, eps=training.eps, weight_decay=training.weight_decay)
    return torch.optim.SGD(groups, momentum=training.momentum, weight_decay=training.weight_decay)


def batch_at(task: ClientTask, index: Tensor, noise: torch.Generator) -> Batch:
    """The client's samples at ``index`` (b,); images are augmented by ``noise`` where the run asks for it."""
    inputs = task.inputs.read(index)
    if task.inputs.is_image and task.training.augment != "none":
        inputs = crop_and_flip(inputs, per_sample=task.training.augment == "sample", generator=noise)
    side = {name: rows.read(index) for name, rows in task.side.items()}
    if task.labels is None:
        return UnlabelledBatch(inputs, index, side)
    return LabelledBatch(inputs, index, task.labels[index.to(task.labels.device)], side)


def crop_and_flip(images: Tensor, *, per_sample: bool, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Random crop after zero padding, and horizontal flip, of already normalised images (b, c, h, w).

    With ``per_sample`` false one offset and one flip decision serve the whole batch, as in the CReFF family's code.
    """
    return cropped_and_flipped(images, *drawn_crops(len(images) if per_sample else 1, generator, padding), padding)


def drawn_crops(draws: int, generator: torch.Generator, padding: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Offsets from the top and from the left of padded images and whether each is flipped, (draws,) each."""
    top = torch.randint(0, 2 * padding + 1, (draws,), generator=generator)
    left = torch.randint(0, 2 * padding + 1, (draws,), generator=generator)
    return top, left, torch.rand(draws, generator=generator) < 0.5


def cropped_and_flipped(images: Tensor, top: Tensor, left: Tensor, flip: Tensor, padding: int = 4) -> Tensor:
    """The ``images`` (b, c, h, w) cut out and flipped as drawn, each by its own draw or all by one."""
    count, _, height, width = images.shape
    device = images.device
    top, left, flip = top.to(device), left.to(device), flip.to(device)
    rows = top[:, None] + torch.arange(height, device=device)
    columns = left[:, None] + torch.arange(width, device=device)
    columns = torch.where(flip[:, None], columns.flip(1), columns)
    padded = torch.nn.functional.pad(images, (padding,) * 4)
    which = torch.arange(count, device=device)
    cropped = padded[which[:, None, None], :, rows.expand(count, -1)[:, :, None], columns.expand(count, -1)[:, None, :]]
    # the permuted view is already channels-last, the layout convolutions train fastest in
    return cropped.permute(0, 3, 1, 2)


def local_steps(task: ClientTask) -> int:
    """The number tau of steps that the default `local_train` takes for ``task``."""
    return len(batches_of(task))


def gradient_weight(steps: int, momentum: float, pull: float = 0.0) -> float:
    """The l1 norm of a over ``steps`` tau >= 1 with ``momentum`` rho and ``pull`` = eta mu; tau where both are 0.

    Momentum and pull together are worked out likewise, by following a single gradient of size one through the steps.
    """
    buffer = weight = total = 1.0
    for _ in range(steps - 1):
        buffer = momentum * buffer - pull * weight
        weight += buffer
        total += abs(weight)
    return total


def rates_by_name(training: Training, model: Model, round: int) -> dict[str, float]:
    """eta of ``round`` (1 is the first) for every weight of ``model``."""
    rates = learning_rates(training, model.weights, round, model.lr_factors)
    return {name: rate for rate, names in rates.items() for name in names}
