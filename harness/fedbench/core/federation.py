"""Images, splits, data sets, and the federation that a scenario makes of them.

The samples of all clients lie in a few tensors, however many clients there are. A ragged list of clients is one flat
tensor with offsets: client k has ``flat[offsets[k] : offsets[k + 1]]``. The memory of a federation thus grows with its
samples; a million samples partitioned among 100,000 clients take 10 MB.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol, overload

import torch
from torch import Tensor

_AT_ONCE = 1_000_000
"""The most samples, or cells of clients x classes, handled at once: a few times 8 MB."""


@dataclass(frozen=True, eq=False)
class ClientShard:
    """The samples one client holds, as indices into the splits of the ``Federation``."""

    id: int
    indices: Tensor
    """(n_k,) int64 into the training split."""
    test_indices: Tensor | None = None
    """(m_k,) int64 into the test split; None where clients share one global test set."""
    validation_indices: Tensor | None = None
    """(v_k,) int64 into the validation split; None where the protocol has none."""


@dataclass(frozen=True, eq=False)
class Measured:
    """The samples that some clients are measured on: ``test`` and ``validation`` of a `ClientShard`."""

    test: Tensor | None = None
    validation: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Shards(Sequence[ClientShard]):
    """The clients of a federation; a `ClientShard` is created when it is read, as views of these tensors."""

    indices: Tensor
    """Indices into the training split, client by client, (n,) int64."""
    offsets: Tensor
    """Offsets into ``indices``, (N + 1,) int64."""
    ids: Tensor
    """The clients' ids, (N,) int64."""
    measured: tuple[Measured, ...] = (Measured(),)
    """The distinct sets that clients are measured on: all clients of a domain share one."""
    measured_on: Tensor | None = None
    """Index into ``measured`` by client, (N,) int64; None where all clients have the first."""

    @classmethod
    def of(cls, clients: Sequence[ClientShard]) -> Shards:
        """Convert ``clients``; returned unchanged if they are `Shards` already."""
        if isinstance(clients, Shards):
            return clients
        position_of: dict[tuple[int, int], int] = {}
        measured: list[Measured] = []
        which = []
        for shard in clients:
            key = (id(shard.test_indices), id(shard.validation_indices))
            if key not in position_of:
                position_of[key] = len(measured)
                measured.append(Measured(shard.test_indices, shard.validation_indices))
            which.append(position_of[key])
        sizes = torch.tensor([0, *(len(shard.indices) for shard in clients)])
        flat = torch.cat([shard.indices for shard in clients]) if clients else torch.empty(0, dtype=torch.int64)
        ids = torch.tensor([shard.id for shard in clients], dtype=torch.int64)
        return cls(flat, sizes.cumsum(0), ids, tuple(measured), torch.tensor(which, dtype=torch.int64))

    @property
    def sizes(self) -> Tensor:
        """Training samples by client, (N,) int64."""
        return self.offsets.diff()

    def measured_by(self, position: int) -> Measured:
        """The samples that the client at ``position`` is measured on."""
        return self.measured[0 if self.measured_on is None else int(self.measured_on[position])]

    def measured_alike(self, which: int) -> Tensor:
        """The clients that are measured on ``measured[which]``, (N,) bool."""
        every = torch.zeros(len(self), dtype=torch.int64) if self.measured_on is None else self.measured_on
        return every == which

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, position: int) -> ClientShard: ...
    @overload
    def __getitem__(self, position: slice) -> tuple[ClientShard, ...]: ...
    def __getitem__(self, position: int | slice) -> ClientShard | tuple[ClientShard, ...]:
        if isinstance(position, slice):
            return tuple(self[one] for one in range(*position.indices(len(self))))
        at = range(len(self))[position]
        first, last = self.offsets[at : at + 2].tolist()
        own = self.measured_by(at)
        return ClientShard(int(self.ids[at]), self.indices[first:last], own.test, own.validation)

    def __iter__(self) -> Iterator[ClientShard]:
        first = 0
        for position, (client, size) in enumerate(zip(self.ids.tolist(), self.sizes.tolist(), strict=True)):
            own = self.measured_by(position)
            yield ClientShard(client, self.indices[first : first + size], own.test, own.validation)
            first += size


@dataclass(frozen=True, eq=False)
class ClassTable:
    """Class counts of every client; only classes that a client holds are listed."""

    offsets: Tensor
    """Offsets into ``classes`` and ``counts``, (N + 1,) int64."""
    classes: Tensor
    """Classes, (cells,) int32, ascending within a client."""
    counts: Tensor
    """Samples of that class, (cells,) int32, all above 0."""
    num_classes: int

    @classmethod
    def of(cls, shards: Shards, labels: Tensor, num_classes: int) -> ClassTable:
        """The table of ``shards`` of samples with ``labels`` (n,) int64."""
        cells, classes, counts = [torch.zeros(1, dtype=torch.int64)], [], []
        for first, last in _spans(shards.offsets, _AT_ONCE):
            start, end = shards.offsets[[first, last]].tolist()
            client = torch.repeat_interleave(torch.arange(last - first), shards.sizes[first:last])
            keys = client * num_classes + labels[shards.indices[start:end]]
            held, count = torch.unique(keys, return_counts=True)
            cells.append(torch.bincount(held // num_classes, minlength=last - first))
            classes.append((held % num_classes).to(torch.int32))
            counts.append(count.to(torch.int32))
        nothing = torch.empty(0, dtype=torch.int32)
        return cls(
            torch.cat(cells).cumsum(0), torch.cat([nothing, *classes]), torch.cat([nothing, *counts]), num_classes
        )

    def __len__(self) -> int:
        """N, the number of clients."""
        return len(self.offsets) - 1

    def rows(self, first: int, last: int) -> Tensor:
        """Counts of the clients from ``first`` up to ``last``, (last - first, C) int64."""
        start, end = self.offsets[[first, last]].tolist()
        return self._spread(self.counts[start:end].long(), first, last)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """First and last client of spans whose rows of all classes fit into little memory."""
        step = max(_AT_ONCE // (10 * max(self.num_classes, 1)), 1)
        for first in range(0, len(self), step):
            yield first, min(first + step, len(self))

    def totals(self) -> Tensor:
        """Samples of every class over all clients, (C,) int64."""
        totals = torch.zeros(self.num_classes, dtype=torch.int64)
        return totals.index_add_(0, self.classes.long(), self.counts.long())

    def samples_of(self, chosen: Tensor) -> Tensor:
        """Samples of the classes where ``chosen`` (C,) is True, by client, (N,) int64."""
        running = torch.zeros(len(self.counts) + 1, dtype=torch.int64)
        torch.cumsum(self.counts * chosen[self.classes.long()], 0, out=running[1:])
        return running[self.offsets].diff()

    def sums(self, weights: Tensor) -> Tensor:
        """sum_c counts_kc * weights_c by client, (N,) float64, from ``weights`` (C,) float64.

        Bit for bit what each client's row of all classes gives by ``(row * weights).sum()``.
        """
        products = self.counts * weights[self.classes.long()]
        sums = torch.empty(len(self), dtype=torch.float64)
        for first, last in self.blocks():
            start, end = self.offsets[[first, last]].tolist()
            sums[first:last] = self._spread(products[start:end], first, last).sum(dim=1)
        return sums

    def _spread(self, values: Tensor, first: int, last: int) -> Tensor:
        """Spread ``values`` of the cells of clients ``first`` to ``last`` over rows of all C classes."""
        start, end = self.offsets[[first, last]].tolist()
        row = torch.repeat_interleave(torch.arange(last - first), self.offsets[first : last + 1].diff())
        rows = torch.zeros((last - first) * self.num_classes, dtype=values.dtype)
        rows[row * self.num_classes + self.classes[start:end]] = values
        return rows.reshape(last - first, self.num_classes)


def _spans(offsets: Tensor, most: int) -> Iterator[tuple[int, int]]:
    """First and last client of spans with at most ``most`` samples, or one client."""
    first, clients = 0, len(offsets) - 1
    while first < clients:
        fitting = int(torch.searchsorted(offsets, offsets[first] + most, right=True)) - 1
        last = min(max(fitting, first + 1), clients)
        yield first, last
        first = last


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
        return self.pixels[indices]

    def content_hash(self) -> str:
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
