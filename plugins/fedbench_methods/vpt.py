"""VPT + FedAvg - Jia, Tang, Chen, Cardie, Belongie, Hariharan, Lim, "Visual Prompt Tuning", ECCV 2022; arXiv
2203.12119; federated by FedAvg, on CLIP.

Tokens P_0 .. (m, d_v) in the image tower are all that is trained; both towers are frozen:
    shallow   [class][patches][P_0] before layer 1, carried on through the layers
    deep      before layer i the last m tokens are overwritten by P_{i−1}, of every layer
    L = CE(s f_x·t_k, y),   t_k unit texts of the run's `templates`                     (s: CLIP's own scale, frozen)
    P ← Σ_i (n_i / Σ_j n_j) P_i,   P at first uniform in ±√(6 / (3 p² + d_v)), p the side of a patch
Sent: m d_v floats, or m d_v a layer (deep).

Answers: build_model. Everything else is FedAvg; stacks with losses, server rules and personalisations alike.
Paper against what runs here:
- The paper trains a linear head beside the tokens, on a network without texts; on CLIP the texts classify, as in the
  comparisons of prompts for CLIP. Round 0 is not zero-shot, since the tokens are drawn.
- The paper's tokens stand between class token and patches. They have no position, so that order changes nothing. CLIP's
  norm before the first layer is theirs too: P_0 passes it, as MaPLe's tokens do.
- The code's dropout on tokens, off in its configuration and 0.1 in its searches, is not here.
Recipe: the configuration's SGD 1e-2, momentum 0.9, decay 1e-4, which the paper searches. ResNets have no tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

import fedbench.api as fb
from fedbench.models.clip.backbone import ClipBackbone
from fedbench.models.clip.image_towers import ImageTower
from fedbench.models.heads import TextOutputs, clip_of, scaled_logits
from fedbench.models.prompts.image_tokens import encode_with_tokens, require_vision_transformer


@dataclass(frozen=True, kw_only=True)
class VptParams:
    """Hyper-parameters of VPT."""

    tokens: int = fb.hyper(5, symbol="m", low=1, high=200, search=(1, 50), source="released code; paper: 1 to 200")
    depth: Literal["shallow", "deep"] = fb.hyper("shallow", symbol="depth", source="the paper's two; code: shallow")


def bound(patch: int, width: int) -> float:
    """√(6 / (3 p² + d_v)): Xavier's, of a map from the pixels of a patch to a token."""
    return float((6 / (3 * patch**2 + width)) ** 0.5)


@torch.no_grad()
def patch_side(clip: ClipBackbone, tower: ImageTower) -> int:
    """p in pixels, of a tower with a square of patches and a few tokens besides."""
    size = clip.image_size
    return size // isqrt(tower.embed(torch.zeros(1, 3, size, size, device=clip.device)).shape[1])


class VPT(fb.Method[VptParams]):
    """Learned tokens in the image tower."""

    name = "vpt"
    citation = "Jia et al., Visual Prompt Tuning, ECCV 2022"
    requires = ("clip", "image_layers")
    recipe = {"optimizer": "sgd", "lr": 1e-2, "momentum": 0.9, "weight_decay": 1e-4}

    @fb.hookimpl
    def build_model(self, setup: fb.ModelSetup) -> fb.Model:
        """The tokens; logits are scaled cosines of what the tower makes of images with them to fixed texts."""
        clip, params = clip_of(setup), self.params
        tower = require_vision_transformer(clip, "vpt puts tokens into the image tower")
        texts = clip.text_features(setup.classnames, setup.spec.templates)
        names = [f"tokens.{layer}" for layer in range(tower.depth if params.depth == "deep" else 1)]
        most = bound(patch_side(clip, tower), tower.width)
        weights = {}
        for layer, name in enumerate(names):
            draw = torch.rand(params.tokens, tower.width, generator=setup.generator("vpt", layer))
            weights[name] = (2 * draw - 1) * most

        def forward(tensors: fb.Tensors, inputs: Tensor, training: bool) -> fb.Outputs:
            first, *deep = (tensors[name] for name in names)
            features = normalize(encode_with_tokens(tower, inputs, first, deep=deep), dim=-1)
            return TextOutputs(scaled_logits(features, texts, None, clip.logit_scale), features, texts)

        return fb.Model(weights=weights, forward=forward, transform=clip.transform)
