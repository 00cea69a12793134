"""An assembled run: everything that training needs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedbench.core.federation import Federation
from fedbench.core.method.tasks import Hooks, ServerData
from fedbench.core.records import RunInfo
from fedbench.core.spec import RunSpec
from fedbench.core.types import InputSource, Model, Tensors
from fedbench.kinds.kinds import AnyMetric
from fedbench.plugins.assembly import Assembly
from fedbench.rounds.executors import Executor
from fedbench.rounds.state import RunState


@dataclass(frozen=True, eq=False)
class Run:
    """An assembled run, ready to train."""

    spec: RunSpec
    assembly: Assembly
    federation: Federation
    """The federation that the method trains on."""
    scored: Federation
    """The scenario's own federation, on which every method is scored alike."""
    model: Model
    info: RunInfo
    train: InputSource
    test: InputSource
    validation: InputSource | None
    side: dict[str, InputSource]
    """The training samples as the model's ``side_encoders`` see them."""
    executor: Executor
    private: frozenset[str]
    """Names of weights and running statistics that never leave a client."""
    server: ServerData | None
    """The server's own samples that the method requires; None if it requires none."""
    unseen: UnseenTest | None = None
    """The test of unseen classes; None if the scenario has none, or the model cannot name them."""
    metrics: tuple[AnyMetric, ...] = ()
    """The metrics that are computed after a round."""
    given: Tensor | None = None
    """Whether a training sample has its label from a method, (n,) bool; None if no method labels samples."""

    def in_round(self, number: int) -> Run:
        """The run with the clients' data of round ``number``; itself if the data do not drift."""
        if not self.federation.later:
            return self
        rounds = self.spec.training.rounds
        federation, scored = (one.in_round(number, rounds) for one in (self.federation, self.scored))
        return replace(self, federation=federation, scored=scored)

    def initial_state(self) -> RunState:
        """The state before round 1."""
        return RunState(0, _copies(self.model.weights), _copies(self.model.buffers))


def model_on(model: Model, device: torch.device) -> Model:
    """``model`` with all its tensors on ``device``, including those that methods add before round 1."""
    moved = [_on(tensors, device) for tensors in (model.weights, model.buffers, model.constants)]
    return replace(model, weights=moved[0], buffers=moved[1], constants=moved[2])


def _on(tensors: Tensors, device: torch.device) -> Tensors:
    return {name: tensor.detach().to(device) for name, tensor in tensors.items()}


def _copies(tensors: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


@dataclass(frozen=True, eq=False)
class UnseenTest:
    """The model of the unseen classes (a `Renamed`), with their test samples as it takes them."""

    hooks: Hooks
    model: Model
    inputs: InputSource
