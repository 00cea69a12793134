"""Checks of the answers to hooks; an answer that does not fit is refused with the method's name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from numbers import Integral, Real

import torch
from torch import Tensor

from fedbench.core.errors import MethodFault, diverged
from fedbench.core.method.tasks import AggregationTask, ClientTask, EvaluationTask, LocalStep
from fedbench.core.metric_names import is_reserved
from fedbench.core.types import GlobalModel, Predictions, StepGradients, Tensors, Update


def require(answer: object, wanted: type | tuple[type, ...], what: str, owner: str, hook: str) -> None:
    """Raise MethodFault unless the answer of ``owner`` has the type ``wanted``, described by ``what``."""
    if not isinstance(answer, wanted):
        raise MethodFault(f"{owner} answers the hook {hook} with {_kind(answer)}; it must be {what}.")


def require_tensors(answer: object, owner: str, hook: str) -> None:
    """Raise MethodFault unless the answer is tensors by name, whichever these are."""
    require(answer, Mapping, "tensors by name", owner, hook)
    assert isinstance(answer, Mapping)
    for name, value in answer.items():
        if not (isinstance(name, str) and isinstance(value, Tensor)):
            raise MethodFault(
                f"{owner} answers the hook {hook} with {_kind(value)} under {name!r}; it must be tensors by name."
            )


def require_labels(answer: object, count: int, classes: int, owner: str, hook: str) -> Tensor:
    """Check labels. Raises MethodFault unless ``answer`` is (``count``,) int64 of class numbers, or -1."""
    if not isinstance(answer, Tensor) or answer.dtype != torch.int64 or answer.shape != (count,):
        raise MethodFault(f"{owner} answers the hook {hook} with no int64 tensor of shape ({count},).")
    if count and (int(answer.min()) < -1 or int(answer.max()) >= classes):
        raise MethodFault(f"{owner} answers the hook {hook} with a label that is not -1 to {classes - 1}.")
    return answer


def require_fit(wanted: Tensors, given: object, owner: str, hook: str) -> None:
    """Raise MethodFault where ``given`` has not exactly the tensors ``wanted``, by name, shape and type."""
    wrong = misfit(wanted, given)
    if wrong:
        raise MethodFault(f"{owner} answers the hook {hook} but {wrong}.")


def misfit(wanted: Tensors, given: object) -> str:
    """How ``given`` differs from the tensors ``wanted`` in names, shapes and types; "" if it does not."""
    if not isinstance(given, Mapping):
        return f"returns {_kind(given)} in place of tensors by name"
    for name in sorted(wanted.keys() ^ given.keys(), key=str):
        what = f"leaves out {name!r}" if name in wanted else f"returns {name!r}, which it was not handed"
        return f"{what}; return every tensor by its own name"
    for name, tensor in wanted.items():
        value = given[name]
        if not isinstance(value, Tensor):
            return f"returns {_kind(value)} as {name!r}, which must be a tensor"
        if value.shape != tensor.shape:
            return f"returns {name!r} of shape {tuple(value.shape)}; it was handed {tuple(tensor.shape)}"
        if value.dtype != tensor.dtype:
            return f"returns {name!r} of type {value.dtype}; it was handed {tensor.dtype}"
    return ""


def require_update(task: ClientTask, update: object, owner: str) -> Update:
    """Check a client's answer to `local_train`. Raises MethodFault if it is no update of that client's tensors."""
    require(update, Update, "an Update", owner, "local_train")
    assert isinstance(update, Update)
    require_fit(task.received, update.weights, owner, "local_train")
    require_fit(task.buffers, update.buffers, owner, "local_train")
    require_tensors(update.payload, owner, "local_train")
    if update.client != task.client:
        raise MethodFault(
            f"{owner} answers the hook local_train for client {task.client} with an update of client {update.client!r}."
        )
    if not (isinstance(update.num_examples, Integral) and update.num_examples == len(task.inputs)):
        raise MethodFault(
            f"{owner} answers the hook local_train with num_examples={update.num_examples!r}; client {task.client} has "
            f"{len(task.inputs)} samples (len(task.inputs)), and to weight clients otherwise is the server's step."
        )
    require(update.metrics, Mapping, "metrics by name", owner, "local_train")
    for name, value in update.metrics.items():
        if not (isinstance(name, str) and name.strip()) or is_reserved(name):
            raise MethodFault(
                f"{owner} answers the hook local_train with a metric called {name!r}; choose another name: bytes, "
                "seconds, counts of faults, final/... and what ends in _accuracy are the harness's own."
            )
        if not isinstance(value, Real):
            raise MethodFault(
                f"{owner} answers the hook local_train with {_kind(value)} as the metric {name!r}; it must be a number."
            )
    return update


def require_loss(loss: object, step: LocalStep, hook: str) -> Tensor:
    """Check a loss, or a term of one. Raises MethodFault if it is no scalar tensor, or nothing can be learnt by it."""
    owner = step.task.spec.method
    require(loss, Tensor, "a scalar tensor", owner, hook)
    assert isinstance(loss, Tensor)
    if loss.numel() != 1:
        raise MethodFault(f"{owner} answers the hook {hook} with a tensor of shape {tuple(loss.shape)}, not a scalar.")
    # a term may be of weights alone that another method holds still in this step
    is_free = hook == "local_objective" or all(weight.requires_grad for weight in step.weights.values())
    # where clients train at once, `requires_grad` is that of torch.func's wrapper, which is never set
    if not loss.requires_grad and step.weights and is_free and not torch._C._functorch.is_batchedtensor(loss):
        instead = ", or None in a step without a term" if hook == "loss_terms" else ""
        raise MethodFault(
            f"{owner} answers the hook {hook} with a loss without gradient, by which no weight moves; return what is "
            f"computed of step.weights or step.outputs without detach(), item() or no_grad(){instead}."
        )
    return loss


def require_gradients(given: object, step: LocalStep) -> StepGradients:
    """Check an answer to the hook `local_gradients`. Raises MethodFault if it has no gradients for the weights of
    ``step``."""
    owner = step.task.spec.method
    require(given, StepGradients, "StepGradients", owner, "local_gradients")
    assert isinstance(given, StepGradients)
    for name, gradient in given.by_name.items():
        weight = step.weights.get(name)
        if weight is None or not isinstance(gradient, Tensor) or gradient.shape != weight.shape:
            raise MethodFault(
                f"{owner} answers the hook local_gradients with {_kind(gradient)} for {name!r}; it must be a tensor "
                "shaped as that weight of the step."
            )
    return given


def require_finite_updates(tasks: Sequence[ClientTask], updates: Sequence[Update]) -> None:
    """Raise Unworkable where a client's training has ended in NaN or infinity, in whatever it sends or keeps."""
    parts = [(update.weights, update.buffers, update.payload) for update in updates]
    if not not_finite(*chain.from_iterable(parts)):
        return
    for task, mappings in zip(tasks, parts, strict=True):
        name = not_finite(*mappings)
        if name:
            training = task.training
            raise diverged(
                f"{name!r} of client {task.client} is not finite in round {task.round}; "
                f"lower the learning rate (lr={training.lr:g}, momentum={training.momentum:g})."
            )


def require_global(
    task: AggregationTask, answer: Tensors | GlobalModel, averaged: Tensors, owner: str
) -> tuple[Tensors, Tensors]:
    """Weights and running statistics of an answer to `aggregate`; ``averaged`` are the statistics if it has none.

    Raises MethodFault where names or shapes differ from those handed over, Unworkable where values are not finite.
    """
    require(answer, (Mapping, GlobalModel), "every weight by name, or a GlobalModel", owner, "aggregate")
    weights, buffers = (answer.weights, answer.buffers) if isinstance(answer, GlobalModel) else (answer, averaged)
    require_fit(task.weights, weights, owner, "aggregate")
    require_fit(task.buffers, buffers, owner, "aggregate")
    name = not_finite(weights, buffers)
    if name:
        raise diverged(
            f"{name!r} of the global model is not finite after round {task.round}; lower the "
            "learning rate of the clients, or that of the server."
        )
    return weights, buffers


def require_predictions(task: EvaluationTask, answer: object, owner: str) -> Predictions:
    """An answer to the hook `evaluate`, on the CPU.

    Raises MethodFault unless it has one class for each of the task's samples, for requested clients only.
    """
    require(answer, Predictions, "Predictions", owner, "evaluate")
    assert isinstance(answer, Predictions)
    require(answer.by_client, Mapping, "Predictions with a tensor by client in by_client", owner, "evaluate")
    strangers = answer.by_client.keys() - set(task.clients)
    if strangers:
        raise MethodFault(
            f"{owner} answers the hook evaluate with predictions of client {min(strangers, key=repr)!r}, none of "
            "task.clients; answer for these alone."
        )
    for labels in (*([] if answer.labels is None else [answer.labels]), *answer.by_client.values()):
        require(labels, Tensor, "a tensor of classes", owner, "evaluate")
        if labels.shape != (len(task.inputs),) or labels.dtype != torch.int64:
            raise MethodFault(
                f"{owner} answers the hook evaluate with classes of shape {tuple(labels.shape)}, {labels.dtype}; it "
                f"must be one class for each of {len(task.inputs)} samples, ({len(task.inputs)},) torch.int64."
            )
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < task.num_classes:
            raise MethodFault(
                f"{owner} answers the hook evaluate with classes from {int(labels.min())} to {int(labels.max())}; they "
                f"are 0 to {task.num_classes - 1}."
            )
    require_scores(answer.scores, task, owner)
    return answer.on_cpu()


def require_scores(scores: Tensor | None, task: EvaluationTask, owner: str) -> None:
    """MethodFault where ``scores`` of an answer to `evaluate` are not a number for every sample and class."""
    if scores is None:
        return
    require(scores, Tensor, "Predictions with a tensor of scores", owner, "evaluate")
    wanted = (len(task.inputs), task.num_classes)
    if scores.shape != wanted or not scores.is_floating_point():
        raise MethodFault(
            f"{owner} answers the hook evaluate with scores of shape {tuple(scores.shape)}, {scores.dtype}; they must "
            f"be a logit for every sample and class, {wanted} float."
        )


def not_finite(*mappings: Tensors) -> str:
    """The name of the first tensor that has a NaN or infinite value; "" where there is none."""
    # a sum shows any such value in one pass without another tensor; it overflows for finite ones too, so it is no proof
    sums: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for _, tensor in _floating(mappings):
        sums.setdefault((tensor.device, tensor.dtype), []).append(tensor.sum())
    if all(bool(torch.stack(of_kind).isfinite().all()) for of_kind in sums.values()):
        return ""
    return next((name for name, tensor in _floating(mappings) if not bool(tensor.isfinite().all())), "")


def _floating(mappings: tuple[Tensors, ...]) -> Iterator[tuple[str, Tensor]]:
    named = chain.from_iterable(mapping.items() for mapping in mappings)
    return ((name, tensor) for name, tensor in named if tensor.is_floating_point() or tensor.is_complex())


def _kind(value: object) -> str:
    """The type of an answer, for a message: ``None``, ``a list``."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
