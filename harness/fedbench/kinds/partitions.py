"""Partitions: how training samples are given to clients."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedbench.core.scenario import Scenario
from fedbench.kinds.base import P, Plugin

Indices = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Samples:
    """What a partition sees of a split of n samples."""

    labels: Indices
    """(n,) class of each."""
    domains: Indices | None = None
    """(n,) domain of each; None for data without domains."""
    clients: Indices | None = None
    """(n,) the client that each comes from; None for data that name none."""

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class PartitionTask:
    """The samples to give out, and everything that may decide who gets which."""

    train: Samples
    """The training samples: thinned to the scenario's long tail, without those that the server or a test has."""
    test: Samples
    """What is tested."""
    validation: Samples | None
    classnames: Sequence[str]
    domain_names: Sequence[str]
    client_names: Sequence[str]
    scenario: Scenario
    """``scenario.clients`` is how many clients there are to be; fields of other partitions are without effect."""
    rng: np.random.Generator
    """The only source of randomness: a generator of the run's seed."""
    location: str = ""
    """What stands behind the colon of the partition's name."""
    present_domains: Sequence[int] = ()
    """The domains to give out: all that the data have, whether or not a training sample is left of them, but for one
    that is held out."""


@dataclass(frozen=True, eq=False)
class ClientSamples:
    """Which samples each client has, as indices (n_k,) into the splits of a `PartitionTask`."""

    train: Sequence[Indices]
    """By client, each sample at most once. Every client needs one."""
    test: Sequence[Indices] | None = None
    """By client, what it is measured on; None: all clients by the whole test split and their classes' shares."""
    validation: Sequence[Indices] | None = None
    later: Sequence[Sequence[Indices]] = ()
    """Of clients whose data drift: the training samples by client in the second, third... stretch of the run. All
    stretches have as many rounds; ``train`` is the first."""
    names: Sequence[str] = ()
    """Of the clients, where they have names."""
    later_test: Sequence[Sequence[Indices] | None] = ()
    """As ``test``, in each of the ``later`` stretches; empty: as in the first throughout."""


class Partition(Plugin[P]):
    """A partition. An entry point of the group ``fedbench.partitions`` loads such a class.

    Its parameters stand in its name (``partition=name?alpha=0.5``) and so in the run's identity.
    """

    kind = "partition"
    shown: ClassVar[str] = ""
    """The scenario's field that says how skewed it is, for captions."""

    @abstractmethod
    def clients(self, task: PartitionTask) -> Sequence[Indices] | ClientSamples:
        """The training samples of each client as indices into ``task.train``, or more than that.

        Raises FedbenchError where the samples, or what the scenario says, do not suffice.
        """

    def digest(self, location: str) -> str:
        """A hash of the files that decide it beside data and seed: part of what a stored run is recognised by."""
        return ""


AnyPartition = Partition[Any]
