"""The base classes of plug-ins that are no methods: data sets, partitions, backbones, text encoders, metrics."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from fedbench.core.method.hyper import declared
from fedbench.core.scenario import Scenario
from fedbench.kinds.base import P, Plugin

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from fedbench.core.federation import Dataset, Federation
    from fedbench.core.types import Backbone, Predictions

LIMIT = "limit"
"""The option that cuts every source to so many samples of each split."""


@dataclass(frozen=True)
class DatasetRequest:
    """A request for a data set."""

    text: str
    """The name as it was typed; the `Dataset` gets this name."""
    location: str
    """The text behind the colon; "" where nothing may follow."""
    data_dir: Path
    """The folder of data (``--data-dir``)."""
    cache_dir: Path
    """The folder in which decoded data may be kept (``--cache-dir``)."""
    options: Mapping[str, str] = field(default_factory=dict)
    """The options behind the question mark as they were typed; the plug-in's parameters are in ``self.params``."""
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
        """The names of the options that may follow the question mark."""
        return (*declared(cls.Params), LIMIT)

    @abstractmethod
    def load(self, request: DatasetRequest) -> Dataset:
        """The data set. `fedbench.datasets.content.dataset` puts one together, with the hash of its content.

        Raises `fedbench.api.NotHere`, which says how to get the data, where they are not on this machine.
        """


AnySource = DatasetSource[Any]

Indices: TypeAlias = "NDArray[np.int64]"


@dataclass(frozen=True, eq=False)
class Samples:
    """The samples of a split, n in number, as a partition sees them."""

    labels: Indices
    """The class of each sample, (n,)."""
    domains: Indices | None = None
    """The domain of each sample, (n,); None for data without domains."""
    clients: Indices | None = None
    """The client that each sample comes from, (n,); None for data that name none."""

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class PartitionTask:
    """The samples to give out, and everything that may decide who gets which."""

    train: Samples
    """The training samples, thinned to the scenario's long tail, without those of the server or a test split."""
    test: Samples
    validation: Samples | None
    classnames: Sequence[str]
    domain_names: Sequence[str]
    client_names: Sequence[str]
    scenario: Scenario
    """``scenario.clients`` is the number of clients to create; fields of other partitions have no effect."""
    rng: np.random.Generator
    """The only source of randomness: a generator of the run's seed."""
    location: str = ""
    """The text behind the colon of the partition's name."""
    present_domains: Sequence[int] = ()
    """The domains to give out: all domains of the data but a held-out one, also those without a training sample."""


@dataclass(frozen=True, eq=False)
class ClientSamples:
    """The samples of each client, as indices (n_k,) into the splits of a `PartitionTask`."""

    train: Sequence[Indices]
    """Training samples by client. A sample goes to one client at most, and every client needs one."""
    test: Sequence[Indices] | None = None
    """Test samples by client; None: all clients share the whole test split, weighted by their classes' shares."""
    validation: Sequence[Indices] | None = None
    later: Sequence[Sequence[Indices]] = ()
    """Training samples by client in the second, third... stretch of the run, for data that drift. All stretches have
    the same number of rounds; ``train`` is the first."""
    names: Sequence[str] = ()
    """Names of the clients; empty where they have none."""
    later_test: Sequence[Sequence[Indices] | None] = ()
    """Test samples by client in each of the ``later`` stretches; empty: the first stretch's throughout."""


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
        """A hash of the files that the partition depends on besides data and seed; it identifies stored runs."""
        return ""


AnyPartition = Partition[Any]


@dataclass(frozen=True)
class BackboneRequest:
    """A request for a backbone."""

    text: str
    """The name as it was typed; the `Backbone` gets this name."""
    location: str
    """The text behind the colon; "" where nothing may follow."""
    data_dir: Path
    """The folder in which pretrained weights are looked up and kept."""
    seed: int
    """The seed of weights that start at random."""
    image_size: tuple[int, int] | None = None
    """Height and width of the data set's images, for a clear error where a network needs more; None: unknown."""


@dataclass(frozen=True)
class Pretraining:
    """The data that a backbone's weights were trained on before any federation."""

    text: str
    """A description for users; it says so where the data are unknown."""
    datasets: tuple[str, ...] = ()
    """Data sets with images of the same source, by the title of their card or by name. Results on them are marked."""


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
        """How to get the published weights; "" if they are here, or none are needed."""
        return ""

    def pretrained_on(self, request: BackboneRequest) -> Pretraining | None:
        """The data that its weights were trained on, from its name alone; None if it starts at random, or they are not
        stated."""
        return None


AnyFamily = BackboneFamily[Any]


@dataclass(frozen=True)
class TextRequest:
    """A request for class vectors."""

    text: str
    """The encoder's name as it was typed."""
    location: str
    """The text behind the colon; "" where nothing may follow."""
    classnames: Sequence[str]
    templates: Sequence[str]
    """Prompts in which ``{}`` is the class name."""
    seed: int
    """The seed of drawn vectors."""
    dim: int
    """The width of vectors that are drawn; an encoder has its own."""
    data_dir: Path
    """The folder in which files of weights and vectors are looked up."""


class TextEncoder(Plugin[P]):
    """A text encoder. An entry point of the group ``fedbench.text_encoders`` loads such a class."""

    kind = "text encoder"

    @abstractmethod
    def vectors(self, request: TextRequest) -> Tensor:
        """One vector a class, float32 (K, V); they are brought to length one."""

    def digest(self, request: TextRequest) -> str:
        """A hash of the weights or files, which identifies stored runs; "" where there are none."""
        return ""

    def how_to_get(self, request: TextRequest) -> str:
        """How to get the published weights; "" if they are here, or none are needed."""
        return ""


AnyTextEncoder = TextEncoder[Any]


@dataclass(frozen=True, eq=False)
class MetricTask:
    """The input of a metric. n is the number of test samples, C the number of classes."""

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
        return self.federation.classnames

    @property
    def groups(self) -> Mapping[str, tuple[int, ...]]:
        """Classes by reporting group (head, mid, tail); empty where the scenario has no long tail."""
        return self.federation.groups

    @cached_property
    def right(self) -> Tensor:
        """Whether the global model is right on each sample, (n,) bool."""
        return self.predicted == self.labels

    def test_samples(self, client: int) -> Tensor:
        """The client's test samples, (m,) int64 indices into the test split; all of it where it has none of its own."""
        import torch

        own = self.federation.clients[client].test_indices
        return torch.arange(len(self.labels)) if own is None else own


class Metric(Plugin[P]):
    """A metric. An entry point of the group ``fedbench.metrics`` loads such a class.

    A run has it where ``metrics`` names it (``--set metrics=tail_f1``, in a suite ``metrics: [tail_f1]``).
    """

    kind = "metric"
    higher_is_better: ClassVar[bool | None] = True
    """None for a number that describes predictions without saying how good they are."""
    at_the_end: ClassVar[bool] = False
    """Whether it is computed after the last round alone."""
    needs_model: ClassVar[bool] = True
    """Whether it measures the global model; it is then left out for a method that has none."""

    @classmethod
    def _is_of_harness(cls) -> bool:
        from fedbench.core.metric_names import is_of_harness  # with numpy

        return is_of_harness(cls.name)

    @abstractmethod
    def values(self, task: MetricTask) -> float | Mapping[str, float] | None:
        """The number under the metric's name, or several under names that begin with it (``name/part``).

        None, or a name left out, where there is nothing to measure.
        """


AnyMetric = Metric[Any]
