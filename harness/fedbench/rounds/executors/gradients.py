"""The gradients of all clients of a stack at once: of any loss by vmap, of a linear softmax head in closed form.

Here is also how much memory clients take who train at once, and how much there is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NoReturn, cast

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedbench.core.method.tasks import ClientTask, LocalStep
from fedbench.core.types import Batch, InputSource, LabelledBatch, Tensors, UnlabelledBatch
from fedbench.models.inputs import FeatureInputs
from fedbench.rounds.executors.graphs import Graphs, NoTerms, OneClientOnly, can_record
from fedbench.rounds.executors.stack import PerClient, Stack, StackedBatch, flat_of, like, mapped, rows_of
from fedbench.rounds.metrics import size_in_bytes
from fedbench.toolkit.local_training import batches_of, step_loss

Losses = Callable[[LocalStep], Tensor]


class Missing:
    """Placeholder for something that only a single client has; any use of it is refused."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, *_: object) -> NoReturn:
        raise OneClientOnly(f"its loss reads the task's {self._name}")

    @classmethod
    def __torch_function__(
        cls, function: object, types: object, args: tuple[object, ...] = (), _: object = None
    ) -> None:
        name = next((one._name for one in args if isinstance(one, cls)), "own tensors")
        raise OneClientOnly(f"its loss reads the task's {name}")

    __getattr__ = __getitem__ = __len__ = __int__ = __float__ = __index__ = __iter__ = __bool__ = __format__ = _refuse
    __eq__ = __hash__ = __lt__ = __le__ = __gt__ = __ge__ = __str__ = __neg__ = __add__ = __radd__ = _refuse
    __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = __rpow__ = _refuse
    __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = _refuse


class _Later(Missing):
    """The number of a step that is not the first of its round; no more is known of it."""

    def __bool__(self) -> bool:  # type: ignore[override]
        return True

    def __eq__(self, other: object) -> bool:  # type: ignore[override]
        return False if other == 0 else self._refuse()

    __hash__ = None  # type: ignore[assignment]


def any_after(number: int) -> int:
    """``number`` of a step for a graph: 0, or what stands for any later one."""
    return cast(int, _Later("number of the step")) if number else 0


def in_any_round(task: ClientTask) -> ClientTask:
    """``task`` for a graph, which is replayed in other rounds."""
    return replace(task, round=cast(int, Missing("round")))


LOSS, BUFFER = "loss of the step", "buffer "
"""How a step's loss and its running statistics are named among its gradients."""
Padding = Literal["by sample", "by size"]
"""How batches of unequal sizes are treated. ``by sample`` averages with a mask, which is right for a loss that is a
mean over samples. ``by size`` takes clients whose batches have one size together, which is right for any loss."""


class Vectorised:
    """Any loss that is a pure function of the step's tensors, over a client axis (`torch.func.vmap`), by autograd."""

    def __init__(self, padding: Padding, loss: Losses = step_loss) -> None:
        self.padding: Padding = padding
        self._loss = loss
        self.description = f"vectorised, {padding}"
        """Names this way of computing gradients among those that are tried."""
        self.graphs = Graphs()
        self.is_due = True
        """Whether the next step that is replayed is compared with the step itself."""
        self.by_autograd = self
        """The part of the gradients that autograd computes."""

    @property
    def name(self) -> str:
        """What the log calls it."""
        return f"cohort{self.graphs.told}"

    def __call__(self, stack: Stack, weights: Tensors, batch: StackedBatch) -> tuple[Tensors, Tensor]:
        """Gradients (a, ...) by name and losses (a,) at ``weights`` (a, ...)."""
        if self.padding == "by sample" or not batch.is_ragged:
            return self._replayed(stack, weights, batch)
        like_them = next(iter(weights.values()))
        losses = torch.zeros(len(batch.sizes), dtype=like_them.dtype, device=like_them.device)
        gradients: Tensors = {}
        answered = 0
        for part in batch.by_size(like_them.device):
            own = {name: part.own(weight) for name, weight in weights.items()}
            try:
                found, of_part = self._replayed(stack, own, part)
            except NoTerms:  # in this part of the batch the loss has none
                continue
            answered += 1
            losses[part.clients] = of_part.to(losses.dtype)
            for name, gradient in found.items():
                gradients.setdefault(name, torch.zeros_like(weights[name]))[part.clients] = gradient
        if not answered:
            raise NoTerms
        return gradients, losses

    def _replayed(self, stack: Stack, weights: Tensors, batch: StackedBatch) -> tuple[Tensors, Tensor]:
        """Gradients and losses of a batch that one call computes, by a graph where there is one."""
        template, samples = shared_task(stack.tasks[0]), stack.samples(batch)
        tensors: PerClient = {"weights": weights, "client": mapped(stack.clients, batch.own), "samples": samples}
        tensors["buffers"] = mapped(stack.buffers, batch.own)
        tensors["server"] = {name: value for name, value in template.buffers.items() if name not in stack.buffers}
        if batch.is_ragged:
            tensors["mask"] = stack.mask(batch)
        found, first = None, next(iter(weights.values()))
        if can_record(first.device) and first.dtype == torch.float32:
            bare = replace(in_any_round(template), received={}, payload={}, state={})
            found = self.graphs.replayed(
                (id(template.model), template.exchange, batch.number == 0),
                tensors,
                partial(self._computed, bare, any_after(batch.number)),
                lambda: self._computed(template, batch.number, {**tensors, "buffers": _copies(tensors["buffers"])}),
                is_compared=self.is_due,
            )
            self.is_due &= found is None
        if found is None:
            found = self._computed(template, batch.number, tensors)
        for name, buffer in stack.buffers.items():
            buffer[batch.clients] = found.pop(BUFFER + name)
        losses = found.pop(LOSS)
        return found, losses

    def _computed(self, template: ClientTask, number: int, tensors: PerClient) -> Tensors:
        """Gradients (a, ...) by name, losses (a,) and running statistics (a, ...), which are changed in place."""
        leaves = {name: value.detach().requires_grad_() for name, value in tensors["weights"].items()}
        arguments = {**tensors, "weights": leaves}
        template = replace(template, buffers=arguments.pop("server"))

        def of_client(*flat: Tensor) -> Tensor:
            own = like(arguments, flat)
            task, samples = task_of(template, own["client"]), own["samples"]
            kept = {**template.buffers, **own["buffers"]}

            def of_batch(samples: PerClient) -> Tensor:
                return self._loss(LocalStep(own["weights"], kept, batch_of(samples), task, number))

            if "mask" not in own:
                return of_batch(samples)
            of_samples = vmap(lambda *flat: of_batch(like(samples, [tensor[None] for tensor in flat])))
            return cast(Tensor, (of_samples(*flat_of(samples)) * own["mask"]).sum() / own["mask"].sum())

        # vmap cannot batch the CPU's attention
        inputs = tensors["samples"]["inputs"]
        is_tower = inputs.ndim == 5 and inputs.device.type == "cpu"
        with sdpa_kernel(SDPBackend.MATH) if is_tower else nullcontext():
            # flat, since vmap takes longer to look through nested mappings than for a small step
            losses = vmap(of_client)(*flat_of(arguments))
        all_gradients = torch.autograd.grad(losses.sum(), list(leaves.values()), allow_unused=True)
        found = {name: g for name, g in zip(leaves, all_gradients, strict=True) if g is not None}
        found |= {BUFFER + name: buffer for name, buffer in tensors["buffers"].items()}
        return {**found, LOSS: losses.detach()}


def _copies(tensors: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


class ClosedForm:
    """Cross-entropy of a linear head on fixed features: with R = s (softmax(o) - onehot(y)) / b, the gradient of W is
    R^T z and that of b the sum of R's rows. Terms that methods add to the loss are differentiated by autograd.
    """

    def __init__(self, features: Tensor, terms: Vectorised | None) -> None:
        """``features`` (n, d) are z of every row of the input table."""
        self._features = features
        self._terms = self.by_autograd = terms
        self.padding: Padding | None = None if terms is None else terms.padding
        self.description = f"closed form, terms {self.padding}"

    @property
    def name(self) -> str:
        """What the log calls it."""
        return f"cohort, gradients in closed form{self._terms.graphs.told if self._terms else ''}"

    def __call__(self, stack: Stack, weights: Tensors, batch: StackedBatch) -> tuple[Tensors, Tensor]:
        head = stack.tasks[0].model.head
        assert head is not None
        inputs, labels = rows_of(self._features, stack.rows(batch)), stack.labels(batch)[..., None]
        logits = torch.baddbmm(weights[head.bias][:, None], inputs, weights[head.weight].transpose(1, 2))
        logits = logits.mul_(head.scale) if head.scale != 1 else logits
        likelihoods = torch.log_softmax(logits, dim=2)
        losses = -likelihoods.gather(2, labels)[..., 0]
        residuals = likelihoods.exp_()
        residuals.scatter_add_(2, labels, torch.full_like(labels, -1, dtype=residuals.dtype))
        shares = torch.full_like(losses, head.scale / batch.sizes[0])
        if batch.is_ragged:
            mask = stack.mask(batch)
            shares = mask * (head.scale / mask.sum(dim=1, keepdim=True))
        residuals.mul_(shares[..., None])
        gradients = {head.weight: residuals.transpose(1, 2) @ inputs, head.bias: residuals.sum(dim=1)}
        losses = (losses * shares).sum(dim=1) / head.scale
        if self._terms is None:
            return gradients, losses
        try:
            further, added = self._terms(stack, weights, batch)
        except NoTerms:
            return gradients, losses
        return {name: g + further[name] if name in further else g for name, g in gradients.items()}, losses + added


def head_features(task: ClientTask) -> Tensor | None:
    """Features z (n, d) of every row of the input table, if a linear head on them is all that the model trains; else
    None."""
    model = task.model
    if model.head is None or set(task.received) != {model.head.weight, model.head.bias}:
        return None
    if not isinstance(task.inputs, FeatureInputs):
        return None
    table = task.inputs.features
    with torch.no_grad():
        first = model.forward(task.received, table[:1].float(), True).features
        if first.data_ptr() == table.data_ptr() and torch.equal(first, table[:1]):
            return table
        parts = [model.forward(task.received, part.float(), True).features for part in torch.split(table, 1024)]
    return torch.cat(parts)


def added_terms(step: LocalStep) -> Tensor:
    """The sum of `loss_terms` alone, a scalar; NoTerms where no method adds one in this step."""
    terms = step.task.hooks.loss_terms(step=step)
    if not terms:
        raise NoTerms
    return sum(terms[1:], terms[0])


def shared_task(task: ClientTask) -> ClientTask:
    """``task`` with a placeholder for everything that only its client has."""
    return replace(
        task,
        client=cast(int, Missing("client")),
        inputs=cast(InputSource, Missing("inputs")),
        labels=cast(Tensor, Missing("labels")),
        side=cast("dict[str, InputSource]", Missing("side")),
    )


def task_of(template: ClientTask, own: PerClient) -> ClientTask:
    """``template`` with the tensors of a client, who may be the one that vmap stands for; its state can be read, not
    written."""
    return replace(
        template,
        received=own["received"],
        buffers={**template.buffers, **own["buffers"]},
        payload=own["payload"],
        class_counts=own.get("class_counts"),
        state=cast(Any, MappingProxyType({method: MappingProxyType(kept) for method, kept in own["state"].items()})),
    )


def batch_of(samples: PerClient) -> Batch:
    """One client's batch of its ``samples``."""
    inputs, index, side = samples["inputs"], samples["index"], samples["side"]
    if "labels" in samples:
        return LabelledBatch(inputs, index, samples["labels"], side)
    return UnlabelledBatch(inputs, index, side)


MEMORY = 2 * 2**30
"""The approximate limit of bytes for clients that train at once on a CPU; a larger cohort is trained in parts."""


def bytes_of_a_client(gradients: Vectorised | ClosedForm, tasks: Sequence[ClientTask]) -> int:
    """The approximate bytes of one client: what autograd saves for it in a step, the step's samples and logits, the
    tables of its samples, and its weights, gradients and moments."""
    saved = []
    for clients in (tasks[:1], tasks[:2]):
        stack, seen = Stack(clients), dict[int, int]()

        def pack(tensor: Tensor, seen: dict[int, int] = seen) -> Tensor:
            seen[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            gradients(stack, {name: value.clone() for name, value in stack.weights.items()}, stack.batch(0))
        saved.append(sum(seen.values()))
    stack = Stack(tasks[:1])
    step, classes = stack.samples(stack.batch(0)), max(t.shape[0] for t in tasks[0].received.values() if t.ndim)
    samples = sum(t.numel() * t.element_size() for t in flat_of(step)) + 12 * int(step["index"].numel()) * classes
    tables = 3 * 8 * sum(len(batch) for batch in batches_of(tasks[0]))
    return max(saved[1] - saved[0], 0) + samples + tables + 4 * size_in_bytes(tasks[0].received)


def budget(task: ClientTask) -> int:
    """Bytes for the clients who train at once: ``MEMORY``, or a third of a card's own.

    A graph keeps what a step saves as well.
    """
    device = next(iter(task.received.values())).device
    return torch.cuda.get_device_properties(device).total_memory // 3 if device.type == "cuda" else MEMORY
