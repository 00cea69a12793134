"""The sequential executor: one client after another, or as many side by side as the run has cores.

Side by side means threads: a round of fedavg-cnn in two threads takes 0.59 of the time on two cores, in two forked
processes the same, and threads share the data and need nothing sent. Steps are not compiled: with torch.compile one of
resnet8 takes 0.87 of the time and one of convnet 1.08, after 12 to 23 s of compiling for every run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import cast

from fedbench.core.errors import FedbenchError
from fedbench.core.method.answers import require_tensors, require_update
from fedbench.core.method.tasks import ClientTask, Hooks
from fedbench.core.types import Tensors, Update
from fedbench.rounds.executors.graphs import Changed, Recording, can_record


class Sequential:
    """Trains each client by the hook `local_train`, on ``cores`` threads of one intra-op thread each.

    Clients are independent of each other, so the numbers do not depend on ``cores``. On a device that has graphs, the
    steps are recorded (see `Recording`), and clients share one thread.
    """

    def __init__(self, cores: int = 1, reason: str = "") -> None:
        """``reason``: why clients are not trained at once."""
        self.cores = cores
        self._reason = reason
        self.graphs = True
        """Whether steps may be recorded."""
        self._recording: Recording | None = None
        self.description = self.told(reason)

    def told(self, reason: str) -> str:
        """How clients were trained, and the ``reason`` for it."""
        steps = "" if self._recording is None else self._recording.told
        return f"sequential: {reason}{steps}" if reason else f"sequential{steps}"

    def train(self, tasks: Sequence[ClientTask]) -> list[Update]:
        if self.graphs and can_record(tasks[0]):
            return self._train_recorded(tasks)
        if self.cores == 1 or len(tasks) == 1:
            return [train_client(task) for task in tasks]
        with ThreadPoolExecutor(min(self.cores, len(tasks))) as threads:
            return list(threads.map(train_client, tasks))

    def _train_recorded(self, tasks: Sequence[ClientTask]) -> list[Update]:
        recording = self._recording = self._recording or Recording(tasks[0].hooks)
        recording.begin()
        before = [{method: dict(kept) for method, kept in task.state.items()} for task in tasks]
        try:
            updates = [train_client(replace(task, hooks=cast(Hooks, recording))) for task in tasks]
        except Changed:
            recording.obstacle = "its loss is not what it was when it was recorded"
            for task, state in zip(tasks, before, strict=True):
                task.state.clear()
                task.state.update(state)
            updates = [train_client(task) for task in tasks]
        self.description = self.told(self._reason)
        return updates

    def known(self) -> dict[str, str]:
        return {}

    def recall(self, known: Mapping[str, str]) -> None: ...


def train_client(task: ClientTask) -> Update:
    """One client's update by the hook `local_train`, with all that methods add to it."""
    task = replace(task, inputs=task.inputs.resident())
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
