"""Private tensors, which never leave a client: finding their names, and keeping them apart from sent tensors."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from fedbench.core.errors import MethodFault
from fedbench.core.spec import RunSpec
from fedbench.core.types import Model, Tensors, Update
from fedbench.plugins.assembly import Assembly
from fedbench.toolkit.fedavg import FedAvg


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
