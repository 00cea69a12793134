"""CLIP-Adapter + FedAvg - Gao, Geng, Zhang, Ma, Fang, Zhang, Li, Qiao, "CLIP-Adapter: Better Vision-Language Models
with Feature Adapters", IJCV 132(2), 2024; arXiv 2110.04544; federated by FedAvg.

A bottleneck of two layers on the frozen image feature, whose output is mixed with the feature itself:
    A(f) = ReLU(W2 ReLU(W1 f)),   W1 (d/r, d), W2 (d, d/r), no bias;   f raw, not normalised
    f' = α A(f) + (1 − α) f,   L = CE(s cos(f', t_k), y)                               (s: CLIP's own scale, frozen)
    W ← Σ_i (n_i / Σ_j n_j) W_i
t_k are unit texts of the run's `templates`. Trained and sent: W1 and W2, 2 d²/r floats.

Answers: build_model. Everything else is FedAvg; stacks with losses, server rules and personalisations alike.
α = 0 is zero-shot CLIP and trains nothing. Round 0 is not zero-shot, since both layers are drawn (torch's own default).
Paper against released code: the paper searches α for every data set, the code fixes 0.2; the code writes d = 1024 down,
the width of its ResNet. The last ReLU leaves A(f) ≥ 0 in both. The paper's adapter on texts is not here; `fedclip` has
one of another shape. Recipe: SGD 2e-3 of the toolbox that the code is built on, with its momentum and decay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, normalize

import fedbench.api as fb
from fedbench.models.heads import TextOutputs, clip_of, scaled_logits

DOWN, UP = "adapter.W1", "adapter.W2"


@dataclass(frozen=True, kw_only=True)
class ClipAdapterParams:
    """Hyper-parameters of CLIP-Adapter."""

    alpha: float = fb.hyper(0.2, symbol="α", low=0.0, high=1.0, search=(0.1, 0.8), source="released code")
    reduction: int = fb.hyper(4, symbol="r", low=1, high=64, search=(1, 16), source="paper and released code")


def adapted(features: Tensor, down: Tensor, up: Tensor, alpha: float) -> Tensor:
    """f' (b, d) of raw ``features`` f (b, d), with ``down`` W1 (d/r, d) and ``up`` W2 (d, d/r)."""
    residual = torch.relu(linear(torch.relu(linear(features, down)), up))
    return alpha * residual + (1 - alpha) * features


def drawn_layer(generator: torch.Generator, rows: int, columns: int) -> Tensor:
    """(rows, columns), uniform in ±1/√columns."""
    bound: float = columns**-0.5
    return (2 * torch.rand(rows, columns, generator=generator) - 1) * bound


class ClipAdapter(fb.Method[ClipAdapterParams]):
    """A bottleneck on frozen image features."""

    name = "clip-adapter"
    citation = "Gao et al., CLIP-Adapter: Better Vision-Language Models with Feature Adapters, IJCV 2024"
    requires = ("clip",)
    recipe = {"optimizer": "sgd", "lr": 2e-3, "momentum": 0.9, "weight_decay": 5e-4}

    @fb.hookimpl
    def build_model(self, setup: fb.ModelSetup) -> fb.Model:
        """Both layers; logits are scaled cosines of the adapted features to the texts of the templates."""
        clip, alpha, generator = clip_of(setup), self.params.alpha, setup.generator("clip-adapter")
        texts = clip.text_features(setup.classnames, setup.spec.templates)
        width, hidden = clip.embed_dim, max(clip.embed_dim // self.params.reduction, 1)
        weights = {DOWN: drawn_layer(generator, hidden, width), UP: drawn_layer(generator, width, hidden)}

        def forward(tensors: fb.Tensors, inputs: Tensor, training: bool) -> fb.Outputs:
            features = normalize(adapted(inputs, tensors[DOWN], tensors[UP], alpha), dim=-1)
            return TextOutputs(scaled_logits(features, texts, None, clip.logit_scale), features, texts)

        return fb.Model(weights=weights, forward=forward, encoder=clip.image_encoder())
