"""Training on the server's own samples: the models that the server has, what an ensemble of them says of every sample,
and minibatch steps of a copy of one.

Teachers predict in eval mode, once per sample, since the server's samples are not augmented; so a step costs one
forward and one backward pass, however many teachers there are. A loss is given by its gradient with respect to the
logits, which distillation has in closed form: where a student says what its teachers say it is exactly zero. That
matters under Adam, whose first steps are as long for the rounding of a gradient as for a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import get_swa_multi_avg_fn

from fedbench.core.errors import diverged
from fedbench.core.method.hyper import hyper
from fedbench.core.method.tasks import AggregationTask, ServerData
from fedbench.core.types import GlobalModel, InputSource, Model, Tensors
from fedbench.toolkit.fedavg import EVALUATION_BATCH
from fedbench.toolkit.local_training import batch_table

Gradient = Callable[[Tensor, Tensor], Tensor]
"""A function of logits (b, C) and the samples' indices (b,). It returns the gradient (b, C) of the batch's loss."""

ROUNDING = 1e-5
"""Distributions whose difference, summed over classes, is less are taken as equal: float32 logits of 30 are exact to
1e-5."""


@dataclass(frozen=True, eq=False)
class Course:
    """A course of training: one step for each of ``batches``, with an optimiser created for the model's weights."""

    batches: Sequence[Tensor]
    """The sample indices of every step."""
    optimiser: Callable[[Tensors], Optimizer]
    cosine: bool = False
    """Whether the learning rate falls to zero over all steps, by half a cosine."""
    clip: float | None = None
    """The largest norm of all gradients together."""
    averaged_from: int | None = None
    """The step, from 1, after which averaging of the weights begins (SWA); None: the last weights are the result."""
    averaged_every: int = 1

    def averages(self, step: int) -> bool:
        """Whether the weights after ``step``, from 1, go into the mean."""
        first = self.averaged_from
        return first is not None and step >= first and (step - first) % self.averaged_every == 0


def steps_field(source: str) -> int:
    """The hyper-parameter N: how many steps the server takes a round."""
    return hyper(100, symbol="N", low=1, high=10_000, log=True, neutral=0, search=False, source=source)


def rate_field(source: str) -> float:
    """The hyper-parameter η_s, the server's learning rate."""
    return hyper(1e-3, symbol="η_s", low=1e-5, high=0.1, log=True, search=(1e-4, 1e-2), needs="steps", source=source)


def batch_field(source: str) -> int:
    """The hyper-parameter b, the server's batch size."""
    return hyper(128, symbol="b", low=2, high=4096, log=True, search=False, source=source)


def granted(task: AggregationTask) -> ServerData:
    """The server's samples, in memory if they fit, for a method that requires them."""
    assert task.server_data is not None, "the harness grants what `requires` names"
    return replace(task.server_data, inputs=task.server_data.inputs.resident())


def client_models(task: AggregationTask) -> list[GlobalModel]:
    """The participants' trained models with their own running statistics."""
    return [GlobalModel(update.weights, update.buffers) for update in task.updates]


@torch.no_grad()
def ensemble(
    model: Model, teachers: Iterable[GlobalModel], inputs: InputSource, of: Callable[[Tensor], Tensor]
) -> Tensor:
    """The mean over the teachers of ``of(logits)``, (n, C) for all n samples; eval mode.

    Summed in float64: what all teachers agree on comes back bit for bit.
    """
    chunks = torch.split(torch.arange(len(inputs)), EVALUATION_BATCH)
    answers = []
    for teacher in teachers:
        tensors = {**teacher.weights, **teacher.buffers}
        logits = torch.cat([model.forward(tensors, inputs.read(chunk), False).logits for chunk in chunks])
        answers.append(of(logits).double())
    return torch.stack(answers).mean(dim=0).float()


def divergence_gradient(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """The gradient of the batch's mean KL(targets ‖ softmax(o / T)) in the logits o: (softmax(o / T) − q) / (T b).

    Logits and targets q are (b, C). It is exactly zero for samples on which the two differ by ``ROUNDING`` or less.
    """
    residual = torch.softmax(logits / temperature, dim=1) - targets
    differs = residual.abs().sum(dim=1, keepdim=True) > ROUNDING
    return residual * differs / (temperature * len(logits))


def server_batches(samples: int, batch_size: int, steps: int, generator: torch.Generator) -> list[Tensor]:
    """The sample indices of ``steps`` steps: passes over all samples, each in a new order, the last one cut short."""
    table: list[Tensor] = []
    while len(table) < steps:
        table += batch_table(samples, 1, batch_size, generator)
    return table[:steps]


def trained_copy(
    model: Model, start: GlobalModel, inputs: InputSource, gradient: Gradient, course: Course
) -> GlobalModel:
    """A copy of ``start`` after the ``course``, batch-norm layers in train mode; ``start`` stays as it is.

    Weights that were averaged come with the running statistics of their own, as `statistics_of` has them. Raises
    Unworkable where the weights are no longer finite.
    """
    # in the order of names: that of a run which was resumed is another, and norms are summed in it
    weights = {name: start.weights[name].detach().clone().requires_grad_() for name in sorted(start.weights)}
    buffers = {name: value.clone() for name, value in start.buffers.items()}
    if not weights or not course.batches:
        return GlobalModel({name: value.detach() for name, value in weights.items()}, buffers)
    optimiser, average = course.optimiser(weights), _Average()
    schedule = CosineAnnealingLR(optimiser, len(course.batches)) if course.cosine else None
    for step, index in enumerate(course.batches, start=1):
        logits = model.forward({**weights, **buffers}, inputs.read(index), True).logits
        optimiser.zero_grad(set_to_none=True)
        torch.autograd.backward(logits, gradient(logits.detach(), index.to(logits.device)))
        if course.clip is not None:
            clip_grad_norm_(weights.values(), course.clip)
        optimiser.step()
        if schedule is not None:
            schedule.step()
        if course.averages(step):
            average.add([value.detach() for value in weights.values()])
    last = [value.detach() for value in weights.values()]
    final = dict(zip(weights, average.mean or last, strict=True))
    if not all(torch.isfinite(value).all() for value in final.values()):
        raise diverged("weights trained on the server are no longer finite; lower its learning rate.")
    trained = GlobalModel(final, buffers)
    return GlobalModel(final, statistics_of(model, trained, inputs)) if average.mean else trained


class _Average:
    """The mean of the weights added so far, in their order; empty before the first."""

    def __init__(self) -> None:
        self.mean: list[Tensor] = []
        self._count = 0
        self._move = get_swa_multi_avg_fn()  # type: ignore[no-untyped-call]

    def add(self, weights: list[Tensor]) -> None:
        """Add weights to the mean; they may change afterwards."""
        self.mean = self.mean or [value.clone() for value in weights]
        self._move(self.mean, weights, self._count)
        self._count += 1


@torch.no_grad()
def statistics_of(model: Model, trained: GlobalModel, inputs: InputSource) -> Tensors:
    """The buffers of ``trained`` with running means and variances of batch-norm replaced by means over batches of the
    samples.

    It does what torch.optim.swa_utils.update_bn does to a module.
    """
    names = [n for n in trained.buffers if n in model.batch_norm and trained.buffers[n].is_floating_point()]
    if not names:
        return trained.buffers
    chunks = torch.split(torch.arange(len(inputs)), EVALUATION_BATCH)

    def after(chunk: Tensor, value: float) -> Tensors:
        buffers = {name: old.clone() for name, old in trained.buffers.items()}
        for name in names:
            buffers[name].fill_(value)
        model.forward({**trained.weights, **buffers}, inputs.read(chunk), True)
        return buffers

    # a layer keeps 1 - m of the old and takes m of the batch's: from zeros it gives m times the batch's, and from ones
    # 1 - m more than that, whatever its momentum m is
    seen = [after(chunk, 0.0) for chunk in chunks]
    kept = after(chunks[0], 1.0)
    fresh = {}
    for name in names:
        least = seen[0][name].abs().argmin()  # where the difference loses the fewest digits
        momentum = 1 - (kept[name][least] - seen[0][name][least])
        fresh[name] = torch.stack([buffers[name] for buffers in seen]).mean(dim=0) / momentum
    return {**trained.buffers, **fresh}
