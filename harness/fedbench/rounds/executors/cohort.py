"""The cohort executor: every local step is taken for all clients of the cohort at once.

How a step's gradients are made is planned per kind of client and tried out first: on two clients they must be those of
the clients' own losses. In every round the gradients of some clients in some steps are compared again, since a loss may
change. Where they differ, or anything else goes wrong, the sequential executor trains these clients, and the log says
why; nothing is kept of what was trained at once.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from fedbench.core.errors import FedbenchError, Unworkable
from fedbench.core.method.tasks import ClientTask, LocalStep
from fedbench.core.randomness import torch_generator
from fedbench.core.types import Batch, Tensors, Update
from fedbench.core.wording import counted
from fedbench.models.inputs import ImageInputs
from fedbench.plugins.assembly import Assembly
from fedbench.plugins.guards import Snapshot
from fedbench.rounds.executors.gradients import (
    ClosedForm,
    Padding,
    Vectorised,
    added_terms,
    batch_of,
    budget,
    bytes_of_a_client,
    head_features,
)
from fedbench.rounds.executors.graphs import Changed, OneClientOnly
from fedbench.rounds.executors.sequential import Sequential, completed
from fedbench.rounds.executors.stack import Stack, StackedBatch, StackedOptimiser, mapped, own_buffers, signature
from fedbench.toolkit.fedavg import FedAvg
from fedbench.toolkit.local_training import batch_at, batches_of, step_loss, trained

Gradients = Vectorised | ClosedForm
Kind = tuple[object, ...]

FEWER = 4
"""For a loss over whole batches: how many times fewer gradients make up for stacking them. FedCLIP on the suite
longtail has 2 times fewer and takes 1.3 times as long as one by one."""
FEWER_ON_IMAGES = 3
"""The same for networks on images: a step of ten clients takes 2.7 to 2.9 times one's on an H200."""
TOLERANCE = 1e-4
"""The largest difference between gradients, relative to the largest value: rounding gives 1e-5 at most."""
LOOSE = {"float32": 0.05, "tf32": 0.8, "bfloat16": 0.8}
"""The same for gradients as they are used that are also compared in float64 (see `_is_rough`): of 90 to 261 comparisons
each of three networks the largest was 5e-3 in float32 and 0.5 in bfloat16. tf32 has bfloat16's, and no measurement."""
SAMPLES = 8
"""The most images of a client in a comparison in float64, which many cards compute at a 64th of the speed."""


class Disagreement(Exception):
    """Gradients made at once are not those of a client's own loss."""


@dataclass(frozen=True)
class Plan:
    """How clients of one kind are trained: by ``gradients``, so many at once; None: one by one, for ``reason``."""

    gradients: Gradients | None
    at_once: int = 1
    reason: str = ""

    def as_text(self) -> str:
        """The plan as text, to be read by `Cohort.recall`."""
        return json.dumps(["" if self.gradients is None else self.gradients.description, self.at_once, self.reason])


class Cohort:
    """Trains the clients of a cohort at once where their loss allows it, else as ``one_by_one`` does."""

    def __init__(self, assembly: Assembly, one_by_one: Sequential, *, strict: bool) -> None:
        """``strict`` turns a loss that cannot be trained at once into a FedbenchError."""
        self._assembly = assembly
        self._one_by_one = one_by_one
        self._strict = strict
        self._plans: dict[Kind, Plan] = {}
        self._known: dict[str, str] = {}
        self.description = "cohort"
        """The executor that trained last, with the reason if it had to be the sequential one; for the log."""

    def told(self, reason: str) -> str:
        return self._one_by_one.told(reason)

    def known(self) -> dict[str, str]:
        """The plan of every kind of client met so far; checkpoints store it, so that a resumed run decides alike."""
        return self._known | {_lasting(kind): plan.as_text() for kind, plan in self._plans.items()}

    def recall(self, known: Mapping[str, str]) -> None:
        """Train kinds of clients as in ``known`` from now on, without trying out how."""
        self._known = dict(known)

    def train(self, tasks: Sequence[ClientTask]) -> list[Update]:
        """One update a task, in their order."""
        kinds: dict[Kind, list[int]] = {}
        for position, task in enumerate(tasks):
            kinds.setdefault(signature(task), []).append(position)
        updates: dict[int, Update] = {}
        by_way: dict[str, int] = {}
        for kind, positions in kinds.items():
            # what the server alone changes is another tensor in every round, and no reason for another plan
            trained_alike, how = self._train_alike(kind[:-1], [tasks[position] for position in positions])
            updates |= dict(zip(positions, trained_alike, strict=True))
            by_way[how] = by_way.get(how, 0) + len(positions)
        self.description = (
            next(iter(by_way))
            if len(by_way) == 1
            else "; ".join(f"{counted(n, 'client')} {how}" for how, n in by_way.items())
        )
        return [updates[position] for position in range(len(tasks))]

    def _train_alike(self, kind: Kind, tasks: list[ClientTask]) -> tuple[list[Update], str]:
        """The updates of clients of one kind, and a description of how they were trained."""
        if len(tasks) == 1:
            return self._one_by_one.train(tasks), self.told("one client alone")
        plan = self._plans.get(kind) or self._recalled(kind, tasks[0]) or self._planned(tasks)
        if plan.gradients is not None:
            try:
                updates = _trained(tasks, plan.gradients, plan.at_once)
            except Unworkable:
                raise
            except Exception as error:
                # whatever is wrong with the loss itself, the sequential executor meets as well
                plan = Plan(None, reason=f"its loss is not what it was in the trial ({_in_words(error)})")
        self._plans[kind] = plan
        if plan.gradients is not None:
            return [completed(task, update) for task, update in zip(tasks, updates, strict=True)], plan.gradients.name
        if self._strict:
            raise FedbenchError(
                f"the cohort executor cannot train {tasks[0].spec.method}: {plan.reason}; use executor=auto."
            )
        return self._one_by_one.train(tasks), self.told(plan.reason)

    def _recalled(self, kind: Kind, task: ClientTask) -> Plan | None:
        """The plan that was made before an interruption; None for a kind of client that was not met then."""
        recorded = self._known.get(_lasting(kind))
        if recorded is None:
            return None
        gradients, at_once, reason = json.loads(recorded)
        if not gradients:
            return Plan(None, reason=reason)
        return next((Plan(way, at_once) for way in self._candidates(task) if way.description == gradients), None)

    def _planned(self, tasks: list[ClientTask]) -> Plan:
        """The fastest way to train ``tasks`` that gives the gradients of their own losses."""
        reason = ""
        inputs = tasks[0].inputs
        if isinstance(inputs, ImageInputs):  # those in files would be read anew in every epoch
            first = inputs.images.read(torch.zeros(1, dtype=torch.int64))
            if first.device.type != inputs.device.type:
                return Plan(None, reason="its images are not on the device")
        largest = sorted(tasks, key=lambda task: -len(task.inputs))[:2]
        for gradients in self._candidates(tasks[0]):
            try:
                with warnings.catch_warnings():
                    # an operation that vmap cannot batch would be repeated client by client, slower than sequentially
                    warnings.filterwarnings("error", message=".*performance drop.*")
                    agreed = passes_trial(gradients, largest)
                if agreed and gradients.padding == "by size" and not _pays(tasks):
                    return Plan(None, reason="its loss is over whole batches, and few clients have batches of one size")
                if agreed:
                    at_once = budget(tasks[0]) // bytes_of_a_client(gradients, largest)
                    if at_once < 2 and isinstance(inputs, ImageInputs):
                        return Plan(None, reason="images of two clients need more memory than clients at once may take")
                    return Plan(gradients, max(at_once, 1))
                reason = reason or "trained at once, it would get other gradients"
            except Unworkable:
                raise
            except OneClientOnly as error:
                reason = str(error)
            except Exception as error:
                # vmap refuses branches on data, for one; what is really wrong, the sequential executor will say
                reason = f"its loss cannot be vectorised ({_in_words(error)})"
        return Plan(None, reason=reason)

    def _candidates(self, task: ClientTask) -> list[Gradients]:
        """The ways to try, the fastest first."""
        paddings: list[Padding] = ["by sample", "by size"]
        if isinstance(task.inputs, ImageInputs):
            return [Vectorised("by size")]
        vectorised = [Vectorised(padding) for padding in paddings]
        if task.training.precision == "bfloat16":
            return [*vectorised]  # the closed form knows no autocast
        plain = all(self._assembly.answers_first(hook) == FedAvg.name for hook in ("local_objective", "local_loss"))
        if not plain or task.labels is None:
            return [*vectorised]
        features = head_features(task)
        if features is None:
            return [*vectorised]
        if not self._assembly.answers("loss_terms"):
            return [ClosedForm(features, None), *vectorised]
        return [*(ClosedForm(features, Vectorised(padding, added_terms)) for padding in paddings), *vectorised]


def _lasting(kind: Kind) -> str:
    """A hash of the kind that is the same in other processes: it leaves out addresses of tables."""
    shapes, states, _, known = kind
    return hashlib.sha256(repr((shapes, states, known)).encode()).hexdigest()


def _trained(tasks: Sequence[ClientTask], gradients: Gradients, at_once: int) -> list[Update]:
    """The updates of clients, so many of whom train at once; anew without graphs where one is not what the step is."""
    chunks, by_autograd = [tasks[at : at + at_once] for at in range(0, len(tasks), at_once)], gradients.by_autograd
    if by_autograd is not None:
        by_autograd.is_due = True
    try:
        return [update for chunk in chunks for update in train_stack(chunk, gradients)]
    except Changed as error:
        assert by_autograd is not None
        by_autograd.graphs.stop(error)
        return [update for chunk in chunks for update in train_stack(chunk, gradients)]


def train_stack(tasks: Sequence[ClientTask], gradients: Gradients) -> list[Update]:
    """The updates of clients trained at once, in the order of ``tasks``.

    Raises Unworkable where one diverges, and Disagreement where ``gradients`` are not those of a client's own loss.
    """
    first = tasks[0]
    stack = Stack(tasks)
    optimiser = StackedOptimiser(first.training, stack.weights, first.round, first.model.lr_factors, first.model.own)
    total = torch.zeros(len(tasks), device=next(iter(stack.weights.values())).device)
    batches = [stack.batch(step) for step in range(stack.steps[0])]
    compared = to_compare(batches, first.round, once=gradients.padding is None)
    for batch in batches:
        active = {name: value[: len(batch.sizes)] for name, value in stack.weights.items()}
        computed, losses = gradients(stack, active, batch)
        if batch.number in compared and not is_own(stack, active, batch, computed, gradients, compared[batch.number]):
            raise Disagreement(f"other gradients in step {batch.number + 1}")
        optimiser.step(computed)
        total[: len(losses)] += losses
    stack.require_unchanged()
    mean_losses = [loss / steps for loss, steps in zip(total.tolist(), stack.steps, strict=True)]
    updates: list[Update | None] = [None] * len(tasks)
    for i, (task, position) in enumerate(zip(stack.tasks, stack.order, strict=True)):
        # copies, since whoever keeps a view of one client's weights would keep those of all
        weights = {name: value[i].clone() for name, value in stack.weights.items()}
        buffers = task.buffers | {name: value[i].clone() for name, value in stack.buffers.items()}
        updates[position] = trained(task, weights, buffers, mean_losses[i])
    return [update for update in updates if update is not None]


def to_compare(batches: Sequence[StackedBatch], round: int, *, once: bool = False) -> dict[int, int]:
    """Steps whose gradients are compared with those of a client's own loss, and which client's: (step, position).

    The last and, in turn from round to round, another of those where a client's batch is padded, with two samples or
    more: on one sample a loss over pairs looks like a mean. Clients take turns as well. Without padding any will do.
    The last alone, with ``once``, for gradients that no method has a part in.
    """
    padded = {b.number: [i for i, size in enumerate(b.sizes) if 2 <= size < max(b.sizes)] for b in batches}
    choices = {step: clients for step, clients in padded.items() if clients}
    choices = choices or {b.number: list(range(len(b.sizes))) for b in batches}
    steps = sorted(choices)
    chosen = {steps[-1]} if once else {steps[(round - 1) % len(steps)], steps[-1]}
    return {step: choices[step][(round + turn) % len(choices[step])] for turn, step in enumerate(sorted(chosen))}


def passes_trial(gradients: Gradients, tasks: Sequence[ClientTask]) -> bool:
    """Whether ``gradients`` are those of two clients' own losses, on a batch of one and a shorter of the other.

    A loss that is no mean over its samples is seen by the shorter batch. The trial is near the received weights, not
    at them, where a term that pulls towards them has no gradient.
    """
    batches = [batches_of(task)[0] for task in tasks]
    if isinstance(tasks[0].inputs, ImageInputs):
        batches = [batch[:SAMPLES] for batch in batches]
    batches[1] = batches[1][: (len(batches[0]) + 1) // 2]
    with InFloat64() if _is_rough(tasks[0]) else nullcontext():
        stack = Stack(tasks, [[batch] for batch in batches])
        batch = stack.batch(0)
        if gradients.padding == "by sample" and not (batch.is_ragged and min(batch.sizes) >= 2):
            return False  # samples too few to see it
        generator = torch_generator(0, "trial of the cohort executor")
        weights = {name: _nearby(value, generator) for name, value in stack.weights.items()}
        return matches_own_loss(stack, weights, batch, gradients(stack, weights, batch)[0], range(len(tasks)))


def is_own(
    stack: Stack, weights: Tensors, batch: StackedBatch, computed: Tensors, gradients: Gradients, client: int
) -> bool:
    """Whether the gradients ``computed`` of a batch are those of the own loss of ``client`` (a position).

    Where rounding shows they have to be so roughly, and exactly where two clients' are made anew in float64.
    """
    is_rough = _is_rough(stack.tasks[0])
    tolerance = LOOSE[stack.tasks[0].training.precision] if is_rough else TOLERANCE
    if not matches_own_loss(stack, weights, batch, computed, [client], tolerance):
        return False
    if not is_rough:
        return True
    chosen = sorted({client, 0 if client else len(batch.sizes) - 1})
    with InFloat64():
        few = stack.of(chosen, SAMPLES if stack.has_images else None)
        at = {name: value[chosen] for name, value in weights.items()}
        step = few.batch(batch.number)
        return matches_own_loss(few, at, step, gradients(few, at, step)[0], [chosen.index(client)])


def _is_rough(task: ClientTask) -> bool:
    """Whether rounding shows in gradients, so that they are compared in float64.

    It does in a lower precision. In float32 a value next to a kink of a network's ReLU or max-pooling falls to either
    side by rounding, which moves a gradient by up to 3e-3 of the largest (tests/bench/gpu.md).
    """
    return isinstance(task.inputs, ImageInputs) or task.training.precision != "float32"


class InFloat64(TorchFunctionMode):
    """Within it every operation reads its floating-point tensors in float64: weights, images and what is frozen."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # what is written to in place stays itself
        name = function.__name__
        kept = 1 if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) else 0
        wide = tree_map(_widened, (args[kept:], kwargs or {}))
        return function(*args[:kept], *wide[0], **wide[1])


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    return torch.float64 if value is torch.float32 else value


def matches_own_loss(
    stack: Stack,
    weights: Tensors,
    batch: StackedBatch,
    computed: Tensors,
    clients: Iterable[int],
    tolerance: float = TOLERANCE,
) -> bool:
    """Whether the gradients ``computed`` (a, ...) of a batch are those of the own losses of ``clients`` (positions).

    Raises OneClientOnly where a loss changes what its client keeps."""
    for client in clients:
        task, index = stack.tasks[client], stack.index(batch, client)
        own = {name: value[client].detach().clone().requires_grad_() for name, value in weights.items()}
        kept = {method: {name: t.clone() for name, t in held.items()} for method, held in task.state.items()}
        scratch = replace(task, state={method: dict(held) for method, held in kept.items()})
        before = Snapshot({"task": task})
        alone = _as_stacked(stack, batch, client) if stack.has_images else batch_at(task, index, torch.Generator())
        buffers = task.buffers | {name: value.clone() for name, value in own_buffers(task).items()}
        loss = step_loss(LocalStep(own, buffers, alone, scratch, batch.number))
        before.require_unchanged(task.spec.method, "local_loss or loss_terms")
        wanted = torch.autograd.grad(loss, list(own.values()), allow_unused=True)
        if not _is_untouched(kept, scratch.state):
            raise OneClientOnly("its loss changes what the client keeps")
        for name, gradient in zip(own, wanted, strict=True):
            if (gradient is None) != (name not in computed):
                return False
            if gradient is not None and not _close(computed[name][client], gradient, tolerance):
                return False
    return True


def _as_stacked(stack: Stack, batch: StackedBatch, client: int) -> Batch:
    """One client's batch with the draws and in the precision of the stack."""
    size = batch.sizes[client]
    return batch_of(mapped(stack.samples(batch), lambda table: table[client, :size]))


def _pays(tasks: Sequence[ClientTask]) -> bool:
    """Whether taking only batches of one size together saves enough gradients."""
    stack = Stack(tasks)
    at_once = sum(len(set(stack.batch(step).sizes)) for step in range(stack.steps[0]))
    return sum(stack.steps) >= (FEWER_ON_IMAGES if stack.has_images else FEWER) * at_once


def _nearby(value: Tensor, generator: torch.Generator) -> Tensor:
    """``value`` moved by about a hundredth of its size, alike on every device."""
    noise = torch.randn(value.shape, generator=generator).to(value)
    return value + 0.01 * (value.square().mean().sqrt() + 1e-3) * noise


def _close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    return bool((one - other).abs().max() <= tolerance * other.abs().max() + 1e-6)


def _is_untouched(before: Mapping[str, Tensors], after: Mapping[str, Tensors]) -> bool:
    """Whether the same tensors are there, none of which was written to."""
    if before.keys() != after.keys() or any(before[method].keys() != after[method].keys() for method in before):
        return False
    pairs = [(t, after[method][name]) for method, held in before.items() for name, t in held.items()]
    return all(now is then and now._version == 0 for then, now in pairs)


def _in_words(error: Exception) -> str:
    """The error in a sentence of this package; records contain no message of Python or PyTorch."""
    if isinstance(error, OneClientOnly | Changed | Disagreement | FedbenchError):
        return (str(error).splitlines() or ["it gives no reason"])[0]
    if isinstance(error, TypeError) and "mappingproxy" in str(error):
        return "it changes what the client keeps"
    if isinstance(error, torch.OutOfMemoryError):
        return "the card has too little memory for them at once"
    return "it does what PyTorch cannot do for many clients at once"
