"""Feature skew: splits by domain, one domain a client, and leave-one-domain-out.

A domain is cut by a generator of its own, so it has the same test samples whichever domain is held out. 80/20 floors
the training part as the lists that FedBN distributes do (Office-Caltech-10: 766/192, 898/225, 125/32, 236/59); 60/20/20
floors training and validation as FedCLIP does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedbench.core.errors import FedbenchError, unknown_name
from fedbench.core.federation import Dataset, ImageSource, Split
from fedbench.core.randomness import numpy_generator
from fedbench.scenarios.partitions.parts import IntArray, Parts

DomainSplit = Literal["80/20", "60/20/20"]


@dataclass(frozen=True, eq=False)
class Joined:
    """Two image sources of one size joined, the first's images first."""

    first: ImageSource
    second: ImageSource

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    def read(self, indices: Tensor) -> Tensor:
        from_second = indices >= len(self.first)
        if not bool(from_second.any()):
            return self.first.read(indices)
        images = self.second.read((indices - len(self.first)).clamp(min=0)[from_second])
        if bool(from_second.all()):
            return images
        joined = images.new_empty((len(indices), *images.shape[1:]))
        joined[from_second] = images
        joined[~from_second] = self.first.read(indices[~from_second])
        return joined

    def content_hash(self) -> str:
        return f"{self.first.content_hash()}+{self.second.content_hash()}"


@dataclass(frozen=True, eq=False)
class Cut:
    """A data set cut for training and testing: ``train`` (n,) holds indices into ``pool``."""

    pool: Split
    train: IntArray
    test: Split
    validation: Split | None = None


def cut_domain(indices: IntArray, split: DomainSplit, rng: np.random.Generator) -> tuple[IntArray, IntArray, IntArray]:
    """One domain's samples as train, validation (empty for 80/20) and test."""
    n = len(indices)
    train, validation = (4 * n // 5, 0) if split == "80/20" else (3 * n // 5, n // 5)
    shuffled = rng.permutation(indices)
    return shuffled[:train], shuffled[train : train + validation], shuffled[train + validation :]


def cut_by_domain(dataset: Dataset, split: DomainSplit, held_out: int | None, seed: int) -> Cut:
    """Train, validation and test of data with domains; ``held_out`` goes to test as a whole, train and test pooled."""
    domains = domains_of(dataset.train)
    if dataset.test is not None and held_out is None:
        return _keep_own_test(dataset.train, dataset.test, domains, split, seed)
    pool = dataset.train if dataset.test is None else pooled(dataset.train, dataset.test)
    domains = domains_of(pool)
    train: list[IntArray] = []
    validation: list[IntArray] = []
    test: list[IntArray] = []
    for domain in np.unique(domains):
        of_domain = np.flatnonzero(domains == domain)
        if domain == held_out:
            test.append(of_domain)
            continue
        parts = cut_domain(of_domain, split, numpy_generator(seed, "split", int(domain)))
        for collected, part in zip((train, validation, test), parts, strict=True):
            collected.append(part)
    if not train:
        raise FedbenchError(
            f"holding out the only domain of {dataset.name!r} leaves nothing to train on; set holdout_domain to none"
        )
    return Cut(pool, _sorted(train), _select(pool, test), _select(pool, validation) if split == "60/20/20" else None)


def cut_by_client(pool: Split, split: DomainSplit, seed: int) -> Cut:
    """Train, validation and test of data that name the client of every sample, cut as a domain is, client by client.

    A client with a single sample trains on it. FedbenchError where no client has two.
    """
    assert pool.clients is not None
    of = pool.clients.numpy()
    parts = []
    for client in np.unique(of):
        own, rng = np.flatnonzero(of == client), numpy_generator(seed, "split by client", int(client))
        parts.append((own, own[:0], own[:0]) if len(own) == 1 else cut_domain(own, split, rng))
    if not any(len(test) for _, _, test in parts):
        raise FedbenchError("no client has two samples, one to train on and one to test; give the data a test split.")
    train, validation, test = (list(each) for each in zip(*parts, strict=True))
    return Cut(pool, _sorted(train), _select(pool, test), _select(pool, validation) if split == "60/20/20" else None)


def domain_clients(domains: IntArray, present: Sequence[int], deal: Callable[[IntArray], Parts]) -> Parts:
    """One domain a client, ordered as in ``present``; ``deal`` cuts the samples (m,) of a domain into its clients'."""
    by_domain = [deal(np.flatnonzero(domains == domain)) for domain in present]
    sizes = np.concatenate([parts.sizes for parts in by_domain])
    return Parts(np.concatenate([parts.flat for parts in by_domain]), np.concatenate([[0], np.cumsum(sizes)]))


def domain_index(dataset: Dataset, name: str) -> int:
    """The index of the domain called ``name``."""
    if name not in dataset.domain_names:
        raise unknown_name("domain", name, dataset.domain_names, hint=f"Set holdout_domain to one of {dataset.name}'s.")
    return dataset.domain_names.index(name)


def domains_of(split: Split) -> IntArray:
    """The domain of every sample, (n,) int64."""
    if split.domains is None:
        raise FedbenchError("a split has no domains; give every sample one, or choose another partition")
    domains: IntArray = split.domains.numpy()
    return domains


def _keep_own_test(train: Split, test: Split, domains: IntArray, split: DomainSplit, seed: int) -> Cut:
    if split == "80/20":
        return Cut(train, np.arange(len(train)), test)
    # a quarter of the training samples keeps 60 : 20; FedFA cuts the distributed training lists in this spirit
    kept, validation = [], []
    for domain in np.unique(domains):
        shuffled = numpy_generator(seed, "split", int(domain)).permutation(np.flatnonzero(domains == domain))
        kept.append(shuffled[len(shuffled) // 4 :])
        validation.append(shuffled[: len(shuffled) // 4])
    return Cut(train, _sorted(kept), test, _select(train, validation))


def pooled(train: Split, test: Split) -> Split:
    """Two splits with domains as one, the samples of ``train`` first."""
    domains = torch.from_numpy(np.concatenate([domains_of(train), domains_of(test)]))
    clients = None if train.clients is None or test.clients is None else torch.cat([train.clients, test.clients])
    return Split(Joined(train.images, test.images), torch.cat([train.labels, test.labels]), domains, clients)


def _select(pool: Split, parts: Sequence[IntArray]) -> Split:
    return pool.select(torch.from_numpy(_sorted(parts)))


def _sorted(parts: Sequence[IntArray]) -> IntArray:
    return np.sort(np.concatenate(parts))
