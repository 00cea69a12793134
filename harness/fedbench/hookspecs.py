"""Read this first: the hooks of fedbench are the steps of a federated run, in the order in which they happen.

A method is a plugin that answers some of them; `fedbench.defaults.FedAvg` answers all the rest. "First result" hooks
take the first answer that is not None, methods before the defaults; "collected" hooks gather every answer;
notifications expect none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, cast

import pluggy

from fedbench.spec import RunSpec, Training
from fedbench.types import Batch, Federation, Model, Outputs, Predictions, Tensors, Update

if TYPE_CHECKING:
    from torch import Tensor

    from fedbench.models import Backbone
    from fedbench.models.inputs import InputSource

PROJECT = "fedbench"
_F = TypeVar("_F", bound=Callable[..., Any])
_spec = pluggy.HookspecMarker(PROJECT)
_impl = pluggy.HookimplMarker(PROJECT)


def hookimpl(function: _F) -> _F:
    """Mark a plugin's method as the answer to the hook of the same name."""
    return _impl(function)


def default_hookimpl(function: _F) -> _F:
    """Mark one of the harness's own answers: asked after every method that answers the same hook."""
    return _impl(function, trylast=True)


class Method(Protocol):
    """What an entry point of the group ``fedbench.methods`` must load: a class with these attributes.

    ``Params`` is a frozen dataclass of ``hyper(...)`` fields. ``recipe`` holds optimiser settings of the paper
    (keys of ``Training``), used where neither suite row nor command line sets them.
    """

    name: ClassVar[str]
    citation: ClassVar[str]
    Params: ClassVar[type]
    recipe: ClassVar[Mapping[str, object]]

    def __init__(self, params: Any) -> None: ...


@dataclass(frozen=True, eq=False)
class ModelSetup:
    """What ``build_model`` can draw on."""

    backbone: Backbone
    classnames: tuple[str, ...]
    spec: RunSpec

    @property
    def tunes_everything(self) -> bool:
        """Whether the whole backbone is trained (``tune=full``, or ``auto`` on a backbone without pretraining)."""
        return self.spec.tune == "full" or (self.spec.tune == "auto" and not self.backbone.is_pretrained)


@dataclass(frozen=True, eq=False)
class ClientTask:
    """What the server asks one client of the cohort to do in a round."""

    client: int
    round: int
    received: Tensors
    """The global weights, by name; never changed in place."""
    buffers: Tensors
    """The global running statistics."""
    inputs: InputSource
    """The client's own samples, n_k of them, as the model takes them."""
    labels: Tensor | None
    """(n_k,) int64; None where the scenario hides them."""
    class_counts: Tensor | None
    """(C,) int64 of this client; None where labels are hidden."""
    model: Model
    spec: RunSpec
    state: dict[str, Tensors]
    """Tensors this client keeps between its participations, by method name; saved with the run."""
    hooks: Hooks

    @property
    def training(self) -> Training:
        """Budget and optimiser."""
        return self.spec.training


@dataclass(frozen=True, eq=False)
class LocalStep:
    """One local step. Hooks of the step are pure functions of these tensors: no ``.item()``, no branch on data."""

    weights: Tensors
    """Current weights, requiring gradients."""
    received: Tensors
    """The weights the round began with."""
    buffers: Tensors
    batch: Batch
    model: Model
    class_counts: Tensor | None
    state: dict[str, Tensors]

    @cached_property
    def outputs(self) -> Outputs:
        """Logits and features of the batch, computed once however many loss terms read them."""
        return self.model.forward({**self.weights, **self.buffers}, self.batch.inputs, True)


@dataclass(frozen=True, eq=False)
class AggregationTask:
    """What the server has at the end of a round. ``updates`` come in the order of client ids."""

    round: int
    weights: Tensors
    updates: tuple[Update, ...]
    spec: RunSpec
    state: dict[str, Tensors]
    """Tensors the server keeps between rounds, by method name; saved with the run."""


@dataclass(frozen=True, eq=False)
class EvaluationTask:
    """A model and the samples to predict classes for."""

    model: Model
    weights: Tensors
    buffers: Tensors
    inputs: InputSource
    num_classes: int
    state: Mapping[str, Tensors] = field(default_factory=dict)
    client_state: Mapping[int, Mapping[str, Tensors]] = field(default_factory=dict)


@dataclass(frozen=True)
class RunInfo:
    """What is known once a run is assembled; recorded with it."""

    owners: Mapping[str, str]
    """Hook name -> the plugins that answer it, in call order."""
    data_hash: str
    weights_hash: str
    """Of the pretrained backbone; empty for one trained from scratch."""
    num_clients: int
    cohort_size: int
    num_train: int
    num_test: int
    trainable_parameters: int
    round_bytes: int
    """Bytes of the model, one way, one client."""


@dataclass(frozen=True)
class RoundRecord:
    """What one round gave. Round 0 is the model before any training."""

    round: int
    cohort: tuple[int, ...]
    metrics: Mapping[str, float]
    """Empty in rounds that are not evaluated."""
    bytes_up: int
    bytes_down: int
    seconds: float
    """Local training and aggregation, evaluation left out."""


@dataclass(frozen=True)
class RunResult:
    """What a finished run gave."""

    records: tuple[RoundRecord, ...]
    summary: Mapping[str, float]
    predictions: tuple[int, ...]
    """Predicted classes of the test split after the last round."""
    weights: Mapping[str, Any]
    """Final weights and buffers as numpy arrays, by name."""
    seconds: float
    """Wall-clock time of the whole run, loading and evaluation included."""


class HookSpecs:
    """The hooks, in the order in which a run calls them."""

    @_spec(firstresult=True)
    def federate(self, federation: Federation, spec: RunSpec) -> Federation | None:
        """First result: the federation the method runs on, before the first round.

        Default: the scenario's. Answered by `clip-linear-centralized`, which pools all clients into one.
        """

    @_spec(firstresult=True)
    def build_model(self, setup: ModelSetup) -> Model | None:
        """First result: what is trained and sent, around the backbone. Called once.

        Default: a text-initialised linear head on frozen CLIP features, or the whole network. Answered by `fedclip`
        (an adapter), `clip-zs` (nothing to train).
        """

    @_spec(firstresult=True)
    def local_train(self, task: ClientTask) -> Update | None:
        """First result: one client's update for the round.

        Default: epochs of minibatch steps over `local_loss` + `loss_terms`. No method of this package needs to answer
        it to change a loss.
        """

    @_spec(firstresult=True)
    def local_loss(self, step: LocalStep) -> Tensor | None:
        """First result: the base loss of a batch, a scalar. Default: cross-entropy. Answered by `fedclip`."""

    @_spec
    def loss_terms(self, step: LocalStep) -> Tensor | None:
        """Collected and added to the base loss: a scalar. Default: none. Answered by `fedprox`."""

    @_spec(firstresult=True)
    def aggregate(self, task: AggregationTask) -> Tensors | None:
        """First result: the server's next weights. Running statistics are averaged by the harness, for every method.

        Default: the mean of the clients' weights, weighted by `num_examples`. No method of this package needs another
        yet; a coordinate-wise median or a server optimiser answers it.
        """

    @_spec(firstresult=True)
    def evaluate(self, task: EvaluationTask) -> Predictions | None:
        """First result: predicted classes; the harness scores them, so that every method is measured alike.

        Default: the largest logit of the global model. No method of this package needs another yet; one that classifies
        by prototypes, or with a model of each client's own, answers it.
        """

    @_spec
    def run_started(self, spec: RunSpec, info: RunInfo) -> None:
        """Notification: a run is assembled and begins. MLflow and the progress view listen."""

    @_spec
    def round_finished(self, spec: RunSpec, record: RoundRecord) -> None:
        """Notification: a round is done. MLflow and the progress view listen."""

    @_spec
    def run_finished(self, spec: RunSpec, info: RunInfo, result: RunResult) -> None:
        """Notification: a run is done. MLflow listens."""

    @_spec
    def run_failed(self, spec: RunSpec, reason: str) -> None:
        """Notification: a run ended early, with the reason in one line. MLflow listens."""


class Hooks(Protocol):
    """`HookSpecs` as the caller sees it, typed: pluggy's own relay is untyped."""

    def federate(self, *, federation: Federation, spec: RunSpec) -> Federation: ...
    def build_model(self, *, setup: ModelSetup) -> Model: ...
    def local_train(self, *, task: ClientTask) -> Update: ...
    def local_loss(self, *, step: LocalStep) -> Tensor: ...
    def loss_terms(self, *, step: LocalStep) -> list[Tensor]: ...
    def aggregate(self, *, task: AggregationTask) -> Tensors: ...
    def evaluate(self, *, task: EvaluationTask) -> Predictions: ...
    def run_started(self, *, spec: RunSpec, info: RunInfo) -> None: ...
    def round_finished(self, *, spec: RunSpec, record: RoundRecord) -> None: ...
    def run_finished(self, *, spec: RunSpec, info: RunInfo, result: RunResult) -> None: ...
    def run_failed(self, *, spec: RunSpec, reason: str) -> None: ...


def plugin_manager() -> pluggy.PluginManager:
    """A new manager that knows the hooks; one a run, so that runs in one process keep apart."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(HookSpecs)
    return manager


def relay(manager: pluggy.PluginManager) -> Hooks:
    """The manager's hooks, typed."""
    return cast(Hooks, manager.hook)
