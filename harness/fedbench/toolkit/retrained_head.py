"""The hooks that methods on federated features share; what differs between them is how they aggregate."""

from __future__ import annotations

from fedbench.core.hooks import BroadcastTask, ClientTask, EvaluationTask, StartTask, hookimpl
from fedbench.core.types import Broadcast, Predictions, Tensors, Update
from fedbench.toolkit.federated_features import FederatedFeatures


class RetrainedHead:
    """For plugin classes to inherit: every hook but ``aggregate``, on what the plugin sets as ``federated``."""

    federated: FederatedFeatures

    @hookimpl
    def start(self, task: StartTask) -> None:
        """Draw the federated features, once; nothing is sent."""
        self.federated.start(task)

    @hookimpl
    def broadcast(self, task: BroadcastTask) -> Broadcast:
        """The global weights and the re-trained head."""
        return self.federated.broadcast(task)

    @hookimpl
    def after_training(self, task: ClientTask, update: Update) -> Tensors:
        """The gradients of the re-trained head for each class the client owns (Eq. 3 of CLIP2FL)."""
        return self.federated.client_gradients(task, update)

    @hookimpl
    def evaluate(self, task: EvaluationTask) -> Predictions:
        """The largest logit with the re-trained head."""
        return self.federated.evaluate(task)
