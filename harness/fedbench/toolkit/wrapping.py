"""Blocks of methods that wrap what the rest of a stack answers: models beside the one it built, its loss elsewhere.

A method that gives every client a model of its own beside the global one builds it by `with_own`, names its tensors
private (`Model.own`), takes the stack's loss there by `own_step`, and predicts by `own_predictions`.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import cast

from torch import Tensor

from fedbench.core.errors import FedbenchError
from fedbench.core.method.tasks import (
    AggregationTask,
    BroadcastTask,
    ClientTask,
    EvaluationTask,
    LocalStep,
    ModelSetup,
)
from fedbench.core.types import Broadcast, GlobalModel, Model, Outputs, Predictions, StepGradients, Tensors, Update

Aggregated = Tensors | GlobalModel
"""Type of an answer to the hook `aggregate`."""
Aggregate = Callable[[AggregationTask], Aggregated]
"""Type of ``rest`` in a wrapper of `aggregate`; the types below are those of other hooks."""
Build = Callable[[ModelSetup], Model]
Send = Callable[[BroadcastTask], Broadcast]
Train = Callable[[ClientTask], Update]
Gradients = Callable[[LocalStep], StepGradients]
Objective = Callable[[LocalStep], Tensor]
Evaluate = Callable[[EvaluationTask], Predictions]


def weights_of(answer: Aggregated) -> Tensors:
    """The weights in an answer to `aggregate`."""
    return answer.weights if isinstance(answer, GlobalModel) else answer


def with_weights(answer: Aggregated, weights: Tensors) -> Aggregated:
    """``answer`` to `aggregate` with other weights, and its running statistics, where it has some."""
    return replace(answer, weights=weights) if isinstance(answer, GlobalModel) else weights


def with_own(model: Model, prefix: str) -> Model:
    """``model`` with a second copy of its weights and running statistics, their names behind ``prefix``.

    The forward pass reads the first. What the server alone changes is part of both.
    """
    copied = {name: value for name, value in model.buffers.items() if name not in model.of_server}
    weights = {prefix + name: value.clone() for name, value in model.weights.items()}
    buffers = {prefix + name: value.clone() for name, value in copied.items()}
    factors = {prefix + name: factor for name, factor in model.lr_factors.items()}
    return beside(replace(model, lr_factors={**model.lr_factors, **factors}), weights, buffers)


def beside(model: Model, weights: Tensors, buffers: Tensors | None = None) -> Model:
    """``model`` with further ``weights`` and running statistics that its forward pass does not read: `Model.own`."""
    return replace(
        model,
        weights={**model.weights, **weights},
        buffers={**model.buffers, **(buffers or {})},
        own=model.own.union(weights, buffers or {}),
    )


def of_own(tensors: Tensors, prefix: str) -> Tensors:
    """The tensors of the model whose names stand behind ``prefix``, by their names without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def without_own(tensors: Tensors, model: Model) -> Tensors:
    """The tensors that the model's forward pass reads."""
    return {name: value for name, value in tensors.items() if name not in model.own}


def global_step(step: LocalStep) -> LocalStep:
    """``step`` at the weights that the model's forward pass reads, which the rest of the stack knows."""
    model = step.model
    return replace(step, weights=without_own(step.weights, model), buffers=without_own(step.buffers, model))


def own_step(step: LocalStep, weights: Tensors, buffers: Tensors | None = None) -> LocalStep:
    """``step`` at the ``weights`` (and running statistics) of the client's own model, by the names of the stack's.

    A loss that writes to the client's state there is refused with a FedbenchError.
    """
    of_server = {name: value for name, value in step.buffers.items() if name in step.model.of_server}
    buffers = without_own(step.buffers, step.model) if buffers is None else {**of_server, **buffers}
    state = cast(dict[str, Tensors], _NotToWrite(step.task.state))
    return replace(step, weights=weights, buffers=buffers, task=replace(step.task, state=state), is_own=True)


def without_value(loss: Tensor) -> Tensor:
    """Zero, with the gradient of ``loss``: added to the global model's loss, it leaves what is recorded of that."""
    return loss - loss.detach()


class _NotToWrite(UserDict[str, Tensors]):
    """A client's state that refuses changes, for a loss that is taken at several models, or several times a step."""

    def __init__(self, kept: Mapping[str, Tensors]) -> None:
        self.data = dict(kept)

    def __setitem__(self, method: str, kept: Tensors) -> None:
        raise FedbenchError(
            f"the loss of {method} keeps something from step to step, so it can't be taken at a model of the "
            "client's own as well; run the two as separate rows."
        )


def frozen(step: LocalStep, names: Collection[str]) -> LocalStep:
    """``step`` with the weights in ``names`` as constants: without a gradient an optimiser leaves them as they are."""
    return replace(step, weights={n: w.detach() if n in names else w for n, w in step.weights.items()})


def tried(step: LocalStep) -> LocalStep:
    """``step`` for a pass that is none of training: running statistics, and what losses keep, are thrown away."""
    state = {method: dict(kept) for method, kept in step.task.state.items()}
    buffers = {name: value.clone() for name, value in step.buffers.items()}
    return replace(step, buffers=buffers, task=replace(step.task, state=state))


def with_outputs(step: LocalStep, change: Callable[[Outputs], Outputs]) -> LocalStep:
    """``step`` whose model gives in training ``change`` of what it does without: for all of the stack's losses."""
    model = step.model

    def forward(tensors: Tensors, inputs: Tensor, training: bool) -> Outputs:
        outputs = model.forward(tensors, inputs, training)
        return change(outputs) if training else outputs

    return replace(step, task=replace(step.task, model=replace(model, forward=forward)))


def own_predictions(task: EvaluationTask, rest: Evaluate, own: Callable[[int], tuple[Tensors, Tensors]]) -> Predictions:
    """The predictions of ``rest`` for the global model, and for the requested clients' ``own`` weights and statistics.

    If a client was fine-tuned, it was the global model that was tuned; the model beside it is unchanged. Raises
    FedbenchError if ``rest`` predicts by no weights.
    """
    plain = replace(task, clients=(), own={}, private=frozenset())
    if task.client is not None:
        return rest(plain)
    answer, by_client = rest(plain), {}
    of_server = {name: value for name, value in task.buffers.items() if name in task.model.of_server}
    for client in task.clients:
        weights, buffers = own(client)
        labels = rest(replace(plain, weights=weights, buffers={**of_server, **buffers}, client=client)).labels
        if labels is None:
            raise FedbenchError(
                "the stack predicts by no global model, of which clients could have one of their own; leave one out."
            )
        by_client[client] = labels
    return replace(answer, by_client=by_client)
