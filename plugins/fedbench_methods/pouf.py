"""POUF + FedAvg - Tanwisuth, Zhang, Zheng, He, Zhou, "POUF: Prompt-Oriented Unsupervised Fine-tuning for Large
Pre-trained Models", ICML 2023; federated by FedAvg.

PromptFL's context v ∈ R^{M×d_t} learns without labels. Of a batch of n images, with o_ic = s f_i·t_c:
    P_ic = softmax_c(o_ic),   Q_ic = softmax_i(o_ic)                    (over classes; over the batch)
    L_t = (1/n) Σ_i Σ_c (1 − f_i·t_c) P_ic + (1/K) Σ_c Σ_i (1 − f_i·t_c) Q_ic          (transport, both ways)
    L_i = (1/n) Σ_i H(P_i) − H((1/n) Σ_i P_i)                           (information: sure of each, spread over all)
    L = L_t + λ L_i
    v ← Σ_i (n_i / Σ_j n_j) v_i
λ = 0 is transport alone. Only v is trained and sent. CLIP is frozen.

Answers: build_model, local_loss. Never reads a label, hidden or not. Stacks with methods that add loss terms or
aggregate otherwise.
The second transport and H of the mean spread a batch over all K classes, also those that a client has no image of:
what the paper has batches of all classes for is wrong under label skew. The released code can also train the whole
model; only its prompts are here. Recipe: SGD 0.01 and decay 1e-3, released scripts, whose batch is 96; the momentum
is ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from fedbench.api import LocalStep, Method, Model, ModelSetup, hookimpl, hyper
from fedbench.models.heads import TextOutputs, clip_of, text_classifier
from fedbench.models.prompts.context import Init, initial_context, prompt_tower


@dataclass(frozen=True, kw_only=True)
class PoufParams:
    """Hyper-parameters of POUF."""

    weight: float = hyper(0.3, symbol="λ", low=0.01, high=3.0, log=True, off=0.0, source="released scripts")
    init: Init = hyper("words", symbol="v⁰", source='released code: "a photo of a"')
    context_length: int = hyper(
        4,
        symbol="M",
        low=1,
        high=32,
        search=(1, 16),
        when={"init": ("random",)},
        source="released scripts; init=words has 4 by itself",
    )


def transport(logits: Tensor, cosines: Tensor) -> Tensor:
    """L_t, a scalar, from ``logits`` o and ``cosines`` f·t, (n, K) each."""
    costs = 1 - cosines
    to_classes = (costs * logits.softmax(dim=1)).sum(dim=1).mean()
    to_images = (costs * logits.softmax(dim=0)).sum(dim=0).mean()
    return to_classes + to_images


def information(logits: Tensor) -> Tensor:
    """L_i, a scalar of at least −log K, from ``logits`` (n, K)."""
    log_p = logits.log_softmax(dim=1)
    mean = log_p.exp().mean(dim=0)
    # log of the mean by logsumexp: a class that no image has gives 0 · log 0
    log_mean = log_p.logsumexp(dim=0) - math.log(len(logits))
    return (mean * log_mean).sum() - (log_p.exp() * log_p).sum(dim=1).mean()


class Pouf(Method[PoufParams]):
    """A learnable context that learns from images without labels, by transport to the class texts."""

    name = "pouf"
    citation = (
        "Tanwisuth et al., POUF: Prompt-Oriented Unsupervised Fine-tuning for Large Pre-trained Models, ICML 2023"
    )
    requires = ("clip", "context")
    recipe = {"optimizer": "sgd", "lr": 0.01, "momentum": 0.9, "weight_decay": 1e-3}

    @hookimpl
    def build_model(self, setup: ModelSetup) -> Model:
        """PromptFL's: the context as only weight."""
        clip = clip_of(setup)
        context = initial_context(clip, setup.spec.seed, self.params.context_length, self.params.init)
        tower = prompt_tower(clip, setup.classnames, len(context))
        forward = text_classifier(lambda tensors: tower.encode(tensors["prompt.context"]), clip.logit_scale)
        return Model(weights={"prompt.context": context}, forward=forward, encoder=clip.image_encoder())

    @hookimpl
    def local_loss(self, step: LocalStep) -> Tensor:
        """L_t + λ L_i of the batch."""
        outputs = cast(TextOutputs, step.outputs)
        loss = transport(outputs.logits, outputs.features @ outputs.texts.T)
        return loss + self.params.weight * information(outputs.logits) if self.params.weight else loss
