"""TaskRes + FedAvg - Yu, Lu, Jin, Chen, Wang, "Task Residual for Tuning Vision-Language Models", CVPR 2023; arXiv
2211.10277; federated by FedAvg.

A residual on the frozen text features of the classes, the prior knowledge, is all that is trained:
    t'_k = t_k + α x_k,   X = (x_1 .. x_K) ∈ R^{K×d}, at first 0
    L = CE(s cos(f, t'_k), y)                                                           (s: CLIP's own scale, frozen)
    X ← Σ_i (n_i / Σ_j n_j) X_i
t_k is the mean over the run's `templates`. Trained and sent: X, K d floats. Round 0 is zero-shot CLIP.

Answers: build_model. Everything else is FedAvg; stacks with losses, server rules and personalisations alike.
It is a linear head on unit features without bias whose rows are brought to one length; what is learned of a class says
nothing of classes never trained on.
Paper against released code: α is 0.5 in the scripts, 1 in the code's defaults. The code averages features over
templates as they come out of the tower, so that α is relative to their length (`base=raw`); `base=unit` averages unit
features and brings the mean to unit length, as `clip-zs` does. The paper's enhanced base, which needs a text projection
tuned beforehand, is not here. Recipe: the code's Adam 2e-3, with the decay of the toolbox it is built on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

import fedbench.api as fb
from fedbench.models.clip.backbone import fill_templates
from fedbench.models.heads import clip_of, text_classifier

RESIDUAL = "residual"


@dataclass(frozen=True, kw_only=True)
class TaskResParams:
    """Hyper-parameters of TaskRes."""

    alpha: float = fb.hyper(
        0.5, symbol="α", low=0.01, high=10.0, log=True, search=(0.1, 2.0), source="released scripts; code's default: 1"
    )
    base: Literal["raw", "unit"] = fb.hyper("raw", symbol="t", source="released code: raw; unit: as clip-zs has it")


def with_residual(base: Tensor, residual: Tensor, alpha: float) -> Tensor:
    """Unit t' (K, d) of ``base`` t (K, d), of any length, and ``residual`` X (K, d)."""
    return normalize(base + alpha * residual, dim=-1)


class TaskRes(fb.Method[TaskResParams]):
    """A residual on frozen text features."""

    name = "taskres"
    citation = "Yu et al., Task Residual for Tuning Vision-Language Models, CVPR 2023"
    requires = ("clip",)
    recipe = {"optimizer": "adam", "lr": 2e-3, "weight_decay": 5e-4}

    @fb.hookimpl
    def build_model(self, setup: fb.ModelSetup) -> fb.Model:
        """X as only weight; logits are scaled cosines of the frozen image features to the moved texts."""
        clip, names, templates = clip_of(setup), setup.classnames, setup.spec.templates
        base = clip.text_features(names, templates)
        if self.params.base == "raw":
            base = clip.encode_text(fill_templates(names, templates)).reshape(-1, *base.shape).mean(dim=0)
        forward = text_classifier(
            lambda tensors: with_residual(base, tensors[RESIDUAL], self.params.alpha), clip.logit_scale
        )
        return fb.Model({RESIDUAL: torch.zeros(base.shape)}, forward, encoder=clip.image_encoder())
