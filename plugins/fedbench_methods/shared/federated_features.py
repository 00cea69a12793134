"""Federated features: class gradients of a linear head go up, the server learns features that have the same gradients
and re-trains the head on them, as many of every class. The machinery of CReFF and CLIP2FL, for any linear head.

With features z, head W (C, d), b (C,) and its fixed scale s (logits s (W z + b)), the gradient of the mean
cross-entropy over n features of class c has a closed form:
    G_c = (1/n) sum_i (p_i - e_c) (s z_i)^T  in R^{C x d},   h_c = (s/n) sum_i (p_i - e_c),   p = softmax(s (W z + b))
It serves the clients (on real features) and the server (on its own), where matching therefore needs no second-order
graph. The server keeps its features times s: on v = s z the head is W v + s b, without a scale, so a start at N(0, 1)
and the learning rates mean the same on unit CLIP features as on those of a CNN, where s = 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedbench.api import (
    AggregationTask,
    Broadcast,
    BroadcastTask,
    ClientTask,
    EvaluationTask,
    FedbenchError,
    MeasureTask,
    Predictions,
    StartTask,
    Tensors,
    Update,
    hookimpl,
    hyper,
)
from fedbench.toolkit.fedavg import EVALUATION_BATCH, average
from fedbench.toolkit.heads import fresh_head, largest_logit_with_kept_head, retrained
from fedbench_methods.shared.class_gradients import (
    ClassGradients,
    class_gradients,
    cosine,
    dissimilarities,
    mean_over_owners,
)
from fedbench_methods.shared.siamese_augmentation import augmented

GradientForm = Literal["official", "paper"]
HeadStart = Literal["fresh", "warm", "global"]


@dataclass(frozen=True, kw_only=True)
class FeatureParams:
    """Hyper-parameters that all methods on federated features share."""

    # Seconds of a server's round on one core, C=10, m=100: matching 0.07, 0.10, 0.16, 0.29 at d=64, 128, 256, 512, and
    # re-training 0.02 to 0.03; in the released code's budget (300 epochs at 0.01) 0.14 to 0.30. Accuracy after the 20
    # rounds of suite longtail, two seeds, this budget against the code's: embedded CLIP 69.5 % and 69.8 % (FedAvg
    # 67.6 %), convnet 20.9 % and 21.1 % (FedAvg 19.1 %). C=100, m=100, d=256: 9 s to match, 0.7 s to re-train.
    features: int = hyper(
        100, symbol="m", low=1, high=1000, log=True, search=(10, 200), source="features a class; paper and code 100"
    )
    match_steps: int = hyper(100, symbol="match_epoch", low=0, high=1000, search=False, source="released code 100")
    lr_feature: float = hyper(
        0.1, symbol="lr_feature", low=1e-3, high=100.0, log=True, search=(0.01, 10.0), source="released code 0.1"
    )
    retrain_epochs: int = hyper(
        30, symbol="crt_epoch", low=0, high=1000, neutral=0, search=False, source="released code 300, at lr_head=0.01"
    )
    lr_head: float = hyper(
        0.1, symbol="lr_net", low=1e-4, high=1.0, log=True, source="released code 0.01, with retrain_epochs=300"
    )
    batch_real: int = hyper(32, symbol="batch_real", low=1, high=1024, log=True, search=False, source="released code")
    repeats: int = hyper(10, symbol="repeats", low=1, high=100, search=False, source="released code")
    augment: Literal["dsa", "none"] = hyper(
        "dsa", symbol="dsa", source="released code; images only, cached features never"
    )
    extractor: Literal["received", "updated"] = hyper(
        "received",
        symbol="θ",
        source="released code: the broadcast backbone; Algorithm 1 reads as the locally updated one",
    )
    dissimilarity: bool = hyper(
        False, symbol="Fig. 4", search=False, source="CLIP2FL, Fig. 4; reads all samples of the cohort once more"
    )


def matching_loss(ours: ClassGradients, target: ClassGradients, form: GradientForm) -> Tensor:
    """Dissimilarity of two sets of class gradients, summed over classes, a scalar.

    ``paper``: (1/C) sum_j [1 - cos(G_c[j], G'_c[j])] over the rows of the weight (Eq. 6 of CLIP2FL).
    ``official``: the sum over these rows, not their mean, plus 1 - cos(h_c, h'_c), the bias as one row more.
    """
    rows = 1 - cosine(ours.weight, target.weight)
    if form == "paper":
        return rows.mean(dim=1).sum()
    return rows.sum() + (1 - cosine(ours.bias, target.bias)).sum()


def descended(features: Tensor, loss_of: Callable[[Tensor], Tensor], steps: int, lr: float) -> Tensor:
    """``features`` after ``steps`` of plain gradient descent on ``loss_of``; a new tensor of the same shape."""
    current = features.clone()
    for _ in range(steps):
        leaf = current.requires_grad_()
        (gradient,) = torch.autograd.grad(loss_of(leaf), leaf)
        current = leaf.detach() - lr * gradient
    return current


@dataclass(frozen=True)
class FederatedFeatures:
    """The hooks' work for the method ``name``, whose server state holds "features" (C, m, d), times the head's scale,
    and the re-trained head "head.weight" (C, d) and "head.bias" (C,).
    """

    name: str
    params: FeatureParams
    gradient_form: GradientForm
    head_start: HeadStart

    def __post_init__(self) -> None:
        """Refuse what would classify by a head that nothing has trained."""
        if self.head_start == "fresh" and self.params.retrain_epochs == 0:
            raise FedbenchError(
                f"{self.name}.retrain_epochs=0 would leave a new head untrained; set head_start to warm or global."
            )

    def start(self, task: StartTask) -> None:
        """Draw the features from N(0, 1), once; the re-trained head starts as the model's own."""
        head = task.model.linear_head
        weight = task.model.weights[head.weight]
        generator = task.generator("federated-features")
        drawn = torch.randn(weight.shape[0], self.params.features, weight.shape[1], generator=generator)
        state = {"features": drawn, "head.weight": weight.clone(), "head.bias": task.model.weights[head.bias].clone()}
        task.state[self.name] = {name: tensor.to(task.spec.device) for name, tensor in state.items()}

    def broadcast(self, task: BroadcastTask) -> Broadcast:
        """The global weights, to train from, and beside them the re-trained head, for the class gradients."""
        state = task.state[self.name]
        return Broadcast(task.weights, {name: state[name] for name in ("head.weight", "head.bias")})

    @torch.no_grad()
    def client_gradients(self, task: ClientTask, update: Update) -> Tensors:
        """The gradients of the re-trained head for each class the client owns (Eq. 3 of CLIP2FL), as a payload.

        The mean over ``repeats`` draws of ``batch_real`` samples a class. Raises FedbenchError under hidden labels.
        """
        head, generator = task.model.linear_head, task.generator("class-gradients")
        labels = task.visible_labels.cpu()
        owned = torch.unique(labels)
        own_rows = [torch.nonzero(labels == label).flatten() for label in owned]
        draws = [
            self._drawn_features(task, update, own_rows, head.scale, generator) for _ in range(self.params.repeats)
        ]
        weight, bias = task.payload["head.weight"], task.payload["head.bias"]
        classes = owned.to(weight.device)
        by_class = [
            class_gradients(torch.cat(parts)[None], classes[i : i + 1], weight, bias, head.scale)
            for i, parts in enumerate(zip(*draws, strict=True))
        ]
        return {
            "classes": classes,
            "gradients.weight": torch.cat([gradients.weight for gradients in by_class]),
            "gradients.bias": torch.cat([gradients.bias for gradients in by_class]),
        }

    def _drawn_features(
        self, task: ClientTask, update: Update, own_rows: list[Tensor], scale: float, generator: torch.Generator
    ) -> tuple[Tensor, ...]:
        # one draw without replacement of every class, through the backbone together
        drawn = [rows[torch.randperm(len(rows), generator=generator)[: self.params.batch_real]] for rows in own_rows]
        sizes = [len(rows) for rows in drawn]
        inputs = task.inputs.read(torch.cat(drawn))
        if task.inputs.is_image and self.params.augment == "dsa":
            inputs = torch.cat([augmented(images, generator) for images in torch.split(inputs, sizes)])
        received = self.params.extractor == "received"
        tensors = {**task.received, **task.buffers} if received else {**update.weights, **update.buffers}
        chunks = torch.split(inputs, EVALUATION_BATCH)
        features = torch.cat([task.model.forward(tensors, chunk, False).features for chunk in chunks])
        return torch.split(scale * features, sizes)

    def aggregate(self, task: AggregationTask, further_loss: Callable[[Tensor], Tensor] | None = None) -> Tensors:
        """The mean of the clients' weights (Eq. 9 of CLIP2FL); the state gets matched features and a re-trained head.

        ``further_loss`` of the features (C, m, d) is added to the matching loss.
        """
        weights, state = average(task), task.state[self.name]
        head, params = task.model.linear_head, self.params
        old = (state["head.weight"], state["head.bias"])
        names = ("classes", "gradients.weight", "gradients.bias")
        target = mean_over_owners([ClassGradients(*(u.payload[name] for name in names)) for u in task.updates])

        def loss_of(features: Tensor) -> Tensor:
            ours = class_gradients(features[target.classes], target.classes, *old, head.scale)
            loss = matching_loss(ours, target, self.gradient_form)
            return loss if further_loss is None else loss + further_loss(features)

        features = descended(state["features"], loss_of, params.match_steps, params.lr_feature)
        task.metrics["matching_loss"] = float(loss_of(features))
        generator = task.generator("head-retraining")
        num_classes, _, width = features.shape
        new_weight, new_bias = (part.to(features.device) for part in fresh_head(num_classes, width, generator))
        starts = {
            # of the head W v + s b it is s b that starts in ±1/√d
            "fresh": (new_weight, new_bias / head.scale),
            "warm": old,
            "global": (weights[head.weight], weights[head.bias]),
        }
        weight, bias = starts[self.head_start]
        weight, bias = retrained(features, weight, bias, head.scale, params.retrain_epochs, params.lr_head, generator)
        task.state[self.name] = {"features": features, "head.weight": weight, "head.bias": bias}
        return weights


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
    def measure(self, task: MeasureTask) -> Mapping[str, float | Tensor]:
        """How far federated features and their gradients are from real ones, with `dissimilarity`."""
        federated = self.federated
        if not federated.params.dissimilarity:
            return {}
        return dissimilarities(task, task.state[federated.name]["features"])

    @hookimpl
    def after_training(self, task: ClientTask, update: Update) -> Tensors:
        """The gradients of the re-trained head for each class the client owns (Eq. 3 of CLIP2FL)."""
        return self.federated.client_gradients(task, update)

    @hookimpl
    def evaluate(self, task: EvaluationTask) -> Predictions:
        """The largest logit with the re-trained head."""
        return largest_logit_with_kept_head(task, self.federated.name)
