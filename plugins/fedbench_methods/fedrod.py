"""FedRoD - Chen and Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR
2022.

One model with two predictors: a generic one, trained by a loss that is balanced over the client's classes, and what a
client adds to it, on the features z of the generic one, which it does not train (sg = stop-gradient):
    L = CE(o_g + γ log n_k) + CE(sg(o_g) + o_p),      o_g the stack's logits,  o_p = s (W_k sg(z) + b_k)
n_k (C,) counts the client's samples by class: the first term is the balanced softmax. What gives o_g and z is averaged
as under FedAvg; W_k, b_k stay. The generic model predicts by o_g, client k's own by o_g + o_p.

Wraps: build_model (W and b), local_objective (the stack's loss with balanced logits), evaluate. Answers: private.
Stacks with any method but another personalisation, around whatever gives logits and features: a head, a prompt, an
adapter, a whole network. A loss that does not read logits (that of `fedclip`) is not balanced. s is the scale of the
model's head, or CLIP's own. With γ = 0 the generic model is trained as without it.
Left open / contradicted: W_k and b_k start at zero, so that a client's own model starts as the generic one; in released
code as a copy of its head, or drawn. A client has no sample of a class with n = 0: it counts as 1e-8, whose logarithm
is −18. FL-bench predicts by o_p alone, on features that it trains: another method. The paper's hyper-network, which
makes W_k of the class counts, is not here. Own models are scored with the last global model, as trained heads are
elsewhere. W_k stays as trained where the update was lost.
Cost: no byte more, and a linear layer a client.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import fedbench.api as fb
from fedbench.models.clip.backbone import ClipBackbone
from fedbench.models.heads import scaled_logits
from fedbench.toolkit.heads import feature_width
from fedbench.toolkit.losses import balance, mean_cross_entropy
from fedbench.toolkit.wrapping import (
    Build,
    Evaluate,
    Objective,
    beside,
    global_step,
    own_predictions,
    with_outputs,
    without_value,
)

WEIGHT, BIAS, SCALE = "fedrod/weight", "fedrod/bias", "fedrod/scale"


@dataclass(frozen=True, kw_only=True)
class FedRodParams:
    """Hyper-parameters of FedRoD."""

    gamma: float = fb.hyper(
        1.0, symbol="γ", low=0.1, high=2.0, off=0.0, search=(0.5, 1.5), source="released code: 1, the balanced softmax"
    )


def residual(features: Tensor, tensors: fb.Tensors, scale: Tensor) -> Tensor:
    """o_p = s (W z + b), (batch, C), of ``features`` z (batch, d)."""
    return scale * scaled_logits(features, tensors[WEIGHT], tensors[BIAS], 1.0)


def with_residual(model: fb.Model) -> fb.Model:
    """``model`` with logits o_g + o_p."""

    def forward(tensors: fb.Tensors, inputs: Tensor, training: bool) -> fb.Outputs:
        outputs = model.forward(tensors, inputs, training)
        return replace(outputs, logits=outputs.logits + residual(outputs.features, tensors, model.constants[SCALE]))

    return replace(model, forward=forward)


class FedRoD(fb.Method[FedRodParams]):
    """A balanced generic predictor, and what each client adds to it."""

    name = "fedrod"
    citation = "Chen and Chao, On Bridging Generic and Personalized Federated Learning, ICLR 2022"
    requires = ("labels", "sent_steps")
    keeps_lost_training = True

    @fb.wrapper
    def build_model(self, setup: fb.ModelSetup, rest: Build) -> fb.Model:
        """What the stack trains, and a linear layer on its features that is zero at first."""
        model, classes = rest(setup), len(setup.classnames)
        scale = setup.backbone.logit_scale if isinstance(setup.backbone, ClipBackbone) else 1.0
        scale = scale if model.head is None else model.head.scale
        own = {WEIGHT: torch.zeros(classes, feature_width(model, setup.spec.device)), BIAS: torch.zeros(classes)}
        return replace(beside(model, own), constants={**model.constants, SCALE: torch.tensor(scale)})

    @fb.hookimpl
    def private(self, model: fb.Model, spec: fb.RunSpec) -> Collection[str]:
        """W_k and b_k."""
        return (WEIGHT, BIAS)

    @fb.wrapper
    def local_objective(self, step: fb.LocalStep, rest: Objective) -> Tensor:
        """The stack's loss of the balanced logits, with the gradients of cross-entropy of the own ones, of one pass."""
        shift, passes = balance(step.task.visible_counts, self.params.gamma), list[fb.Outputs]()

        def balanced(outputs: fb.Outputs) -> fb.Outputs:
            passes.append(outputs)
            return replace(outputs, logits=outputs.logits + shift)

        loss = rest(with_outputs(global_step(step), balanced))
        if not passes:  # a loss that makes no pass through the model
            passes.append(global_step(step).outputs)
        features, logits = passes[-1].features.detach(), passes[-1].logits.detach()
        own = residual(features, step.weights, step.model.constants[SCALE])
        return loss + without_value(mean_cross_entropy(logits + own, step.labels))

    @fb.wrapper
    def evaluate(self, task: fb.EvaluationTask, rest: Evaluate) -> fb.Predictions:
        """The generic model, whose W and b are zero; own models with each client's. Unseen classes have none."""
        if task.is_unseen:
            return rest(task)
        return own_predictions(replace(task, model=with_residual(task.model)), rest, task.own_model)
