"""The sequential executor: one client after another, or as many side by side as the run has cores.

Side by side means threads: a round of fedavg-cnn in two threads takes 0.59 of the time on two cores, in two forked
processes the same, and threads share the data and need nothing sent. Steps are not compiled: with torch.compile one of
resnet8 takes 0.87 of the time and one of convnet 1.08, after 12 to 23 s of compiling for every run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from torch import Tensor

from fedbench.core.errors import FedbenchError
from fedbench.core.method.answers import require_tensors, require_update
from fedbench.core.method.tasks import ClientTask, Hooks, LocalStep
from fedbench.core.types import LabelledBatch, StepGradients, Tensors, Update
from fedbench.rounds.executors.gradients import (
    BUFFER,
    LOSS,
    any_after,
    batch_of,
    in_any_round,
    shared_task,
    task_of,
)
from fedbench.rounds.executors.graphs import Changed, Graphs, can_record
from fedbench.rounds.executors.stack import PerClient


class Sequential:
    """Trains each client by the hook `local_train`, on ``cores`` threads of one intra-op thread each.

    Clients are independent of each other, so the numbers do not depend on ``cores``. On a device that has graphs, the
    steps are recorded (see `Recording`), and clients share one thread.
    """

    def __init__(self, cores: int = 1, reason: str = "") -> None:
        """``reason``: why clients are not trained at once."""
        self.cores = cores
        self._reason = reason
        self._recording: Recording | None = None
        self.description = self.told(reason)

    def told(self, reason: str) -> str:
        """How clients were trained, and the ``reason`` for it."""
        steps = "" if self._recording is None else self._recording.graphs.told
        return f"sequential: {reason}{steps}" if reason else f"sequential{steps}"

    def train(self, tasks: Sequence[ClientTask]) -> list[Update]:
        """The clients' updates in the order of ``tasks``, with what `after_training` adds. Nothing of a task but its
        ``state`` is changed."""
        weight = next(iter(tasks[0].received.values()), None)
        is_refused = self._recording is not None and bool(self._recording.graphs.obstacle)
        if weight is not None and can_record(weight.device) and not is_refused:
            return self._train_recorded(tasks)
        if self.cores == 1 or len(tasks) == 1:
            return [train_client(task) for task in tasks]
        with ThreadPoolExecutor(min(self.cores, len(tasks))) as threads:
            return list(threads.map(train_client, tasks))

    def _train_recorded(self, tasks: Sequence[ClientTask]) -> list[Update]:
        recording = self._recording = self._recording or Recording(tasks[0].hooks)
        known = len(recording.graphs)
        before = [{method: dict(kept) for method, kept in task.state.items()} for task in tasks]
        updates = []
        try:
            for position, task in enumerate(tasks):
                # a new graph is compared with a step of every client, later on with one of each exchange
                is_new = len(recording.graphs) > known
                recording.is_due = is_new or position == task.round % len(tasks)
                updates.append(train_client(replace(task, hooks=cast(Hooks, recording))))
        except Changed as error:
            recording.graphs.stop(error)
            for task, state in zip(tasks, before, strict=True):
                task.state.clear()
                task.state.update(state)
            updates = [train_client(task) for task in tasks]
        self.description = self.told(self._reason)
        return updates

    def known(self) -> dict[str, str]:
        return {}

    def recall(self, known: Mapping[str, str]) -> None: ...


class Recording:
    """The hooks of a run, of which `local_gradients` is answered by graphs where it can be."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self.graphs = Graphs()
        self.is_due = True
        """Whether the next step that is replayed is compared with the step itself."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hooks, name)

    def local_gradients(self, step: LocalStep) -> StepGradients:
        """The gradients of the step. Raises Changed where a graph's are not those of the step itself."""
        kind = id(step.model), step.task.exchange, step.number == 0, step.is_own, tuple(_learning(step))
        recorded, alone = partial(_gradients_of, _without_tensors(step, self._hooks)), partial(self._alone, step)
        found = self.graphs.replayed(kind, _tensors(step), recorded, alone, is_compared=self.is_due)
        if found is None:
            return self._hooks.local_gradients(step=step)
        self.is_due = False
        for name, value in step.buffers.items():
            new = found.pop(BUFFER + name)
            if name not in step.model.of_server:
                value.copy_(new)
        loss = found.pop(LOSS)
        return StepGradients(found, loss)

    def _alone(self, step: LocalStep) -> Tensors:
        """What the step itself gives, with statistics of its own."""
        buffers = {name: value.clone() for name, value in step.buffers.items()}
        own = LocalStep(step.weights, buffers, step.batch, step.task, step.number, step.is_own)
        return _named(self._hooks.local_gradients(step=own), buffers)


@dataclass(frozen=True)
class _Bare:
    """What is left of a step without its tensors, which a graph would keep in memory."""

    task: ClientTask
    number: int
    is_own: bool
    learning: list[bool]
    """Which of the weights are trained."""


def _without_tensors(step: LocalStep, hooks: Hooks) -> _Bare:
    task = replace(in_any_round(shared_task(step.task)), hooks=hooks, received={}, buffers={}, payload={}, state={})
    return _Bare(task, any_after(step.number), step.is_own, _learning(step))


def _gradients_of(bare: _Bare, own: PerClient) -> Tensors:
    """The gradients of a step with the tensors ``own``."""
    pairs = zip(own["weights"].items(), bare.learning, strict=True)
    weights = {name: weight.detach().requires_grad_(is_trained) for (name, weight), is_trained in pairs}
    task = task_of(bare.task, own["client"])
    step = LocalStep(weights, own["buffers"], batch_of(own["samples"]), task, bare.number, bare.is_own)
    return _named(task.hooks.local_gradients(step=step), own["buffers"])


def _tensors(step: LocalStep) -> PerClient:
    """All tensors that a hook of the step may read."""
    task, batch = step.task, step.batch
    samples: PerClient = {"inputs": batch.inputs, "index": batch.index, "side": dict(batch.side)}
    if isinstance(batch, LabelledBatch):
        samples["labels"] = batch.labels
    client: PerClient = {"received": task.received, "payload": task.payload, "buffers": task.buffers}
    client["state"] = {method: dict(kept) for method, kept in sorted(task.state.items())}
    if task.class_counts is not None:
        client["class_counts"] = task.class_counts
    return {"weights": step.weights, "buffers": step.buffers, "client": client, "samples": samples}


def _learning(step: LocalStep) -> list[bool]:
    return [weight.requires_grad for weight in step.weights.values()]


def _named(found: StepGradients, buffers: Tensors) -> Tensors:
    changed: dict[str, Tensor] = {BUFFER + name: value for name, value in buffers.items()}
    return {**found.by_name, **changed, LOSS: found.loss}


def train_client(task: ClientTask) -> Update:
    """One client's update by the hook `local_train`, with all that methods add to it."""
    task = replace(task, inputs=task.inputs.resident(), side={name: one.resident() for name, one in task.side.items()})
    try:
        update = require_update(task, task.hooks.local_train(task=task), task.spec.method)
        return completed(task, update)
    except Exception as error:
        error.add_note(f"client {task.client}, round {task.round}")
        raise


def completed(task: ClientTask, update: Update) -> Update:
    """``update`` with what the hook `after_training` sends beside the weights."""
    answers = task.hooks.after_training(task=task, update=update)
    return replace(update, payload=joined([update.payload, *answers], task.spec.method, "after_training"))


def joined(answers: Iterable[Tensors], method: str, hook: str) -> Tensors:
    """All tensors that the methods of a stack send by a hook, in one mapping.

    Raises FedbenchError for answers that are not tensors by name, and if two methods use the same name.
    """
    payload: Tensors = {}
    for further in answers:
        require_tensors(further, method, hook)
        clash = sorted(set(payload) & set(further))
        if clash:
            raise FedbenchError(f"two methods of {method} both send {clash[0]!r}; rename one.")
        payload |= further
    return payload
