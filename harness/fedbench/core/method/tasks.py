"""Tasks and answers of the steps of a run: the arguments of the hooks in `fedbench.core.method.hooks`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch

from fedbench.core.errors import FedbenchError
from fedbench.core.randomness import torch_generator
from fedbench.core.spec import RunSpec, Training
from fedbench.core.types import Backbone, Batch, ClientReport, LabelledBatch, Model, Outputs, Tensors, Update

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from fedbench.core.federation import Federation
    from fedbench.core.types import Broadcast, FrozenEncoder, GlobalModel, InputSource, Predictions, StepGradients


def _visible(of_labels: Tensor | None, spec: RunSpec) -> Tensor:
    if of_labels is None:
        raise FedbenchError(
            f"{spec.method} needs labels, which this scenario hides (labels=hidden); set scenario.labels=visible."
        )
    return of_labels


@dataclass(frozen=True, eq=False)
class ModelSetup:
    """The arguments of the hook ``build_model``."""

    backbone: Backbone
    classnames: tuple[str, ...]
    spec: RunSpec
    data_dir: Path
    """The folder in which pretrained weights of a teacher or a text encoder are looked up."""

    def generator(self, purpose: str, *keys: int) -> torch.Generator:
        """A CPU generator for ``purpose`` and ``keys``, derived from the run's seed."""
        return torch_generator(self.spec.seed, purpose, *keys)

    @property
    def tunes_everything(self) -> bool:
        """Whether the whole backbone is trained (``tune=full``, or ``auto`` on a backbone without pretraining)."""
        return self.spec.tune == "full" or (self.spec.tune == "auto" and not self.backbone.is_pretrained)


@dataclass(frozen=True, eq=False)
class StartTask:
    """The server's knowledge before the first round. ``clients`` are in the order of their ids."""

    clients: Sequence[ClientReport]
    model: Model
    spec: RunSpec
    state: dict[str, Tensors]
    """Tensors the server keeps between rounds, by method name; to be filled in."""

    @property
    def class_counts(self) -> Tensor:
        """Class counts of all clients, (N, C) int64. Raises FedbenchError where the scenario hides labels."""
        return torch.stack([_visible(report.class_counts, self.spec) for report in self.clients])

    def generator(self, purpose: str, *keys: int) -> torch.Generator:
        """A CPU generator for ``purpose`` and ``keys``, derived from the run's seed."""
        return torch_generator(self.spec.seed, purpose, *keys)


@dataclass(frozen=True, eq=False)
class BroadcastTask:
    """The server is about to send ``client`` what it trains from."""

    client: int
    round: int
    exchange: int
    weights: Tensors
    """The global weights and (below) running statistics, without private ones."""
    spec: RunSpec
    state: Mapping[str, Tensors]
    """The server's tensors, by method name."""
    buffers: Tensors = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class ClientTask:
    """The task of one client of the cohort in a round."""

    client: int
    round: int
    received: Tensors
    """The weights that the server sent, or, in turn, the client before. No tensor of a task is changed in place."""
    buffers: Tensors
    """The global model's running statistics."""
    payload: Tensors
    """Further tensors that the server sent."""
    inputs: InputSource
    """The client's own samples, n_k of them, as the model takes them."""
    labels: Tensor | None
    """(n_k,) int64; None where the scenario hides them."""
    class_counts: Tensor | None
    """(C,) int64 of this client; None where labels are hidden."""
    model: Model
    spec: RunSpec
    state: dict[str, Tensors]
    """Tensors this client keeps between its participations, by method name, to be replaced; saved with the run."""
    hooks: Hooks
    side: Mapping[str, InputSource] = field(default_factory=dict)
    """Outputs of the model's ``side_encoders`` for the client's samples, n_k each, by encoder name."""
    exchange: int = 0
    """The number of this exchange within the round, from 0; see the hook `exchanges`."""
    work: float = 1.0
    """The share of its local steps that the client gets done, below 1 for a straggler; `batches_of` heeds it."""

    @property
    def training(self) -> Training:
        return self.spec.training

    @property
    def visible_labels(self) -> Tensor:
        """``labels``, of a method that requires them. Raises FedbenchError where the scenario hides them."""
        return _visible(self.labels, self.spec)

    @property
    def visible_counts(self) -> Tensor:
        """``class_counts``, of a method that requires labels. Raises FedbenchError where the scenario hides them."""
        return _visible(self.class_counts, self.spec)

    def generator(self, purpose: str) -> torch.Generator:
        """A generator of this client's own in this round and exchange, for ``purpose``; CPU."""
        # the first exchange keeps the key it would have were it the only one
        later = (self.exchange,) if self.exchange else ()
        return torch_generator(self.spec.seed, purpose, self.round, self.client, *later)


@dataclass(frozen=True, eq=False)
class LocalStep:
    """One local step. Hooks of the step are pure functions of these tensors: no ``.item()``, no branch on data.

    A method whose loss carries something from step to step (running labels) may replace its own tensors in ``state``.
    """

    weights: Tensors
    """The current weights, which require gradients."""
    buffers: Tensors
    """The current running statistics, by name."""
    batch: Batch
    task: ClientTask
    """The round's task: model, received weights, class counts, payload, state."""
    number: int
    """Number of the step within the client's round, from 0."""
    is_own: bool = False
    """Whether ``weights`` are of a model that the client keeps: what corrects drift adds nothing."""

    @property
    def model(self) -> Model:
        return self.task.model

    @property
    def received(self) -> Tensors:
        """The weights that the round began with."""
        return self.task.received

    @property
    def labels(self) -> Tensor:
        """(b,) int64, of a method that requires labels. Raises FedbenchError where the scenario hides them."""
        return _visible(self.batch.labels if isinstance(self.batch, LabelledBatch) else None, self.task.spec)

    def generator(self, purpose: str) -> torch.Generator:
        """A generator of this step's own, for ``purpose``; CPU. A loss that draws trains one client after another."""
        task = self.task
        return torch_generator(task.spec.seed, purpose, task.round, task.client, task.exchange, self.number)

    @cached_property
    def outputs(self) -> Outputs:
        """Logits and features of the batch, computed once however many loss terms read them."""
        return self.model.forward({**self.weights, **self.buffers}, self.batch.inputs, True)

    def outputs_with(self, further: Tensors) -> Outputs:
        """The outputs of a pass that reads ``further`` tensors too (noise, say); from now on they are the `outputs`.

        For a `local_loss` that changes the forward pass: a second one would move running statistics twice.
        """
        vars(self)["outputs"] = self.model.forward({**self.weights, **self.buffers, **further}, self.batch.inputs, True)
        return self.outputs

    @cached_property
    def received_outputs(self) -> Outputs:
        """Outputs of the received model for the batch, in eval mode and without gradients."""
        return self.outputs_of(self.task.received, self.task.buffers)

    def outputs_of(self, weights: Tensors, buffers: Tensors) -> Outputs:
        """Outputs of a frozen model (the received one, an earlier one) for the batch, in eval mode and without
        gradients."""
        with torch.no_grad():
            return self.model.forward({**weights, **buffers}, self.batch.inputs, False)


@dataclass(frozen=True, eq=False)
class ServerData:
    """Samples the scenario grants the server (``server_samples`` a class), as the model takes them.

    ``labels`` (n,) int64; None where ``server_labels=hidden``, or where no method of the run requires them.
    """

    inputs: InputSource
    labels: Tensor | None


@dataclass(frozen=True, eq=False)
class ReportedTask:
    """The clients' reports, sent without training before round ``round``; rounds + 1 means after the last round.

    ``weights`` and ``buffers`` are the global model that clients were sent. The server writes its tensors to ``state``.
    """

    round: int
    cohort: tuple[int, ...]
    """The clients that train in this round; empty after the last, or where all drop out."""
    reports: Mapping[int, Tensors]
    """The reports by client, in the order of client ids."""
    weights: Tensors
    buffers: Tensors
    model: Model
    spec: RunSpec
    state: dict[str, Tensors]

    def generator(self, purpose: str) -> torch.Generator:
        """A generator of the server's own in this round, for ``purpose``; CPU."""
        return torch_generator(self.spec.seed, purpose, self.round)


@dataclass(frozen=True, eq=False)
class AggregationTask:
    """The server's inputs at the end of a round. ``updates``, at least one, are in the order of client ids.

    Private tensors (hook `private`) are neither in ``weights`` and ``buffers`` nor in the updates.
    """

    round: int
    weights: Tensors
    """The global weights before this aggregation."""
    buffers: Tensors
    updates: tuple[Update, ...]
    model: Model
    spec: RunSpec
    state: dict[str, Tensors]
    """Tensors the server keeps between rounds, by method name; saved with the run."""
    exchange: int = 0
    exchanges: int = 1
    """The number of the round's exchanges, of which this is number ``exchange``. The next one trains from the result.
    """
    num_clients: int = 0
    """N, all clients of the federation."""
    server_data: ServerData | None = None
    """The server's own samples, for methods that require them; otherwise None."""
    metrics: dict[str, float] = field(default_factory=dict)
    """To be written: numbers about the server's work, of the round's last exchange, by names of the method's own."""

    def generator(self, purpose: str, *keys: int) -> torch.Generator:
        """A generator of the server's own in this round and exchange, for ``purpose`` and further ``keys``; CPU."""
        return torch_generator(self.spec.seed, purpose, self.round, self.exchange, *keys)


@dataclass(frozen=True, eq=False)
class EvaluationTask:
    """A model and the samples to predict classes for; after the last round also clients whose own models to use."""

    model: Model
    weights: Tensors
    buffers: Tensors
    inputs: InputSource
    num_classes: int
    client: int | None = None
    """The client whose own model, fine-tuned after the last round, these weights are; None for the global model."""
    state: Mapping[str, Tensors] = field(default_factory=dict)
    """The server's tensors, by method name."""
    client_state: Mapping[int, Mapping[str, Tensors]] = field(default_factory=dict)
    """The methods' tensors on clients, by client and method name."""
    clients: tuple[int, ...] = ()
    """Clients whose own predictions on all ``inputs`` are requested: every client after the last round, otherwise none.
    """
    own: Mapping[int, Tensors] = field(default_factory=dict)
    """The private tensors of the clients that have taken part, by client; ``private`` are their names."""
    private: frozenset[str] = frozenset()
    is_unseen: bool = False
    """Whether the samples are of the scenario's unseen classes: ``model`` then has their names, and labels count from 0
    among them. What was kept by class in training is of other classes."""

    def own_model(self, client: int) -> tuple[Tensors, Tensors]:
        """Weights and running statistics of ``client``: the global ones with its private tensors in their place.

        Those of a client that has not taken part are the model's initial ones.
        """
        own = self.own.get(client, {})
        weights = {name: own.get(name, tensor) for name, tensor in self.weights.items()}
        return weights, {name: own.get(name, tensor) for name, tensor in self.buffers.items()}


@dataclass(frozen=True, eq=False)
class MeasureTask:
    """A round that was trained and aggregated: what its last exchange asked, what came back, what the server made."""

    round: int
    tasks: Mapping[int, ClientTask]
    """The clients' tasks, by client; only clients whose updates the server accepted."""
    updates: tuple[Update, ...]
    weights: Tensors
    """The global weights after the round."""
    buffers: Tensors
    own: Mapping[int, Tensors]
    """The private tensors of clients after the round, by client."""
    inputs: InputSource
    """The test samples, without labels."""
    model: Model
    spec: RunSpec
    state: Mapping[str, Tensors]
    """The server's tensors, by method name."""

    def local_model(self, update: Update) -> Tensors:
        """Weights and running statistics of the client's model as its update has it, by name."""
        task = self.tasks[update.client]
        trained = {**task.received, **task.buffers, **update.weights, **update.buffers}
        return {**trained, **self.own.get(update.client, {})}


@dataclass(frozen=True, eq=False)
class LabelledSamples:
    """Samples as an encoder sees them, with their ``labels`` (m,) int64."""

    features: Callable[[FrozenEncoder], InputSource]
    labels: Tensor


@dataclass(frozen=True, eq=False)
class LabelTask:
    """The clients' samples, some or all of which have hidden labels."""

    setup: ModelSetup
    features: Callable[[FrozenEncoder], InputSource]
    """All n training samples as an encoder sees them; the features are cached on disk."""
    clients: Sequence[Tensor]
    """Each client's samples without a label, int64 indices into the n samples. Labels that a client gets must depend on
    its own samples only."""
    num_samples: int
    """The number n of training samples."""
    server: LabelledSamples | None = None
    """The server's own samples, for a method that requires ``server_labels``."""


class Hooks(Protocol):
    """The hooks as the caller sees them, typed: `fedbench.core.method.hooks.HookSpecs` says what each does."""

    def federate(self, *, federation: Federation, spec: RunSpec) -> Federation: ...
    def build_model(self, *, setup: ModelSetup) -> Model: ...
    def label(self, *, task: LabelTask) -> Tensor | None: ...
    def relabel(self, *, task: ClientTask) -> Tensor | None: ...
    def start(self, *, task: StartTask) -> list[Tensors]: ...
    def private(self, *, model: Model, spec: RunSpec) -> list[Collection[str]]: ...
    def survey(self, *, round: int, spec: RunSpec, state: Mapping[str, Tensors]) -> str: ...
    def report(self, *, task: ClientTask) -> list[Tensors]: ...
    def reported(self, *, task: ReportedTask) -> None: ...
    def exchanges(self, *, round: int, spec: RunSpec, state: Mapping[str, Tensors]) -> int: ...
    def turns(self, *, clients: tuple[int, ...], round: int, spec: RunSpec) -> Sequence[int] | None: ...
    def broadcast(self, *, task: BroadcastTask) -> Broadcast: ...
    def local_train(self, *, task: ClientTask) -> Update: ...
    def local_gradients(self, *, step: LocalStep) -> StepGradients: ...
    def local_objective(self, *, step: LocalStep) -> Tensor: ...
    def local_loss(self, *, step: LocalStep) -> Tensor: ...
    def loss_terms(self, *, step: LocalStep) -> list[Tensor]: ...
    def after_training(self, *, task: ClientTask, update: Update) -> list[Tensors]: ...
    def upload(self, *, task: ClientTask, update: Update) -> Update: ...
    def aggregate(self, *, task: AggregationTask) -> Tensors | GlobalModel: ...
    def evaluate(self, *, task: EvaluationTask) -> Predictions: ...
    def measure(self, *, task: MeasureTask) -> list[Mapping[str, float | Tensor]]: ...
