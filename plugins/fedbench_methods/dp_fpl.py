"""DP-FPL - Tran, Sun, Patterson, Milanova, "Privacy-Preserving Personalized Federated Prompt Learning for Multimodal
Large Language Models", ICLR 2025; arXiv 2501.13904.

A prompt v_G that all clients share and one of each client's own l, (M, d_t) both, trained with noise; CLIP is frozen:
    t_k = g([v_G + l; name_k]) / |·|,   L = CE(s f_x·t_k, y)                             (s: CLIP's own scale, frozen)
In every step, from G = ∂L/∂v_G = ∂L/∂l, with [·]_C cut to a length of C_0 and n of entries N(0, 1), new each time:
    u = orth(l z) (M, b), z of entries from N(0, 1);   w = orth(lᵀu)ᵀ (b, d_t);   l = u w + r, r a constant
    ∂v = [G]_C,   ∂u = [G wᵀ]_C + σ n,   ∂w = [uᵀG]_C + σ n;      l ← l − η (∂u w + u ∂w − u uᵀ ∂u w)
    v_G ← v_G − η (Σ_k p_k ∂v_k + max_k p_k σ n);    σ = (C_0 / B) √(T ln(1/δ)) / ε   (B the batch size, T the rounds)
Uncut and without noise l moves by the projection of G onto the tangent space, at u w, of matrices of rank b. ε = 0
neither cuts nor adds noise. Only v_G is sent, counted, averaged; l stays, also where an update was lost.

This is so with `local_steps=1`, an exchange a step. The average of longer rounds is another algorithm: noise of one
step at the server for all steps of a round.
No (ε, δ) is guaranteed: the gradient of a batch is cut, not those of its samples, so that one sample may change it by
2 C_0, and not by C_0 / B; ε here only sets σ. A larger ε is less noise.

Answers: build_model, private, evaluate. Wraps: local_gradients (of what the stack minimises), aggregate (the noise is
in what every client sent, so that the stack's mean has it, and server steps go on from there). Stacks with losses and
server rules, by SGD. The global model is v_G alone, own models the new v_G and the client's l.
Left open / contradicted, by the released code (the paper's text was not at hand):
- It adds u uᵀ ∂u w (`projection=released`): what lies in both spans then counts three times, not once.
- It divides ∂u and ∂w by 10 (`factor_scale=0.1`). That both bases are orthonormal makes u w no approximation of l.
- It synchronises after every batch, but clients then load what they had before: of a pass the last batch's step alone
  is left, as here with `local_steps=1` and as many rounds. Its optimiser's momentum goes from client to client, which
  makes their v_G differ; here there is none. Its p_k are equal: the run's `weighting`. ε is off, 0.4 in its README.
Cost: M d_t floats either way. Clients train one after another.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import log, sqrt
from typing import Literal

import torch
from torch import Tensor

import fedbench.api as fb
from fedbench.api import hyper
from fedbench.models.heads import clip_of, text_classifier
from fedbench.models.prompts.context import initial_context, prompt_tower, random_context
from fedbench.toolkit.fedavg import participant_shares, personal_predictions
from fedbench.toolkit.local_training import rates_by_name
from fedbench.toolkit.wrapping import Aggregate, Aggregated, Gradients

GLOBAL, LOCAL = "prompt.global", "prompt.local"
Projection = Literal["tangent", "released"]


@dataclass(frozen=True, kw_only=True)
class DpFplParams:
    """Hyper-parameters of DP-FPL."""

    context_length: int = hyper(16, symbol="M", low=1, high=64, search=(4, 16), source="released code: 16")
    rank: int = hyper(8, symbol="b", low=1, high=64, search=(1, 8), source="released code: 8; M is as good as more")
    epsilon: float = hyper(0.4, symbol="ε", low=0.01, high=1e3, off=0.0, search=False, source="released README: 0.4")
    delta: float = hyper(1e-5, symbol="δ", low=1e-12, high=0.1, needs="epsilon", search=False, source="released code")
    clip: float = hyper(
        10.0, symbol="C_0", low=0.01, high=1e3, log=True, needs="epsilon", search=(0.1, 10.0), source="released code"
    )
    projection: Projection = hyper("tangent", symbol="P(G)", source="tangent: right; released: its code, + for −")
    factor_scale: float = hyper(1.0, symbol="∂u, ∂w", low=0.01, high=10.0, search=False, source="released code: 0.1")


def bases(prompt: Tensor, sketch: Tensor) -> tuple[Tensor, Tensor]:
    """u (M, b) and w (b, d_t) of l (M, d_t), from ``sketch`` z (d_t, b); columns and rows are orthonormal."""
    u = torch.linalg.qr(prompt @ sketch).Q
    return u, torch.linalg.qr(prompt.T @ u).Q.T


def recomposed(u: Tensor, w: Tensor, by_u: Tensor, by_w: Tensor, projection: Projection) -> Tensor:
    """∂u w + u ∂w − u uᵀ ∂u w (M, d_t), of ∂u ``by_u`` (M, b) and ∂w ``by_w`` (b, d_t)."""
    in_both: Tensor = u @ (u.T @ by_u @ w)
    return by_u @ w + u @ by_w + (in_both if projection == "released" else -in_both)


def cut(gradient: Tensor, length: float) -> Tensor:
    """[·]_C: ``gradient``, of the direction it has and no longer than ``length``."""
    factor: Tensor = (length / gradient.norm()).clamp(max=1)
    return gradient * factor


def normal(shape: Sequence[int], generator: torch.Generator, like: Tensor) -> Tensor:
    """n of ``shape``, of the type and on the device of ``like``."""
    return torch.randn(*shape, generator=generator).to(like)


def deviation(params: DpFplParams, training: fb.Training) -> float:
    """σ, the standard deviation of the noise in an entry."""
    return params.clip / training.batch_size * sqrt(training.rounds * log(1 / params.delta)) / params.epsilon


class DPFPL(fb.Method[DpFplParams]):
    """Adds a private prompt to a shared one; noise on cut gradients, the private prompt's of low rank."""

    name = "dp-fpl"
    citation = "Tran et al., Privacy-Preserving Personalized Federated Prompt Learning for Multimodal LLMs, ICLR 2025"
    requires = ("clip", "context", "sgd")
    prevents = ("plain_steps",)
    recipe = {"optimizer": "sgd", "lr": 1e-3, "momentum": 0.0, "weight_decay": 5e-4}
    keeps_lost_training = True

    @fb.hookimpl
    def build_model(self, setup: fb.ModelSetup) -> fb.Model:
        """v_G and l; logits by the texts of their sum."""
        clip, seed, length = clip_of(setup), setup.spec.seed, self.params.context_length
        tower = prompt_tower(clip, setup.classnames, length)

        def texts(tensors: fb.Tensors) -> Tensor:
            return tower.encode(tensors[GLOBAL] + tensors[LOCAL])

        private = random_context(seed, "local context", length, tower.width)
        weights = {GLOBAL: initial_context(clip, seed, length, "random"), LOCAL: private}
        return fb.Model(weights, text_classifier(texts, clip.logit_scale), encoder=clip.image_encoder())

    @fb.hookimpl
    def private(self, model: fb.Model, spec: fb.RunSpec) -> Collection[str]:
        """l."""
        return (LOCAL,)

    @fb.wrapper
    def local_gradients(self, step: fb.LocalStep, rest: Gradients) -> fb.StepGradients:
        """∂v of v_G, and of l what ∂u and ∂w make."""
        found, params, prompt = rest(step), self.params, step.weights[LOCAL].detach()
        draws = step.generator("noise of dp-fpl's clients")
        u, w = bases(prompt, normal((prompt.shape[1], min(params.rank, *prompt.shape)), draws, prompt))
        shared, full = found.by_name[GLOBAL], found.by_name[LOCAL]
        by_u, by_w = full @ w.T, u.T @ full
        if params.epsilon:
            sigma = deviation(params, step.task.training)
            shared, by_u, by_w = (cut(gradient, params.clip) for gradient in (shared, by_u, by_w))
            by_u, by_w = (each + sigma * normal(each.shape, draws, each) for each in (by_u, by_w))
        own = params.factor_scale * recomposed(u, w, by_u, by_w, params.projection)
        return replace(found, by_name={**found.by_name, GLOBAL: shared, LOCAL: own})

    @fb.wrapper
    def aggregate(self, task: fb.AggregationTask, rest: Aggregate) -> Aggregated:
        """The stack's, of updates that all have the server's noise of one step."""
        if not self.params.epsilon:
            return rest(task)
        training, before = task.spec.training, task.weights[GLOBAL]
        largest = float(participant_shares(task.updates, training.weighting).max())
        rate = rates_by_name(training, task.model, task.round)[GLOBAL]
        draws = task.generator("noise of dp-fpl's server")
        noise = rate * largest * deviation(self.params, training) * normal(before.shape, draws, before)
        noisy = (replace(u, weights={**u.weights, GLOBAL: u.weights[GLOBAL] - noise}) for u in task.updates)
        return rest(replace(task, updates=tuple(noisy)))

    @fb.hookimpl
    def evaluate(self, task: fb.EvaluationTask) -> fb.Predictions:
        """The global model by v_G alone; own models by the new v_G and the client's l."""
        return personal_predictions(task, {LOCAL: torch.zeros_like(task.weights[LOCAL])})
