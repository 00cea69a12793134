"""A run that is assembled and ready to train."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedbench.core.federation import Federation
from fedbench.core.method.hooks import Hooks
from fedbench.core.method.tasks import ServerData
from fedbench.core.records import RunInfo
from fedbench.core.spec import RunSpec
from fedbench.core.types import InputSource, Model, Tensors
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

    def initial_state(self) -> RunState:
        """The state before round 1."""
        device = torch.device(self.spec.device)
        return RunState(0, on_device(self.model.weights, device), on_device(self.model.buffers, device))


def on_device(tensors: Tensors, device: torch.device) -> Tensors:
    """Copies of ``tensors`` on ``device``, without gradients."""
    return {name: tensor.detach().clone().to(device) for name, tensor in tensors.items()}


@dataclass(frozen=True, eq=False)
class UnseenTest:
    """A `Renamed` with the test samples of its classes as it takes them."""

    hooks: Hooks
    model: Model
    inputs: InputSource
