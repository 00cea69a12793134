"""The nouns every part of fedbench shares: images, data sets, federations, models, what clients get and give."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from fedbench.core.partition import ClassTable, Shards
from fedbench.core.partition import ClientShard as ClientShard

Tensors = dict[str, Tensor]
"""A flat mapping from a parameter's name to its tensor."""


class ImageSource(Protocol):
    """Images that can be read by index: held in memory, or decoded from files on demand."""

    def __len__(self) -> int: ...

    def read(self, indices: Tensor) -> Tensor:
        """The images at ``indices`` (int64, shape (b,)) as uint8 of shape (b, 3, height, width)."""
        ...

    def content_hash(self) -> str:
        """A hex digest of what the images are; the same images give the same digest on every machine."""
        ...


@dataclass(frozen=True, eq=False)
class TensorImages:
    """Images in memory: one uint8 tensor of shape (n, 3, height, width)."""

    pixels: Tensor

    def __len__(self) -> int:
        return int(self.pixels.shape[0])

    def read(self, indices: Tensor) -> Tensor:
        """uint8 (b, 3, height, width)."""
        return self.pixels[indices]

    def content_hash(self) -> str:
        """sha256 over shape and bytes."""
        digest = hashlib.sha256(str(tuple(self.pixels.shape)).encode())
        digest.update(self.pixels.flatten().numpy().data)
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Subset:
    """Some images of another source, by index (int64, shape (n,))."""

    source: ImageSource
    indices: Tensor

    def __len__(self) -> int:
        return int(self.indices.shape[0])

    def read(self, indices: Tensor) -> Tensor:
        """uint8 (b, 3, height, width)."""
        return self.source.read(self.indices[indices])

    def content_hash(self) -> str:
        """Digest of the whole source and of the chosen indices."""
        digest = hashlib.sha256(self.source.content_hash().encode())
        digest.update(self.indices.numpy().tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Split:
    """One split of a data set: ``images``, ``labels`` (n,) int64 and, where known, ``domains`` (n,) int64."""

    images: ImageSource
    labels: Tensor
    domains: Tensor | None = None

    def __len__(self) -> int:
        return int(self.labels.shape[0])

    def select(self, indices: Tensor) -> Split:
        """The split made of the samples at ``indices`` (int64, shape (m,)), in that order."""
        domains = None if self.domains is None else self.domains[indices]
        return Split(Subset(self.images, indices), self.labels[indices], domains)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images with class names usable in prompts. ``test`` is None where the data come without an official split."""

    name: str
    classnames: tuple[str, ...]
    train: Split
    test: Split | None
    content_hash: str
    """Of the images as decoded, labels, domains, class names and groups of both splits, in their order."""
    domain_names: tuple[str, ...] = ()
    list_groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Head / mid / tail classes where the data set's own list files define them."""
    shortest_side: int | None = None
    """In pixels, of the images as they are in their files; None where there are none. ``train`` may be larger."""
    files_hash: str = ""
    """As ``content_hash``, of the images as they are in their files, where they are decoded at the size that a run asks
    for. Empty for data of one size, of which ``content_hash`` says it all."""


@dataclass(frozen=True, eq=False)
class Unseen:
    """Classes left out of training: no client has a sample of them, and nobody knows their names until they are tested.

    Labels of ``test`` count from 0 in ``classnames``.
    """

    test: Split
    classnames: tuple[str, ...]

    @property
    def num_classes(self) -> int:
        """How many they are."""
        return len(self.classnames)


@dataclass(frozen=True, eq=False)
class Federation:
    """The clients with their shards, and the splits everything is measured on."""

    clients: Sequence[ClientShard]
    train: Split
    test: Split
    classnames: tuple[str, ...]
    domain_names: tuple[str, ...] = ()
    validation: Split | None = None
    held_out_domain: int | None = None
    labels_visible: bool = True
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Class indices by reporting group: head / mid / tail, or many / medium / few."""
    server: Split | None = None
    """The server's own samples; None where the scenario grants none."""
    unseen: Unseen | None = None
    """What is tested beside these classes; None where the scenario has no unseen classes, or scores training data."""

    @property
    def num_classes(self) -> int:
        """C, the number of classes."""
        return len(self.classnames)

    @cached_property
    def shards(self) -> Shards:
        """The clients in few tensors: what goes over all of them reads these instead of ``clients``."""
        return Shards.of(self.clients)

    @cached_property
    def class_table(self) -> ClassTable:
        """Training samples by client and class; computed once."""
        return ClassTable.of(self.shards, self.train.labels, self.num_classes)

    def class_counts(self, client: int | None = None) -> Tensor:
        """Training samples per class, (C,) int64: of one client, or over all clients when ``client`` is None."""
        indices = self.shards.indices if client is None else self.clients[client].indices
        return torch.bincount(self.train.labels[indices], minlength=self.num_classes)

    def with_clients(self, clients: Sequence[ClientShard]) -> Federation:
        """The same data dealt to other clients."""
        return replace(self, clients=clients)


@dataclass(frozen=True, eq=False)
class LabelledBatch:
    """Samples of one local step: ``inputs`` (b, ...), ``index`` (b,) within the client, ``labels`` (b,)."""

    inputs: Tensor
    index: Tensor
    labels: Tensor
    side: Tensors = field(default_factory=dict)
    """What the model's ``side_encoders`` give for these samples, not augmented: (b, ...) by encoder name."""


@dataclass(frozen=True, eq=False)
class UnlabelledBatch:
    """What a client sees under hidden labels. It has no ``labels`` field, so no method can peek at them."""

    inputs: Tensor
    index: Tensor
    side: Tensors = field(default_factory=dict)


Batch = LabelledBatch | UnlabelledBatch


@dataclass(frozen=True, eq=False)
class Outputs:
    """What a model computes for a batch: ``logits`` (b, C) and the ``features`` (b, d) its head reads."""

    logits: Tensor
    features: Tensor


class FrozenEncoder(Protocol):
    """A frozen map from images to what the trainable part reads; computed once and kept in the feature cache."""

    @property
    def key(self) -> str:
        """A digest of weights, transform and output kind; part of the cache key."""
        ...

    def __call__(self, pixels: Tensor) -> Tensor:
        """uint8 (b, 3, h, w) to float32 (b, ...), or float16, in which the cache then keeps it; models get float32."""
        ...


@dataclass(frozen=True)
class LinearHead:
    """Where a model's linear classifier is: logits are ``scale * (features @ weight.T + bias)``.

    ``weight`` (C, d) and ``bias`` (C,) are the names of trained tensors.
    """

    weight: str = "head.weight"
    bias: str = "head.bias"
    scale: float = 1.0


@dataclass(frozen=True, eq=False)
class Model:
    """What is trained and sent, and the pure function that turns it into logits.

    ``forward(tensors, inputs, training)`` reads ``{**weights, **buffers}``; with ``training`` it may update the
    buffers in place (batch-norm statistics). The frozen rest is closed over.
    """

    weights: Tensors
    forward: Callable[[Mapping[str, Tensor], Tensor, bool], Outputs]
    buffers: Tensors = field(default_factory=dict)
    """Sent and averaged but not trained: running statistics."""
    encoder: FrozenEncoder | None = None
    """Where set, batches carry the encoder's output instead of images."""
    transform: Callable[[Tensor], Tensor] | None = None
    """Without an encoder: uint8 (b, 3, h, w) to the float batch that ``forward`` takes."""
    constants: Tensors = field(default_factory=dict)
    """Frozen tensors a loss needs (text features); known to both sides, never sent."""
    head: LinearHead | None = None
    """The linear classifier on ``features``; None where there is none, or none that a method may replace."""
    side_encoders: Mapping[str, FrozenEncoder] = field(default_factory=dict)
    """Further frozen encoders (a teacher) whose output on the training samples a loss reads from ``batch.side``."""
    weights_hashes: tuple[str, ...] = ()
    """Of everything pretrained that the model reads beside the run's backbone (a teacher, a text encoder)."""
    lr_factors: Mapping[str, float] = field(default_factory=dict)
    """Factor on the learning rate by name of a weight; 1 where absent."""
    batch_norm: frozenset[str] = frozenset()
    """The names of all weights and buffers of batch-norm layers."""


@dataclass(frozen=True, eq=False)
class Broadcast:
    """What the server sends to one client: weights to train from, and further tensors. Both count as sent down."""

    weights: Tensors
    payload: Tensors = field(default_factory=dict)
    buffers: Tensors | None = None
    """Running statistics in place of the global ones; None means the global ones."""
    held: Tensors = field(default_factory=dict)
    """Further tensors that the client has from an earlier round: in its payload, but not counted as sent."""


@dataclass(frozen=True, eq=False)
class GlobalModel:
    """What ``aggregate`` may return in place of weights: a server that trains may also change running statistics."""

    weights: Tensors
    buffers: Tensors


@dataclass(frozen=True, eq=False)
class ClientReport:
    """What a client can tell the server before the first round."""

    client: int
    num_examples: int
    class_counts: Tensor | None
    """(C,) int64; None where labels are hidden."""


@dataclass(frozen=True, eq=False)
class Update:
    """What a client returns; ``num_examples`` is n_k. The bytes of all three tensor mappings count as sent up."""

    client: int
    weights: Tensors
    buffers: Tensors
    num_examples: int
    payload: Tensors = field(default_factory=dict)
    """Further tensors a method uploads (prototypes, control variates)."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers about the client's training: ``train_loss``, and others under names of the method's own. Their means over
    the updates that the server accepts are metrics of the round."""


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predicted classes on a split, (n,) int64, by the global model; None for a method that has none.

    Personalised methods add those of each client's own model, of clients asked for, on the same split; scored apart.
    """

    labels: Tensor | None
    by_client: Mapping[int, Tensor] = field(default_factory=dict)
