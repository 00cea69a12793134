"""What the hook `measure` is handed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedbench.core.method.tasks import ClientTask
from fedbench.core.spec import RunSpec
from fedbench.core.types import InputSource, Model, Tensors, Update


@dataclass(frozen=True, eq=False)
class MeasureTask:
    """A round that was trained and aggregated: what its last exchange asked, what came back, what the server made."""

    round: int
    tasks: Mapping[int, ClientTask]
    """By client, of those whose updates the server accepted."""
    updates: tuple[Update, ...]
    weights: Tensors
    """The global weights after the round."""
    buffers: Tensors
    own: Mapping[int, Tensors]
    """The private tensors of clients after the round, by client."""
    inputs: InputSource
    """What is evaluated, without labels."""
    model: Model
    spec: RunSpec
    state: Mapping[str, Tensors]
    """The server's tensors, by method name."""

    def local_model(self, update: Update) -> Tensors:
        """Weights and running statistics of the client's model as it trained it, by name."""
        task = self.tasks[update.client]
        trained = {**task.received, **task.buffers, **update.weights, **update.buffers}
        return {**trained, **self.own.get(update.client, {})}
