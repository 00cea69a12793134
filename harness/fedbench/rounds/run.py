"""An assembled run: everything that training needs. Its private tensors never leave a client."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from fedbench.core.arithmetic import float32_products
from fedbench.core.errors import MethodFault
from fedbench.core.federation import Federation
from fedbench.core.method.tasks import Hooks, ServerData
from fedbench.core.records import RunInfo
from fedbench.core.spec import RunSpec
from fedbench.core.types import InputSource, Model, Tensors, Update
from fedbench.kinds.kinds import AnyMetric
from fedbench.plugins.assembly import Assembly
from fedbench.rounds.executors import Executor
from fedbench.rounds.state import RunState
from fedbench.toolkit.fedavg import FedAvg


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


_P = ParamSpec("_P")
_R = TypeVar("_R")


def in_its_precision(function: Callable[Concatenate[Run, _P], _R]) -> Callable[Concatenate[Run, _P], _R]:
    """Let ``function`` compute products of float32 as its run's ``precision`` says."""

    @wraps(function)
    def of_run(run: Run, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with float32_products(run.spec.training.precision):
            return function(run, *args, **kwargs)

    return of_run


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


def private_names(assembly: Assembly, model: Model, spec: RunSpec) -> frozenset[str]:
    """The names that the stack answers the hook `private` with.

    MethodFault for a name that the model lacks, and for a model of the clients' own (`Model.own`) that would be sent,
    or that no method predicts by.
    """
    names = frozenset(name for answer in assembly.hooks.private(model=model, spec=spec) for name in answer)
    unknown = sorted(names - model.weights.keys() - model.buffers.keys())
    if unknown:
        raise MethodFault(
            f"{', '.join(assembly.answers('private'))} answers the hook private with {unknown[0]!r}, "
            "which is neither a weight nor a running statistic of the model; name only tensors the model has."
        )
    _refuse_own(assembly, model, names, spec)
    return names


def _refuse_own(assembly: Assembly, model: Model, private: Collection[str], spec: RunSpec) -> None:
    who = assembly.personalisation or spec.method
    if sent := sorted(model.own - set(private)):
        raise MethodFault(
            f"{who} builds a model of each client's own beside the global one, and nobody's hook private names "
            f"{sent[0]!r}, so it would be sent and averaged; answer private with model.own: weights and running "
            "statistics."
        )
    if model.own and set(assembly.answers("evaluate")) <= {FedAvg.name}:
        raise MethodFault(
            f"{who} builds a model of each client's own beside the global one, and nobody predicts by it: the default "
            "evaluate reads the global one alone; wrap evaluate, for instance by toolkit.wrapping.own_predictions."
        )


def shared(tensors: Tensors, private: Collection[str]) -> Tensors:
    """``tensors`` without the private ones; unchanged if nothing is private."""
    return {name: tensor for name, tensor in tensors.items() if name not in private} if private else tensors


def completed(sent: Tensors, own: Tensors, initial: Tensors, private: Collection[str]) -> Tensors:
    """The tensors that a client trains from, in the model's order: those ``sent`` and its ``own`` private ones.

    A client without tensors of its own starts from the model's ``initial`` ones.
    """
    if not private:
        return sent
    kept = {name: own.get(name, first) for name, first in initial.items() if name in private}
    tensors_of_client = {**shared(sent, private), **kept}
    return {name: tensors_of_client[name] for name in dict.fromkeys((*initial, *sent)) if name in tensors_of_client}


def kept_and_sent(update: Update, private: Collection[str]) -> tuple[Tensors, Update]:
    """A trained client's private tensors, and the update without them."""
    everything = {**update.weights, **update.buffers}
    kept = {name: tensor for name, tensor in everything.items() if name in private}
    return kept, replace(update, weights=shared(update.weights, private), buffers=shared(update.buffers, private))
