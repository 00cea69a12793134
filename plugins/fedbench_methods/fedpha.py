"""FedPHA - Fang, Huang, Wan, Yang, Ye, "FedPHA: Federated Prompt Learning for Heterogeneous Client Adaptation", ICML
2025.

A prompt v_G (M, d_t) that all clients share and one of each client's own v_L (M_L, d_t); CLIP is frozen:
    t^G, t^L, t̂ unit texts (K, d) of v_G, v_L and v̂;   o^n = s f_x·t^n                 (s: CLIP's own scale, frozen)
    v_G = U S Vᵀ,   V_2 the right singular vectors behind the first ⌊M (1 − ρ)⌋,   v̂ = v_L V_2 V_2ᵀ
    L = CE(o^L, y) + CE(o^G, y) + λ_1 L_pull + λ_2 L_push
    L_pull = (1/(K d)) Σ_k |t^L_k − t̂_k|²,   L_push = (1/K) Σ_k max(0, α − |t^L_k − t^G_k|)
    v_G ← Σ_i (n_i / Σ_j n_j) v_G,i;   v_L stays                                  (both at first drawn from N(0, 0.02²))
Only v_G is sent, counted, averaged. A client predicts by t^L alone.

Answers: build_model, private, loss_terms, evaluate. Stacks with losses and server rules; the base loss of a stack is
that of o^L. It is a personalisation itself. v_L stays where an update was lost.
The global model is v_G. Own models are t^L of the client's v_L, and of the first draw for one that took no part.
Paper against released code:
- The paper projects v_L to the null space of v_G's leading directions. The code's V_2 comes of a thin decomposition: of
  d_t directions it has the ⌈M ρ⌉ last ones inside the row space of v_G, and leaves out all that v_G does not reach
  (`projection=released`, the default). `projection=null_space` takes V_2 of the whole decomposition.
- v̂ is no function of v_G here: the code's gradient through the decomposition is unstable at close singular values.
- L_pull is a mean over K d entries of unit vectors, at most 4/d, beside a hinge of up to α.
- Clients' private prompts may have a length of their own, the same for all; lengths that differ by client are not here.
Recipe: the code's SGD 2e-3, with momentum and decay of the toolbox it is built on.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import floor
from typing import Literal, cast

import torch
from torch import Tensor

import fedbench.api as fb
from fedbench.models.heads import TextOutputs, clip_of, scaled_logits
from fedbench.models.prompts.context import initial_context, prompt_tower, random_context
from fedbench.toolkit.fedavg import personal_predictions
from fedbench.toolkit.losses import mean_cross_entropy

GLOBAL, LOCAL = "prompt.global", "prompt.local"


@dataclass(frozen=True, kw_only=True)
class FedPhaParams:
    """Hyper-parameters of FedPHA."""

    context_length: int = fb.hyper(16, symbol="M", low=1, high=64, search=(4, 16), source="released code: 16")
    local_length: int = fb.hyper(16, symbol="M_L", low=1, high=64, search=(4, 16), source="paper: 4 to 32, by client")
    rho: float = fb.hyper(0.8, symbol="ρ", low=0.0, high=1.0, source="released code: 0.8")
    pull: float = fb.hyper(1.0, symbol="λ_1", low=1e-3, high=100.0, log=True, off=0.0, source="released code: 1")
    push: float = fb.hyper(1.0, symbol="λ_2", low=1e-3, high=100.0, log=True, off=0.0, source="released code: 1")
    margin: float = fb.hyper(1.0, symbol="α", low=0.0, high=2.0, needs="push", source="released code: 1")
    projection: Literal["released", "null_space"] = fb.hyper("released", symbol="V_2", source="code; null_space: paper")


@dataclass(frozen=True, eq=False)
class FedPhaOutputs(TextOutputs):
    """Of a classifier by ``texts`` t^L, in training with ``shared`` t^G and ``projected`` t̂, (K, d) each."""

    shared: Tensor
    projected: Tensor
    shared_logits: Tensor
    """o^G (b, K)."""


def projected(own: Tensor, shared: Tensor, rho: float, *, whole: bool) -> Tensor:
    """v̂ (M_L, d_t) of ``own`` v_L, by the minor directions of ``shared`` v_G (M, d_t), of a ``whole`` or thin V."""
    rows: Tensor = torch.linalg.svd(shared, full_matrices=False).Vh
    # the small number is against 16 (1 - 0.75) = 3.99...
    cut = floor(len(shared) * (1 - rho) + 1e-9)
    if whole:
        leading = rows[:cut]
        return own - own @ leading.T @ leading
    return own @ rows[cut:].T @ rows[cut:]


def pull_term(own: Tensor, kept: Tensor) -> Tensor:
    """L_pull, a scalar, from t^L and t̂, (K, d) each."""
    return (own - kept).square().mean()


def push_term(own: Tensor, shared: Tensor, margin: float) -> Tensor:
    """L_push, a scalar, from t^L and t^G, (K, d) each; where they are equal it has no gradient."""
    squares = (own - shared).square().sum(dim=-1)
    # the root has no gradient at 0
    apart = torch.where(squares > 0, squares, 1.0).sqrt() * (squares > 0)
    return torch.relu(margin - apart).mean()


class FedPHA(fb.Method[FedPhaParams]):
    """A shared prompt, and a private one held to its minor directions and away from its texts."""

    name = "fedpha"
    citation = "Fang et al., FedPHA: Federated Prompt Learning for Heterogeneous Client Adaptation, ICML 2025"
    requires = ("labels", "clip", "context")
    recipe = {"optimizer": "sgd", "lr": 2e-3, "momentum": 0.9, "weight_decay": 5e-4}
    keeps_lost_training = True

    @fb.hookimpl
    def build_model(self, setup: fb.ModelSetup) -> fb.Model:
        """Both prompts; logits by the texts of the private one."""
        clip, params, seed = clip_of(setup), self.params, setup.spec.seed
        lengths = {params.context_length, params.local_length}
        towers = {length: prompt_tower(clip, setup.classnames, length) for length in lengths}
        scale, whole = clip.logit_scale, params.projection == "null_space"

        def texts(context: Tensor) -> Tensor:
            return towers[context.shape[-2]].encode(context)

        def forward(tensors: fb.Tensors, inputs: Tensor, training: bool) -> fb.Outputs:
            features, own = torch.nn.functional.normalize(inputs, dim=-1), texts(tensors[LOCAL])
            logits = scaled_logits(features, own, None, scale)
            if not training:
                return TextOutputs(logits, features, own)
            shared = texts(tensors[GLOBAL])
            kept = texts(projected(tensors[LOCAL], tensors[GLOBAL].detach(), params.rho, whole=whole))
            return FedPhaOutputs(logits, features, own, shared, kept, scaled_logits(features, shared, None, scale))

        weights = {
            GLOBAL: initial_context(clip, seed, params.context_length, "random"),
            LOCAL: random_context(seed, "local context", params.local_length, clip.text.width),
        }
        return fb.Model(weights=weights, forward=forward, encoder=clip.image_encoder())

    @fb.hookimpl
    def private(self, model: fb.Model, spec: fb.RunSpec) -> Collection[str]:
        """v_L."""
        return (LOCAL,)

    @fb.hookimpl
    def loss_terms(self, step: fb.LocalStep) -> Tensor:
        """CE(o^G, y) + λ_1 L_pull + λ_2 L_push."""
        made, params = cast(FedPhaOutputs, step.outputs), self.params
        loss = mean_cross_entropy(made.shared_logits, step.labels)
        if params.pull:
            loss = loss + params.pull * pull_term(made.texts, made.projected)
        return loss + params.push * push_term(made.texts, made.shared, params.margin) if params.push else loss

    @fb.hookimpl
    def evaluate(self, task: fb.EvaluationTask) -> fb.Predictions:
        """The global model by v_G in place of v_L; own models by the client's v_L."""
        return personal_predictions(task, {LOCAL: task.weights[GLOBAL]})
