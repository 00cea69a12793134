"""FedTPG - Qiu, Li, Mummadi, Ganesh, Li, Peng, Lin, "Federated Text-driven Prompt Generation for Vision-Language
Models", ICLR 2024; arXiv 2310.06123.

A generator, the same for all clients, turns the names of the classes into the context before them; CLIP is frozen:
    T (K, d): unit text features of the bare class names, no template;   Q (M, d_t): learned queries
    H = MHA(LN_q(Q), LN_c(T), LN_c(T)), 4 heads, with no residual from Q
    v = H + FF(H),   FF = LN, Linear(d_t, 8 d_t), GEGLU, Linear(4 d_t, d_t)
    t_k = g([v; name_k]) / |·|,   L = CE(s f_x·t_k, y);   generator ← Σ_i (n_i / Σ_j n_j) generator_i
Trained and sent: Q and the generator, 14 d_t² + 2 d d_t + 17 d_t + 2 d + M d_t floats: 4,206,080 for ViT-B/16, M = 4.
No shape depends on K: names of classes never trained on go through the same weights, in any order.

Answers: build_model, local_loss. Stacks with methods that add loss terms or aggregate otherwise; with `context=present`
terms that compare with the received model's logits (fedntd) compare two sets of names.
Paper against what runs here:
- Its label sets are disjoint: a client reads, and classifies among, its own names. Here clients share labels, and read
  all K (`context=all`). `context=present` leaves absent classes out of attention and loss, in local training only.
- The code averages uniformly (the run's `weighting=uniform`), and momentum and cosine schedule go on from round to
  round; here each begins anew. Recipe: its SGD 3e-3, momentum 0.9, decay 1e-5.
- Keys and values are projections from d to d_t: the paper's towers have d = d_t. No self-attention, as in its runs.
Q starts as N(0, 0.02²), the rest as torch's MultiheadAttention, LayerNorm and Linear: round 0 is not zero-shot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

import fedbench.api as fb
from fedbench.api import hookimpl, hyper
from fedbench.models.heads import clip_of, text_classifier
from fedbench.models.prompts.context import prompt_tower
from fedbench.toolkit.fedavg import cross_entropy
from fedbench_methods.shared.prompt_generator import generated_context, initial_generator

ABSENT = "fedtpg.absent"
"""The tensor (K,) by which local training tells the forward pass which names to leave out."""


@dataclass(frozen=True, kw_only=True)
class FedTpgParams:
    """Hyper-parameters of FedTPG."""

    context_length: int = hyper(4, symbol="M", low=1, high=32, search=(2, 8), source="released code: 4")
    context: Literal["all", "present"] = hyper("all", symbol="T", source="names read in training; present: the paper")


class FedTPG(fb.Method[FedTpgParams]):
    """Generates the context from the class names."""

    name = "fedtpg"
    citation = "Qiu et al., Federated Text-driven Prompt Generation for Vision-Language Models, ICLR 2024"
    recipe = {"optimizer": "sgd", "lr": 3e-3, "momentum": 0.9, "weight_decay": 1e-5}
    requires = ("labels", "clip", "context")

    @hookimpl
    def build_model(self, setup: fb.ModelSetup) -> fb.Model:
        """The generator; logits are scaled cosines of the frozen image features to the texts of its context."""
        clip, length = clip_of(setup), self.params.context_length
        tower = prompt_tower(clip, setup.classnames, length)
        names = clip.text_features([name.replace("_", " ") for name in setup.classnames], ("{}",))

        def texts(tensors: fb.Tensors) -> Tensor:
            return tower.encode(generated_context(tensors, names, tensors.get(ABSENT)))

        weights = initial_generator(length, tower.width, clip.embed_dim, setup.spec.seed)
        return fb.Model(weights, text_classifier(texts, clip.logit_scale), encoder=clip.image_encoder())

    @hookimpl
    def local_loss(self, step: fb.LocalStep) -> Tensor:
        """Cross-entropy; with `context=present` among the client's own classes, of a context from their names alone."""
        if self.params.context == "all":
            return cross_entropy(step)
        absent = torch.where(step.task.visible_counts > 0, 0.0, -torch.inf)
        logits = step.outputs_with({ABSENT: absent}).logits + absent
        return torch.nn.functional.cross_entropy(logits, step.labels)
