"""A stack of clients: tensors along a client axis, batches padded to one size, and one optimiser for all."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from fedbench.core.method.tasks import ClientTask
from fedbench.core.spec import Training
from fedbench.core.types import Tensors
from fedbench.models.inputs import FeatureInputs, ImageInputs
from fedbench.plugins.guards import Snapshot
from fedbench.toolkit.local_training import (
    batches_of,
    cropped_and_flipped,
    drawn_crops,
    each_model,
    learning_rates,
)

PerClient = dict[str, Any]
"""Nested mappings of tensors with a client axis in front: what a loss may read of a client besides its batch."""


@dataclass(frozen=True, eq=False)
class StackedBatch:
    """One local step of some clients of a stack, padded to the largest batch among them, b samples."""

    clients: slice | Tensor
    """The clients of the stack that take this step: the first a, or their positions (a,) on the weights' device."""
    sizes: tuple[int, ...]
    """Number of real samples by client; the padding repeats real samples of the same client."""
    number: int
    """Number of the step within the round, from 0."""

    @property
    def is_ragged(self) -> bool:
        return len(set(self.sizes)) > 1

    def of(self, table: Tensor) -> Tensor:
        """The part (a, b) of a table (K, S, B) by client, step and sample."""
        return table[self.clients, self.number, : max(self.sizes)]

    def own(self, tensor: Tensor) -> Tensor:
        """The part (a, ...) of a tensor (K, ...) by client; the tensor itself where that is all of it."""
        is_whole = isinstance(self.clients, slice) and len(self.sizes) == len(tensor)
        return tensor if is_whole else tensor[self.clients]

    def by_size(self, device: torch.device) -> list[StackedBatch]:
        """The same clients by the size of their batch, none of them padded. Their positions lie on ``device``."""
        parts = []
        for size in sorted(set(self.sizes)):
            chosen = [client for client, own in enumerate(self.sizes) if own == size]
            parts.append(StackedBatch(torch.tensor(chosen, device=device), (size,) * len(chosen), self.number))
        return parts


class Stack:
    """Clients that train at once, those with the most local steps first."""

    def __init__(
        self,
        tasks: Sequence[ClientTask],
        batches: Sequence[list[Tensor]] | None = None,
    ) -> None:
        """``batches`` are each client's own (`batches_of`) by default. All inputs must be rows of one table, or images
        of one source.
        """
        tables = [batches_of(task) for task in tasks] if batches is None else batches
        order = sorted(range(len(tasks)), key=lambda i: -len(tables[i]))
        self.order = order
        """The position of each client of the stack among ``tasks``."""
        self.tasks = [tasks[i] for i in order]
        self._tables = [tables[i] for i in order]
        self.weights = _stacked([task.received for task in self.tasks], keep=False)
        self.buffers = _stacked([own_buffers(task) for task in self.tasks], keep=False)
        """Running statistics (K, ...), which a step changes in place."""
        self.clients: PerClient = {
            "received": _stacked([task.received for task in self.tasks]),
            "payload": _stacked([task.payload for task in self.tasks]),
            "buffers": _stacked([own_buffers(task) for task in self.tasks]),
            "state": {
                name: _stacked([task.state[name] for task in self.tasks], keep=False)
                for name in sorted(self.tasks[0].state)
            },
        }
        if self.tasks[0].class_counts is not None:
            self.clients["class_counts"] = torch.stack([_known(task.class_counts) for task in self.tasks])
        # the samples of all steps of the round as one table (K, S, b): of the client, of the feature tables, labels
        first = self.tasks[0].inputs
        device = first.device if isinstance(first, ImageInputs) else _table(first).device
        width = max(len(batch) for table in self._tables for batch in table)
        self._index = torch.zeros(len(self.tasks), len(self._tables[0]), width, dtype=torch.int64)
        for client, table in enumerate(self._tables):
            padded = pad_sequence(table, batch_first=True)
            self._index[client, : len(table), : padded.shape[1]] = padded
        self._rows = {name: self._read_rows(name).to(device) for name in self.tasks[0].side}
        self._rows["inputs"] = self._read_rows("inputs").to(device)
        sizes = [[len(batch) for batch in table] for table in self._tables]
        self._sizes = pad_sequence(list(map(torch.tensor, sizes)), batch_first=True).to(device)
        self._index = self._index.to(device)
        self._labels: Tensor | None = None
        if self.tasks[0].labels is not None:
            known = pad_sequence([_known(task.labels).to(device) for task in self.tasks], batch_first=True)
            self._labels = known.gather(1, self._index.flatten(1)).view(self._index.shape)
        self._crops = self._drawn(device) if self.has_images and self.tasks[0].training.augment != "none" else None
        self._before = Snapshot({"task": self.clients})

    def of(self, clients: Sequence[int], samples: int | None) -> Stack:
        """Some of the clients (positions), with at most so many samples in a batch."""
        return Stack([self.tasks[i] for i in clients], [[b[:samples] for b in self._tables[i]] for i in clients])

    @property
    def has_images(self) -> bool:
        """Whether images are read and transformed batch by batch."""
        return isinstance(self.tasks[0].inputs, ImageInputs)

    def require_unchanged(self) -> None:
        """Raise FedbenchError where a loss has changed in place what its clients received, know or keep."""
        self._before.require_unchanged(self.tasks[0].spec.method, "local_loss or loss_terms")

    @property
    def steps(self) -> list[int]:
        """Number of local steps of each client, the most first."""
        return [len(table) for table in self._tables]

    def active(self, step: int) -> int:
        """Number of clients that still train in ``step``; they are the first of the stack."""
        return sum(len(table) > step for table in self._tables)

    def batch(self, step: int) -> StackedBatch:
        """One step of all clients that are still active."""
        active = self.active(step)
        sizes = tuple(len(self._tables[client][step]) for client in range(active))
        return StackedBatch(slice(active), sizes, step)

    def samples(self, batch: StackedBatch) -> PerClient:
        """``inputs`` (a, b, ...), ``index`` (a, b) of the client, ``labels`` (a, b) if visible, ``side`` by name."""
        first = self.tasks[0]
        samples: PerClient = {
            "inputs": self._images(batch) if self.has_images else rows_of(_table(first.inputs), self.rows(batch)),
            "index": batch.of(self._index),
            "side": {name: rows_of(_table(rows), batch.of(self._rows[name])) for name, rows in first.side.items()},
        }
        if self._labels is not None:
            samples["labels"] = batch.of(self._labels)
        return samples

    def index(self, batch: StackedBatch, client: int) -> Tensor:
        """The samples of ``batch`` that ``client`` (a position) has, (size,)."""
        return self._tables[client][batch.number]

    def rows(self, batch: StackedBatch) -> Tensor:
        return batch.of(self._rows["inputs"])

    def mask(self, batch: StackedBatch) -> Tensor:
        """1 for a sample, 0 for padding, (a, b)."""
        sizes = self._sizes[batch.clients, batch.number]
        return (torch.arange(max(batch.sizes), device=sizes.device) < sizes[:, None]).float()

    def labels(self, batch: StackedBatch) -> Tensor:
        return batch.of(_known(self._labels))

    def _read_rows(self, name: str) -> Tensor:
        """Rows of the table of inputs, or of a side encoder, for all steps, (K, S, b)."""
        sources = [task.inputs if name == "inputs" else task.side[name] for task in self.tasks]
        rows = [source.rows_of(i.flatten()) for source, i in zip(sources, self._index, strict=True)]  # type: ignore[attr-defined]
        return torch.stack(rows).view(self._index.shape)

    def _images(self, batch: StackedBatch) -> Tensor:
        """The images of a batch (a, b, c, h, w), cut out and flipped as one client alone would have them."""
        source, rows = cast(ImageInputs, self.tasks[0].inputs), self.rows(batch)
        images = ImageInputs(source.images, source.transform, source.device).read(rows.flatten())
        if self._crops is not None:
            top, left, flip = (batch.of(drawn).flatten() for drawn in self._crops)
            images = cropped_and_flipped(images, top, left, flip)
        return images.view(*rows.shape, *images.shape[1:])

    def _drawn(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """The draws of `drawn_crops` of every sample in every step of the round, (K, S, b) each."""
        top, left = torch.zeros_like(self._index, device="cpu"), torch.zeros_like(self._index, device="cpu")
        drawn = (top, left, torch.zeros_like(top, dtype=torch.bool))
        for client, (task, table) in enumerate(zip(self.tasks, self._tables, strict=True)):
            noise, per_sample = task.generator("augmentation"), task.training.augment == "sample"
            for step, index in enumerate(table):
                for of_all, own in zip(drawn, drawn_crops(len(index) if per_sample else 1, noise), strict=True):
                    of_all[client, step, : len(index)] = own
        return drawn[0].to(device), drawn[1].to(device), drawn[2].to(device)


def _table(inputs: object) -> Tensor:
    assert isinstance(inputs, FeatureInputs)
    return inputs.features


class StackedOptimiser:
    """The run's optimiser (see `build_optimiser`) on stacked weights; a client that has no step left stays as it is."""

    def __init__(
        self,
        training: Training,
        weights: Tensors,
        round: int,
        lr_factors: Mapping[str, float],
        own: Collection[str] = (),
    ) -> None:
        """``weights`` (K, ...) are changed in place; those in ``own`` are clipped apart from the others."""
        self._own = own
        self._training = training
        self._weights = weights
        self._rates = learning_rates(training, weights, round, lr_factors)
        self._moments: dict[str, Tensors] = {}
        self._steps = torch.zeros(())

    def step(self, gradients: Tensors) -> None:
        """One step of the first ``a`` clients from ``gradients`` (a, ...); weights without a gradient stay."""
        if self._training.clip_norm is not None:
            most, parts = self._training.clip_norm, each_model(gradients, self._own)
            clipped = [_clipped({name: gradients[name] for name in part}, most) for part in parts]
            gradients = {name: g for part in clipped for name, g in part.items()}
        for lr, names in self._rates.items():
            moved = [name for name in names if name in gradients]
            active = [self._weights[name][: len(gradients[name])] for name in moved]
            self._apply(lr, moved, active, [gradients[name] for name in moved])

    def _apply(self, lr: float, names: list[str], weights: list[Tensor], gradients: list[Tensor]) -> None:
        chosen = self._training
        if chosen.optimizer == "sgd":
            momentum: list[Tensor | None] = [None] * len(names)
            if chosen.momentum:
                momentum = [self._moment("momentum", n, g) for n, g in zip(names, gradients, strict=True)]
            sgd(
                weights,
                gradients,
                momentum,
                foreach=False,
                weight_decay=chosen.weight_decay,
                momentum=chosen.momentum,
                lr=lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
            return
        adam(
            weights,
            gradients,
            [self._moment("first", n, g) for n, g in zip(names, gradients, strict=True)],
            [self._moment("second", n, g) for n, g in zip(names, gradients, strict=True)],
            [],
            [self._moment("steps", n, self._steps) for n in names],
            foreach=False,
            decoupled_weight_decay=chosen.optimizer == "adamw",
            amsgrad=False,
            beta1=chosen.beta1,
            beta2=chosen.beta2,
            lr=lr,
            weight_decay=chosen.weight_decay,
            eps=chosen.eps,
            maximize=False,
        )

    def _moment(self, kind: str, name: str, like: Tensor) -> Tensor:
        """A running tensor of the active clients. It starts at zero, which equals a momentum that starts with the first
        gradient."""
        kept = self._moments.setdefault(kind, {})
        if name not in kept:
            kept[name] = torch.zeros_like(like)
        return kept[name][: len(like)] if like.ndim else kept[name]


def own_buffers(task: ClientTask) -> Tensors:
    """The buffers that training may change: all but those that the server alone changes."""
    return {name: value for name, value in task.buffers.items() if name not in task.model.of_server}


def signature(task: ClientTask) -> tuple[object, ...]:
    """A key that is equal for clients that can be stacked: the same tensors by name and shape, rows of the same
    tables."""
    own = own_buffers(task)
    mappings = [task.received, task.payload, *(task.state[name] for name in sorted(task.state))]
    mappings += [own] if own else []
    shapes = tuple(tuple((name, tuple(t.shape), t.dtype) for name, t in sorted(m.items())) for m in mappings)
    sources = (task.inputs, *task.side.values())
    tables = tuple(id(one.images if isinstance(one, ImageInputs) else _table(one)) for one in sources)
    # what the server alone changes is one tensor for all of them
    of_server = tuple(id(value) for name, value in task.buffers.items() if name not in own)
    known = (task.labels is None, task.class_counts is None)
    return (shapes, tuple(sorted(task.state)), tables, known, of_server)


def mapped(tensors: PerClient, function: Any) -> PerClient:
    """Apply ``function`` to every tensor of nested mappings."""
    return {k: mapped(v, function) if isinstance(v, dict) else function(v) for k, v in tensors.items()}


def rows_of(table: Tensor, rows: Tensor) -> Tensor:
    """The rows (a, b, ...) of ``table`` (n, ...) at ``rows`` (a, b), as float32.

    Three times as fast as by an index of two axes.
    """
    return table.index_select(0, rows.flatten()).float().view(*rows.shape, *table.shape[1:])


def flat_of(tensors: PerClient) -> list[Tensor]:
    """All tensors of nested mappings, in their order."""
    return [t for value in tensors.values() for t in (flat_of(value) if isinstance(value, dict) else (value,))]


def like(tensors: PerClient, flat: Iterable[Tensor]) -> PerClient:
    """Nested mappings like ``tensors`` with the tensors ``flat``, in the order of `flat_of`."""
    remaining = iter(flat)
    return mapped(tensors, lambda _: next(remaining))


def _stacked(mappings: Sequence[Tensors], keep: bool = True) -> Tensors:
    """Stacked tensors (K, ...) by name. A tensor shared by all clients is expanded without a copy, unless ``keep`` is
    false."""
    stacked = {}
    for name, first in mappings[0].items():
        values = [mapping[name] for mapping in mappings]
        shared = keep and all(value is first for value in values)
        stacked[name] = first.expand(len(values), *first.shape) if shared else torch.stack(values)
    return stacked


def _known(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def _clipped(gradients: Tensors, most: float) -> Tensors:
    """``gradients`` (a, ...), each client's scaled to a norm of ``most`` where longer, as `clip_grad_norm_` does."""
    norms = torch.stack([g.reshape(len(g), -1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
    factors = (most / (norms + 1e-6)).clamp(max=1)
    return {name: g * factors.view(-1, *[1] * (g.dim() - 1)) for name, g in gradients.items()}
