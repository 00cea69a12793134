"""FedPGP - Cui, Li, Wang, Shi, "Harmonizing Generalization and Personalization in Federated Prompt Learning", ICML
2024; arXiv 2405.09771.

A prompt σ (M, d_t) that all clients share, and a low-rank addition U V, (M, b) times (b, d_t), of each client's own:
    z^s_k = g([σ; name_k]) / |·|,   z_k = g([σ + U V; name_k]) / |·|,   z⁰_k a unit text of frozen CLIP
    L = CE(s f_x·z_k, y) + μ L_con                                                       (s: CLIP's own scale, frozen)
    L_con = −(1/K) Σ_k log [e^{c(z⁰,z^s)/τ} / (e^{c(z⁰,z^s)/τ} + e^{c(z^s,z)/τ})],   c the cosine
    σ ← Σ_i (n_i / Σ_j n_j) σ_i;   U and V stay           (all drawn from N(0, 0.02²); U V at first 1e-3, for all alike)
The term pulls the shared prompt to what CLIP knows and pushes the personal one away. Only σ is sent, counted, averaged.

Answers: build_model, private, loss_terms, evaluate. Stacks with methods that change the base loss, add terms or
aggregate otherwise; terms on the weights (fedprox) hold U and V as well. U V stays where an update was lost.
Paper against released code, whose script's b and μ are the defaults:
- z⁰ is there the text of M placeholders (`anchor=placeholder`); here that of the run's `templates`, which CLIP knows.
- The script's two prompts a client give 2K logits for K labels, half of them never a target; here there is one.
- All its clients train in round 1, and momentum stays with a client. Here participation holds, and each begins anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

import fedbench.api as fb
from fedbench.models.heads import TextOutputs, clip_of, scaled_logits
from fedbench.models.prompts.context import initial_context, prompt_tower, random_context
from fedbench.toolkit.fedavg import personal_predictions

SHARED, LEFT, RIGHT, ANCHOR = "prompt.global", "prompt.U", "prompt.V", "anchor"


@dataclass(frozen=True, kw_only=True)
class FedPgpParams:
    """Hyper-parameters of FedPGP."""

    context_length: int = fb.hyper(16, symbol="M", low=1, high=64, search=(4, 16), source="released code: 16")
    bottleneck: int = fb.hyper(8, symbol="b", low=1, high=64, search=(2, 16), source="released script; by default 4")
    mu: float = fb.hyper(0.5, symbol="μ", low=0.1, high=10.0, log=True, off=0.0, source="released script; by default 1")
    tau: float = fb.hyper(0.5, symbol="τ", low=0.05, high=1.0, log=True, needs="mu", source="released code")
    anchor: Literal["template", "placeholder"] = fb.hyper("template", symbol="z⁰", source="ours; placeholder: the code")


@dataclass(frozen=True, eq=False)
class PersonalOutputs(TextOutputs):
    """Of a classifier by personal ``texts`` z (K, d), and z^s (K, d), those of the ``shared`` prompt alone."""

    shared: Tensor


def contrast(anchor: Tensor, shared: Tensor, personal: Tensor, tau: float) -> Tensor:
    """L_con, a scalar, from unit vectors z⁰, z^s and z, (K, d) each."""
    pull, push = (anchor * shared).sum(dim=-1), (shared * personal).sum(dim=-1)
    return torch.nn.functional.softplus((push - pull) / tau).mean()


class FedPGP(fb.Method[FedPgpParams]):
    """A shared prompt with a private low-rank addition."""

    name = "fedpgp"
    citation = "Cui et al., Harmonizing Generalization and Personalization in FPL, ICML 2024"
    requires = ("clip", "context")
    recipe = {"optimizer": "sgd", "lr": 1e-3, "momentum": 0.9, "weight_decay": 5e-4}  # but for lr, its toolbox's
    keeps_lost_training = True

    @fb.hookimpl
    def build_model(self, setup: fb.ModelSetup) -> fb.Model:
        """σ, U and V; logits by the personal texts, and z⁰ encoded once."""
        clip, seed, names = clip_of(setup), setup.spec.seed, setup.classnames
        length, rank = self.params.context_length, self.params.bottleneck
        tower, placeholder = prompt_tower(clip, names, length), self.params.anchor == "placeholder"
        anchor = tower.placeholder_texts() if placeholder else clip.text_features(names, setup.spec.templates)

        def forward(tensors: fb.Tensors, inputs: Tensor, training: bool) -> fb.Outputs:
            both = torch.stack([tensors[SHARED], tensors[SHARED] + tensors[LEFT] @ tensors[RIGHT]])
            (shared, own), features = tower.encode(both[:, None]), torch.nn.functional.normalize(inputs, dim=-1)
            return PersonalOutputs(scaled_logits(features, own, None, clip.logit_scale), features, own, shared)

        left = random_context(seed, "U of fedpgp", length, rank)
        right = random_context(seed, "V of fedpgp", rank, tower.width)
        weights = {SHARED: initial_context(clip, seed, length, "random"), LEFT: left, RIGHT: right}
        return fb.Model(weights=weights, forward=forward, encoder=clip.image_encoder(), constants={ANCHOR: anchor})

    @fb.hookimpl
    def private(self, model: fb.Model, spec: fb.RunSpec) -> tuple[str, ...]:
        """The low-rank addition."""
        return (LEFT, RIGHT)

    @fb.hookimpl
    def loss_terms(self, step: fb.LocalStep) -> Tensor | None:
        """μ L_con, on the texts that the step's logits come from; none where μ = 0."""
        params, made, anchor = self.params, cast(PersonalOutputs, step.outputs), step.model.constants[ANCHOR]
        return params.mu * contrast(anchor, made.shared, made.texts, params.tau) if params.mu else None

    @fb.hookimpl
    def evaluate(self, task: fb.EvaluationTask) -> fb.Predictions:
        """The global model by σ alone; own models by the new σ and the client's U V."""
        return personal_predictions(task, {LEFT: torch.zeros_like(task.weights[LEFT])})
