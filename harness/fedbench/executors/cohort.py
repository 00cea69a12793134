"""The cohort executor: every local step is taken for all clients of the cohort at once.

How a step's gradients are made is chosen per kind of client and tried out first: on two clients they must agree with
those of the clients' own losses. In every round one gradient of one client is compared again, since a loss may change.
Where no way agrees, the sequential executor trains these clients, and the log says why.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedbench.errors import FedbenchError
from fedbench.executors.gradients import ClosedForm, OneClientOnly, Ragged, Vectorised, added_terms, head_features
from fedbench.executors.sequential import Sequential, completed
from fedbench.executors.stack import Stack, StackedBatch, StackedOptimiser, signature
from fedbench.hookspecs import ClientTask, LocalStep
from fedbench.metrics import size_in_bytes
from fedbench.randomness import torch_generator
from fedbench.training import batch_at, batches_of, step_loss, trained
from fedbench.types import Tensors, Update

Gradients = Vectorised | ClosedForm

MEMORY = 2 * 2**30
"""Bytes that the clients who train at once may take together on a CPU; a larger cohort is trained in parts."""
FEWER = 4
"""Where a loss is over whole batches: how many times fewer gradients make up for their being stacked. FedCLIP on the
suite longtail has 2 times fewer and takes 1.3 times as long as one by one."""
TOLERANCE = 1e-3
"""By how much gradients may differ in the trial, relative to the largest: rounding gives 1e-5 at most."""


class Disagreement(Exception):
    """Gradients made at once are not those of a client's own loss."""


@dataclass(frozen=True)
class Way:
    """How clients of one kind are trained: by ``gradients``, so many at once; None: one by one, for ``reason``."""

    gradients: Gradients | None
    at_once: int = 1
    reason: str = ""


class Cohort:
    """Trains the clients of a cohort at once where their loss allows it, else as ``one_by_one`` does."""

    def __init__(self, owners: Mapping[str, str], one_by_one: Sequential, *, strict: bool) -> None:
        """``strict`` turns a loss that cannot be trained at once into a FedbenchError."""
        self._owners = owners
        self._one_by_one = one_by_one
        self._strict = strict
        self._ways: dict[tuple[object, ...], Way] = {}
        self.told = "cohort"

    def train(self, tasks: Sequence[ClientTask]) -> list[Update]:
        """One update a task, in their order."""
        kinds: dict[tuple[object, ...], list[int]] = {}
        for position, task in enumerate(tasks):
            kinds.setdefault(signature(task), []).append(position)
        updates: dict[int, Update] = {}
        for kind, positions in kinds.items():
            members = [tasks[position] for position in positions]
            trained = self._train_alike(kind, members)
            updates |= dict(zip(positions, trained, strict=True))
        return [updates[position] for position in range(len(tasks))]

    def _train_alike(self, kind: tuple[object, ...], tasks: list[ClientTask]) -> list[Update]:
        """The updates of clients of one kind."""
        if len(tasks) == 1:
            return self._one_by_one.train(tasks)
        if kind in self._ways:
            try:
                return self._carry_out(self._ways[kind], tasks)
            except Disagreement:
                pass  # the loss is no longer what was tried out
        way = self._ways[kind] = self._way(tasks)
        self.told = f"sequential: {way.reason}" if way.gradients is None else "cohort"
        if self._strict and way.gradients is None:
            raise FedbenchError(
                f"the cohort executor cannot train {tasks[0].spec.method}: {way.reason}; use executor=auto."
            )
        return self._carry_out(way, tasks)

    def _carry_out(self, way: Way, tasks: list[ClientTask]) -> list[Update]:
        if way.gradients is None:
            return self._one_by_one.train(tasks)
        updates: list[Update] = []
        for part in (tasks[i : i + way.at_once] for i in range(0, len(tasks), way.at_once)):
            updates += train_stack(part, way.gradients)
        return [completed(task, update) for task, update in zip(tasks, updates, strict=True)]

    def _way(self, tasks: list[ClientTask]) -> Way:
        """The fastest way to train ``tasks`` that gives the sequential executor's gradients."""
        reason = ""
        largest = sorted(tasks, key=lambda task: -len(task.inputs))[:2]
        for gradients in self._candidates(tasks[0]):
            try:
                with warnings.catch_warnings():
                    # an operation that vmap cannot batch would be repeated client by client, slower than sequentially
                    warnings.filterwarnings("error", message=".*performance drop.*")
                    agreed = is_right(gradients, largest)
                if agreed and gradients.ragged == "by size" and not _pays(tasks):
                    return Way(None, reason="its loss is over whole batches, and few clients have batches of one size")
                if agreed:
                    return Way(gradients, max(budget(tasks[0]) // bytes_of_a_client(gradients, largest), 1))
                reason = reason or "its loss is no function of one client's batch alone"
            except OneClientOnly as error:
                reason = str(error)
            except (RuntimeError, TypeError, ValueError, UserWarning, FedbenchError) as error:
                # vmap refuses branches on data, and writing into the state is refused above
                reason = f"its loss cannot be vectorised ({str(error).splitlines()[0][:120]})"
        return Way(None, reason=reason)

    def _candidates(self, task: ClientTask) -> list[Gradients]:
        """The ways to try, the fastest first."""
        ways: list[Ragged] = ["by sample", "by size"]
        vectorised = [Vectorised(ragged) for ragged in ways]
        if self._owners["local_loss"] != "fedavg" or task.labels is None:
            return [*vectorised]
        features = head_features(task)
        if features is None:
            return [*vectorised]
        if "loss_terms" not in self._owners:
            return [ClosedForm(features, None), *vectorised]
        return [*(ClosedForm(features, Vectorised(ragged, added_terms)) for ragged in ways), *vectorised]


def train_stack(tasks: Sequence[ClientTask], gradients: Gradients) -> list[Update]:
    """The updates of clients trained at once, in the order of ``tasks``.

    Raises Unworkable where one diverges, and Disagreement where ``gradients`` are not those of a client's own loss.
    """
    first = tasks[0]
    stack = Stack(tasks)
    optimiser = StackedOptimiser(first.training, stack.weights, first.round, first.model.lr_factors)
    total = torch.zeros(len(tasks), device=next(iter(stack.weights.values())).device)
    batches = [stack.batch(step) for step in range(stack.steps[0])]
    compared = next((batch for batch in batches if batch.is_ragged), batches[0])
    for batch in batches:
        active = {name: value[: len(batch.sizes)] for name, value in stack.weights.items()}
        found, losses = gradients(stack, active, batch)
        if batch is compared and not agrees(stack, active, batch, found, [batch.sizes.index(min(batch.sizes))]):
            raise Disagreement
        optimiser.step(found)
        total[: len(losses)] += losses
    mean_losses = [loss / steps for loss, steps in zip(total.tolist(), stack.steps, strict=True)]
    by_client = {
        task.client: trained(task, {name: value[i] for name, value in stack.weights.items()}, {}, mean_losses[i])
        for i, task in enumerate(stack.tasks)
    }
    return [by_client[task.client] for task in tasks]


def is_right(gradients: Gradients, tasks: Sequence[ClientTask]) -> bool:
    """Whether ``gradients`` agrees with two clients' own losses, on a batch of one and a shorter of the other.

    A loss that is no mean over its samples is seen by the shorter batch. The trial is near the received weights, not
    at them, where a term that pulls towards them has no gradient.
    """
    batches = [batches_of(task)[0] for task in tasks]
    batches[1] = batches[1][: (len(batches[0]) + 1) // 2]
    stack = Stack(tasks, [[batch] for batch in batches])
    batch = stack.batch(0)
    if gradients.ragged == "by sample" and not batch.is_ragged:
        return False  # samples too few to see it
    generator = torch_generator(0, "trial of the cohort executor")
    weights = {name: _nearby(value, generator) for name, value in stack.weights.items()}
    found, _ = gradients(stack, weights, batch)
    return agrees(stack, weights, batch, found, range(len(tasks)))


def agrees(stack: Stack, weights: Tensors, batch: StackedBatch, found: Tensors, clients: Sequence[int]) -> bool:
    """Whether the gradients ``found`` (a, ...) of a batch are those of the own losses of ``clients`` (positions)."""
    for client in clients:
        task, index = stack.tasks[client], stack.index(batch, client)
        own = {name: value[client].detach().clone().requires_grad_() for name, value in weights.items()}
        scratch = replace(task, state={method: dict(kept) for method, kept in task.state.items()})
        loss = step_loss(LocalStep(own, {}, batch_at(task, index, torch.Generator()), scratch, batch.number))
        wanted = torch.autograd.grad(loss, list(own.values()), allow_unused=True)
        for name, gradient in zip(own, wanted, strict=True):
            if (gradient is None) != (name not in found):
                return False
            if gradient is not None and not _close(found[name][client], gradient):
                return False
    return True


def bytes_of_a_client(gradients: Gradients, tasks: Sequence[ClientTask]) -> int:
    """What a client adds to the memory of a step: what autograd saves for it, its weights, gradients and moments."""
    saved = []
    for clients in (tasks[:1], tasks[:2]):
        stack, seen = Stack(clients), dict[int, int]()

        def pack(tensor: Tensor, seen: dict[int, int] = seen) -> Tensor:
            seen[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            gradients(stack, {name: value.clone() for name, value in stack.weights.items()}, stack.batch(0))
        saved.append(sum(seen.values()))
    return max(saved[1] - saved[0], 0) + 4 * size_in_bytes(tasks[0].received)


def budget(task: ClientTask) -> int:
    """Bytes for the clients who train at once: ``MEMORY``, or half of an accelerator's own."""
    device = next(iter(task.received.values())).device
    return torch.cuda.get_device_properties(device).total_memory // 2 if device.type == "cuda" else MEMORY


def _pays(tasks: Sequence[ClientTask]) -> bool:
    """Whether taking only batches of one size together saves enough: ``FEWER`` times fewer gradients."""
    stack = Stack(tasks)
    at_once = sum(len(set(stack.batch(step).sizes)) for step in range(stack.steps[0]))
    return sum(stack.steps) >= FEWER * at_once


def _nearby(value: Tensor, generator: torch.Generator) -> Tensor:
    """``value`` moved by about a hundredth of its size, alike on every device."""
    noise = torch.randn(value.shape, generator=generator).to(value)
    return value + 0.01 * (value.square().mean().sqrt() + 1e-3) * noise


def _close(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= TOLERANCE * other.abs().max() + 1e-7)
