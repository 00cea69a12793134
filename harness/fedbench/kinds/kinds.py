"""The base classes of plug-ins that are no methods: data sets, partitions, backbones, text encoders, metrics."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedbench.core.method.hyper import declared
from fedbench.core.metric_names import is_of_harness
from fedbench.core.scenario import Scenario
from fedbench.kinds.base import P, Plugin

if TYPE_CHECKING:
    from torch import Tensor

    from fedbench.core.federation import Dataset, Federation
    from fedbench.core.types import Backbone, Predictions

LIMIT = "limit"
"""The option with which every source is cut to so many samples of each split."""


@dataclass(frozen=True)
class DatasetRequest:
    """A data set that is asked for."""

    text: str
    """The name as it was typed; a `Dataset` is called so."""
    location: str
    """What stands behind the colon; "" where nothing may."""
    data_dir: Path
    """Where data are looked up (``--data-dir``)."""
    cache_dir: Path
    """Where decoded data may be kept (``--cache-dir``)."""
    options: Mapping[str, str] = field(default_factory=dict)
    """What stands behind the question mark, as it was typed; parameters are in ``self.params``."""
    image_size: int | None = None
    """The side in pixels that images of differing sizes are brought to; None: the source's usual one."""


class DatasetSource(Plugin[P]):
    """A kind of data set. An entry point of the group ``fedbench.datasets`` loads such a class.

    Its parameters stand in the data set's name, and so in the run's identity. ``?limit=N`` cuts it to N samples of each
    split.
    """

    kind = "data set"
    scales_images: ClassVar[bool] = False
    """Whether what it loads may depend on `DatasetRequest.image_size`."""

    @classmethod
    def options(cls) -> tuple[str, ...]:
        """The names of what may be typed behind the question mark."""
        return (*declared(cls.Params), LIMIT)

    @abstractmethod
    def load(self, request: DatasetRequest) -> Dataset:
        """The data set. `fedbench.datasets.content.dataset` puts one together, with the hash of its content.

        Raises `fedbench.api.NotHere`, which says how to get the data, where they are not on this machine.
        """


AnySource = DatasetSource[Any]

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


@dataclass(frozen=True)
class BackboneRequest:
    """A backbone that is asked for."""

    text: str
    """The name as it was typed; the `Backbone` is called so."""
    location: str
    """What stands behind the colon; "" where nothing may."""
    data_dir: Path
    """Where pretrained weights are looked up and kept."""
    seed: int
    """Initialises what starts at random."""
    image_size: tuple[int, int] | None = None
    """Height and width of the data set's images, for a clear error where a network needs more; None: unknown."""


@dataclass(frozen=True)
class Pretraining:
    """What a backbone's weights learned from before any federation."""

    text: str
    """In words; where it is not known, that."""
    datasets: tuple[str, ...] = ()
    """Data sets with images of the same source, by the title of their card or else their name: results on them are
    marked."""


class BackboneFamily(Plugin[P]):
    """A family of backbones. An entry point of the group ``fedbench.backbones`` loads such a class."""

    kind = "backbone"
    is_pretrained: ClassVar[bool] = False
    """Whether its networks have weights from elsewhere, on which ``tune=auto`` trains a head alone."""
    is_dual_encoder: ClassVar[bool] = False
    """Whether its networks have a text tower."""

    @abstractmethod
    def load(self, request: BackboneRequest) -> Backbone:
        """The backbone: `fedbench.models.image_network` makes one of any ``nn.Module`` from images to features."""

    def image_size(self, request: BackboneRequest) -> int | None:
        """The side in pixels of the images it is made for; None: of any. Nothing is loaded for it."""
        return None

    def how_to_get(self, request: BackboneRequest) -> str:
        """What to do about published weights; "" where they are here, or it needs none."""
        return ""

    def pretrained_on(self, request: BackboneRequest) -> Pretraining | None:
        """What its weights were trained on, off its name alone; None where it starts at random, or says nothing."""
        return None


AnyFamily = BackboneFamily[Any]


@dataclass(frozen=True)
class TextRequest:
    """Class vectors that are asked for."""

    text: str
    """The encoder's name as it was typed."""
    location: str
    """What stands behind the colon; "" where nothing may."""
    classnames: Sequence[str]
    templates: Sequence[str]
    """Prompts, ``{}`` is the class name."""
    seed: int
    """For vectors that are drawn."""
    dim: int
    """The width of vectors that are drawn; an encoder has its own."""
    data_dir: Path
    """Where files of weights and vectors are looked up."""


class TextEncoder(Plugin[P]):
    """A text encoder. An entry point of the group ``fedbench.text_encoders`` loads such a class."""

    kind = "text encoder"

    @abstractmethod
    def vectors(self, request: TextRequest) -> Tensor:
        """One vector a class, float32 (K, V); they are brought to length one."""

    def digest(self, request: TextRequest) -> str:
        """A hash of its weights or files, part of what a stored run is recognised by; "" where it has none."""
        return ""

    def how_to_get(self, request: TextRequest) -> str:
        """What to do about published weights; "" where they are here, or it needs none."""
        return ""


AnyTextEncoder = TextEncoder[Any]


@dataclass(frozen=True, eq=False)
class MetricTask:
    """What a metric is computed of. n are the samples of the test split, C the classes."""

    predictions: Predictions
    """Classes (n,) of the global model, its ``scores`` (n, C) where it has some, classes (n,) of clients' own models
    ``by_client`` where they are due."""
    federation: Federation
    """Classes, groups of classes, domains and clients; tensors are not to be changed in place."""

    @property
    def predicted(self) -> Tensor:
        """Classes that the global model predicts, (n,) int64. Only where there is one: see `Metric.needs_model`."""
        assert self.predictions.labels is not None
        return self.predictions.labels

    @property
    def labels(self) -> Tensor:
        """The right classes, (n,) int64."""
        return self.federation.test.labels

    @property
    def classnames(self) -> Sequence[str]:
        """Of the C classes."""
        return self.federation.classnames

    @property
    def groups(self) -> Mapping[str, tuple[int, ...]]:
        """Classes by reporting group (head, mid, tail); empty where the scenario has no long tail."""
        return self.federation.groups

    @cached_property
    def right(self) -> Tensor:
        """Where the global model is right, (n,) bool."""
        return self.predicted == self.labels

    def test_samples(self, client: int) -> Tensor:
        """What the client is measured on, (m,) int64 into the test split; all of it where it has none of its own."""
        import torch

        own = self.federation.clients[client].test_indices
        return torch.arange(len(self.labels)) if own is None else own


class Metric(Plugin[P]):
    """A metric. An entry point of the group ``fedbench.metrics`` loads such a class.

    A run has it where ``metrics`` names it (``--set metrics=tail_f1``, in a suite ``metrics: [tail_f1]``).
    """

    kind = "metric"
    higher_is_better: ClassVar[bool | None] = True
    """None for a number that says how predictions are, not how good."""
    at_the_end: ClassVar[bool] = False
    """Whether it is computed after the last round alone."""
    needs_model: ClassVar[bool] = True
    """Whether it is of the global model; then it is left out for a method that has none."""

    @classmethod
    def _is_of_harness(cls) -> bool:
        return is_of_harness(cls.name)

    @abstractmethod
    def values(self, task: MetricTask) -> float | Mapping[str, float] | None:
        """The number under the metric's name, or several under names that begin with it (``name/part``).

        None, or a name left out, where there is nothing to measure.
        """


AnyMetric = Metric[Any]
