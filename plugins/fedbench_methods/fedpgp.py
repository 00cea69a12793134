"""FedPGP - Cui, Li, Wang, Shi, "Harmonizing Generalization and Personalization in Federated Prompt Learning", ICML
2024; arXiv 2405.09771.

A prompt σ (M, d_t) that all clients share, and a low-rank addition U V, (M, b) times (b, d_t), of each client's own:
    z^s_k = g([σ; name_k]) / |·|,   z_k = g([σ + U V; name_k]) / |·|,   z⁰_k a unit text of frozen CLIP
    L = CE(s f_x·z_k, y) + μ L_con                                                       (s: CLIP's own scale, frozen)
    L_con = −(1/K) Σ_k log [e^{c(z⁰,z^s)/τ} / (e^{c(z⁰,z^s)/τ} + e^{c(z^s,z)/τ})],   c the cosine
    σ ← Σ_i (n_i / Σ_j n_j) σ_i;   U and V stay
The term pulls the shared prompt to what CLIP knows and pushes the personal one away. Only σ is sent, counted, averaged.
All three are drawn from N(0, 0.02²), U and V alike for all clients.

Answers: build_model, private, loss_terms, evaluate. Stacks with methods that change the base loss, add terms or
aggregate otherwise; terms on the weights (fedprox) hold U and V as well. Any CLIP. Own models (`personal_...`) are the
new σ with the client's U V, at first a common draw: 1e-3, not zero as with LoRA. U V stays where an update was lost.
Paper against released code:
- z⁰ is there the text of M placeholders (`anchor=placeholder`); here that of the run's `templates`, which CLIP knows.
- The script's two prompts a client give 2K logits for K labels, half of them never a target; here there is one.
- The script's b = 8 and μ = 0.5 are the defaults; the code's are 4 and 1. Its `init=words` ends in an error.
- All its clients train in round 1, and momentum stays with a client. Here participation holds, and each begins anew.
Recipe: SGD 1e-3 of the code, with momentum 0.9 and decay 5e-4 of the toolbox it is built on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

import fedbench.api as fb
from fedbench.api import hookimpl, hyper
from fedbench.models.heads import TextOutputs, clip_of, scaled_logits
from fedbench.models.prompts.context import initial_context, prompt_tower, random_context
from fedbench.toolkit.fedavg import personal_predictions

SHARED, LEFT, RIGHT, ANCHOR = "prompt.global", "prompt.U", "prompt.V", "anchor"


@dataclass(frozen=True, kw_only=True)
class FedPgpParams:
    """Hyper-parameters of FedPGP."""

    context_length: int = hyper(16, symbol="M", low=1, high=64, search=(4, 16), source="released code: 16")
    bottleneck: int = hyper(8, symbol="b", low=1, high=64, search=(2, 16), source="released script; by default 4")
    mu: float = hyper(0.5, symbol="μ", low=0.1, high=10.0, log=True, off=0.0, source="released script; by default 1")
    tau: float = hyper(0.5, symbol="τ", low=0.05, high=1.0, log=True, needs="mu", source="released code")
    anchor: Literal["template", "placeholder"] = hyper("template", symbol="z⁰", source="ours; placeholder: the code")


@dataclass(frozen=True, eq=False)
class PersonalOutputs(TextOutputs):
    """Of a classifier by personal ``texts`` z (K, d)."""

    shared: Tensor
    """z^s (K, d), unit text features of the shared prompt alone."""


def contrast(anchor: Tensor, shared: Tensor, personal: Tensor, tau: float) -> Tensor:
    """L_con, a scalar, from unit vectors z⁰, z^s and z, (K, d) each."""
    pull, push = (anchor * shared).sum(dim=-1), (shared * personal).sum(dim=-1)
    return softplus((push - pull) / tau).mean()


class FedPGP(fb.Method[FedPgpParams]):
    """A shared prompt with a private low-rank addition."""

    name = "fedpgp"
    citation = "Cui et al., Harmonizing Generalization and Personalization in FPL, ICML 2024"
    requires = ("clip",)
    recipe = {"optimizer": "sgd", "lr": 1e-3, "momentum": 0.9, "weight_decay": 5e-4}
    keeps_lost_training = True

    @hookimpl
    def build_model(self, setup: fb.ModelSetup) -> fb.Model:
        """σ, U and V; logits by the personal texts, and z⁰ encoded once."""
        clip, params, seed = clip_of(setup), self.params, setup.spec.seed
        length, rank = params.context_length, params.bottleneck
        tower, scale = prompt_tower(clip, setup.classnames, length), clip.logit_scale
        template = params.anchor == "template"
        anchor = clip.text_features(setup.classnames, setup.spec.templates) if template else tower.placeholder_texts()

        def forward(tensors: Mapping[str, Tensor], inputs: Tensor, training: bool) -> fb.Outputs:
            personal = tensors[SHARED] + tensors[LEFT] @ tensors[RIGHT]
            shared, own = tower.encode(torch.stack([tensors[SHARED], personal])[:, None]).unbind()
            features = normalize(inputs, dim=-1)
            return PersonalOutputs(scaled_logits(features, own, None, scale), features, own, shared)

        left = random_context(seed, "U of fedpgp", length, rank)
        right = random_context(seed, "V of fedpgp", rank, tower.width)
        weights = {SHARED: initial_context(clip, seed, length, "random"), LEFT: left, RIGHT: right}
        return fb.Model(weights=weights, forward=forward, encoder=clip.image_encoder(), constants={ANCHOR: anchor})

    @hookimpl
    def private(self, model: fb.Model, spec: fb.RunSpec) -> Collection[str]:
        """The low-rank addition."""
        return (LEFT, RIGHT)

    @hookimpl
    def loss_terms(self, step: fb.LocalStep) -> Tensor | None:
        """μ L_con, on the texts that the step's logits come from; none where μ = 0."""
        mu, tau, made = self.params.mu, self.params.tau, cast(PersonalOutputs, step.outputs)
        return mu * contrast(step.model.constants[ANCHOR], made.shared, made.texts, tau) if mu else None

    @hookimpl
    def evaluate(self, task: fb.EvaluationTask) -> fb.Predictions:
        """The global model by σ alone; own models by the new σ and the client's U V."""
        return personal_predictions(task, {LEFT: torch.zeros_like(task.weights[LEFT])})
