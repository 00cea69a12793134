"""A run that is assembled and ready to train."""

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
    """What the method trains on."""
    scored: Federation
    """The scenario's own clients, on which every method is scored alike."""
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
    """What the method requires of the server's own samples; None where it requires none."""
    unseen: UnseenTest | None = None
    """None where the scenario has no unseen classes to test, or the model cannot name them."""
    metrics: tuple[AnyMetric, ...] = ()
    """What its rounds are measured by."""
    given: Tensor | None = None
    """Which training samples have their label from a method, (n,) bool; None where none has."""

    def in_round(self, number: int) -> Run:
        """The run with what clients hold in round ``number``; itself where their data do not drift."""
        if not self.federation.later:
            return self
        rounds = self.spec.training.rounds
        federation, scored = (one.in_round(number, rounds) for one in (self.federation, self.scored))
        return replace(self, federation=federation, scored=scored)

    def initial_state(self) -> RunState:
        """The state before round 1."""
        return RunState(0, _copies(self.model.weights), _copies(self.model.buffers))


def model_on(model: Model, device: torch.device) -> Model:
    """``model`` with all its tensors on ``device``, where those that methods make of them before round 1 belong."""
    moved = [_on(tensors, device) for tensors in (model.weights, model.buffers, model.constants)]
    return replace(model, weights=moved[0], buffers=moved[1], constants=moved[2])


def _on(tensors: Tensors, device: torch.device) -> Tensors:
    return {name: tensor.detach().to(device) for name, tensor in tensors.items()}


def _copies(tensors: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


@dataclass(frozen=True, eq=False)
class UnseenTest:
    """A `Renamed` with the test samples of its classes as it takes them."""

    hooks: Hooks
    model: Model
    inputs: InputSource
