"""Images, splits, data sets, and the federation that a scenario makes of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from fedbench.core.partition import ClassTable, ClientShard, Shards


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
        """Images of shape (b, 3, height, width), uint8."""
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
        """Images of shape (b, 3, height, width), uint8."""
        return self.source.read(self.indices[indices])

    def content_hash(self) -> str:
        """Digest of the whole source and of the chosen indices."""
        digest = hashlib.sha256(self.source.content_hash().encode())
        digest.update(self.indices.numpy().tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Split:
    """One split of a data set: ``images``, ``labels`` (n,) int64 and, where known, ``domains`` (n,) int64 and
    ``clients`` (n,) int64, the client that each sample comes from."""

    images: ImageSource
    labels: Tensor
    domains: Tensor | None = None
    clients: Tensor | None = None

    def __len__(self) -> int:
        return int(self.labels.shape[0])

    def select(self, indices: Tensor) -> Split:
        """The split made of the samples at ``indices`` (int64, shape (m,)), in that order."""
        domains = None if self.domains is None else self.domains[indices]
        clients = None if self.clients is None else self.clients[indices]
        return Split(Subset(self.images, indices), self.labels[indices], domains, clients)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images with class names usable in prompts. ``test`` is None where the data have no official test split."""

    name: str
    classnames: tuple[str, ...]
    train: Split
    test: Split | None
    content_hash: str
    """Hash of both splits: decoded images, labels, domains, class names and groups, in that order."""
    domain_names: tuple[str, ...] = ()
    list_groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Head / mid / tail classes where the data set's own list files define them."""
    shortest_side: int | None = None
    """The shortest side of the images in their files, in pixels; None where images are not read from files. ``train``
    may hold larger ones."""
    files_hash: str = ""
    """Hash like ``content_hash``, but of the undecoded files. It is set where images are decoded at the size that a run
    asks for; it is empty for data of one size, which ``content_hash`` describes completely."""
    client_names: tuple[str, ...] = ()
    """Names of the clients that the samples come from (hospitals, writers, phones); empty where the data name none."""


@dataclass(frozen=True, eq=False)
class Unseen:
    """Classes left out of training: no client has a sample of them, and nobody knows their names until they are tested.

    Labels of ``test`` count from 0 in ``classnames``.
    """

    test: Split
    classnames: tuple[str, ...]

    @property
    def num_classes(self) -> int:
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
    client_names: tuple[str, ...] = ()
    """Names of the clients, then of the held-out clients; empty where they have no names."""
    later: tuple[Shards, ...] = ()
    """The clients' samples in the second, third... stretch of the run, for data that drift. ``clients`` is the first
    stretch."""
    new_clients: Sequence[ClientShard] = ()
    """Clients that never train, on which the model is tested as on clients that come later."""
    unseen: Unseen | None = None
    """The unseen classes, tested apart; None where the scenario has none, or scores training data."""

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

    @cached_property
    def held(self) -> Tensor:
        """All training samples that a client has in some stretch, (n,) int64."""
        return torch.cat([self.shards.indices, *(shards.indices for shards in self.later)])

    @cached_property
    def _stretches(self) -> tuple[Federation, ...]:
        return (self, *(replace(self, clients=shards) for shards in self.later))

    @cached_property
    def of_new_clients(self) -> Federation:
        """The federation of the new clients: the same data, with the clients that never train instead of the others."""
        return replace(self, clients=self.new_clients, later=(), new_clients=())

    def in_round(self, number: int, rounds: int) -> Federation:
        """The federation as it is in round ``number`` of ``rounds``; before them as in the first, later as in the last.

        Round t of R is in stretch ⌊(t - 1) S / R⌋ of the S that there are.
        """
        if not self.later:
            return self
        stretch = (max(number, 1) - 1) * len(self._stretches) // max(rounds, 1)
        return self._stretches[min(stretch, len(self._stretches) - 1)]

    def with_clients(self, clients: Sequence[ClientShard]) -> Federation:
        """The same data with other clients, who do not drift."""
        return replace(self, clients=clients, later=())
