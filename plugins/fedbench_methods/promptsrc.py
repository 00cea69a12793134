"""PromptSRC + FedAvg - Khattak, Wasim, Naseer, Khan, Yang, Khan, "Self-regulating Prompts: Foundational Model
Adaptation without Forgetting", ICCV 2023; arXiv 2307.06948; federated by FedAvg.

Prompts of the first J layers of both towers, each tower its own, held near what frozen CLIP says; CLIP is frozen:
    f (b, d), t (K, d) unit features with prompts, o = s f tᵀ;   f⁰, t⁰, o⁰ without, t⁰ of the run's `templates`
    L = CE(o, y) + λ_1 Σ|t − t⁰| / (K d) + λ_2 Σ|f − f⁰| / (b d) + λ_3 L_kl
    L_kl = (1/(b K)) Σ_i Σ_k q⁰_ik (log q⁰_ik − log q_ik),   q = softmax(o), q⁰ = softmax(o⁰)
    P ← Σ_i (n_i / Σ_j n_j) P_i of round r: P^r;   predictions are by Σ_r w_r P^r / Σ_r w_r,
    w_r = exp(−(r − μ)² / (2 σ²)), over the rounds so far                                       (Gaussian aggregation)
All prompts are sent: J (M d_t + M_v d_v) floats. Round r + 1 starts from P^r, not from the mean over rounds.

Answers: build_model, loss_terms. Wraps: aggregate (keeps the weighted sum, changes nothing), evaluate (global model).
Stacks with losses, server rules and personalisations; models of clients' own, and fine-tuned ones, are of one round.
Paper against what runs here:
- The paper weighs the epochs of one training, with μ = 15 and σ = 1 of 20. The server sees rounds: μ and σ are shares
  of the run's rounds, 0.75 and 0.05. FLiP has 15 and 1 whatever the number of rounds.
- The paper's t⁰ is of 60 templates, averaged raw; here those of the run, unit features averaged, as for zero-shot CLIP.
- f⁰ is of the same view of an image as f, augmented or not.
- Towers with fewer than J layers get prompts in all they have; tokens of images stand behind the patches, as MaPLe's.
Recipe: the code's SGD 2.5e-3, with momentum and decay of its toolbox. ResNets have no tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import normalize

import fedbench.api as fb
from fedbench.models.heads import TextOutputs, clip_of, scaled_logits
from fedbench.models.prompts.context import Init, initial_context, prompt_tower, random_context, text_layers
from fedbench.models.prompts.image_tokens import encode_with_tokens, require_vision_transformer
from fedbench.toolkit.losses import mean_divergence
from fedbench.toolkit.wrapping import Aggregate, Aggregated, Evaluate

TEXT = "text"
MEAN, WEIGHT, NEXT = "mean/", "log weight", "log next weight"
"""What the server keeps: the mean over earlier rounds, the log of their weights' sum, and of the weight to come."""


@dataclass(frozen=True, kw_only=True)
class PromptSrcParams:
    """Hyper-parameters of PromptSRC."""

    depth: int = fb.hyper(9, symbol="J", low=1, high=48, search=(1, 12), source="released code; at most all layers")
    tokens: int = fb.hyper(4, symbol="M_v", low=1, high=32, search=(1, 8), source="released code")
    init: Init = fb.hyper("words", symbol="P_0", source='released code: "a photo of a", 4 tokens')
    context_length: int = fb.hyper(
        4, symbol="M", low=1, high=32, search=(1, 16), when={"init": ("random",)}, source="released code"
    )
    text_weight: float = fb.hyper(25.0, symbol="λ_1", low=0.1, high=100.0, log=True, off=0.0, source="paper")
    image_weight: float = fb.hyper(10.0, symbol="λ_2", low=0.1, high=100.0, log=True, off=0.0, source="paper")
    logit_weight: float = fb.hyper(1.0, symbol="λ_3", low=0.01, high=100.0, log=True, off=0.0, source="paper")
    gaussian: bool = fb.hyper(True, symbol="w_r", source="paper; false: predictions by the last round alone")
    mean: float = fb.hyper(0.75, symbol="μ/R", low=0.0, high=1.0, when={"gaussian": (True,)}, source="paper: 15 of 20")
    deviation: float = fb.hyper(
        0.05, symbol="σ/R", low=0.01, high=1.0, when={"gaussian": (True,)}, search=False, source="paper: 1 of 20"
    )


@dataclass(frozen=True, eq=False)
class RegulatedOutputs(TextOutputs):
    """With what frozen CLIP says of the batch, in training: unit ``frozen`` f⁰ (b, d)."""

    frozen: Tensor
    known: Tensor
    """o⁰ (b, K)."""


def log_weight(round: int, mean: float, deviation: float) -> float:
    """log w_r, of ``mean`` μ and ``deviation`` σ in rounds."""
    return -0.5 * ((round - mean) / deviation) ** 2


def joined(kept: fb.Tensors, weights: fb.Tensors) -> tuple[fb.Tensors, Tensor]:
    """The mean with ``weights`` of the round to come, by name, and the log of the sum of weights."""
    before, last = kept[WEIGHT].cpu(), kept[NEXT].cpu()
    total = torch.logaddexp(before, last)
    share = float((last - total).exp())
    means = {name: kept[MEAN + name] for name in weights}
    return {name: torch.lerp(means[name].double(), new.double(), share).to(new) for name, new in weights.items()}, total


class PromptSRC(fb.Method[PromptSrcParams]):
    """Prompts in both towers, held near frozen CLIP; predictions by their Gaussian mean over rounds."""

    name = "promptsrc"
    citation = "Khattak et al., Self-regulating Prompts: Foundational Model Adaptation without Forgetting, ICCV 2023"
    requires = ("clip", "context", "image_layers")
    recipe = {"optimizer": "sgd", "lr": 2.5e-3, "momentum": 0.9, "weight_decay": 5e-4}

    @fb.hookimpl
    def build_model(self, setup: fb.ModelSetup) -> fb.Model:
        """The prompts of both towers; logits are scaled cosines of what these make of them."""
        clip, params, seed = clip_of(setup), self.params, setup.spec.seed
        visual = require_vision_transformer(clip, "promptsrc appends tokens to the image tower")
        layers = len(text_layers(clip, "promptsrc puts prompts into")) if params.depth > 1 else 1
        first = initial_context(clip, seed, params.context_length, params.init)
        tower, length = prompt_tower(clip, setup.classnames, len(first)), len(first)
        text = [f"text.{layer}" for layer in range(min(params.depth, layers))]
        image = [f"image.{layer}" for layer in range(min(params.depth, visual.depth))]
        weights = {name: random_context(seed, f"promptsrc {name}", length, tower.width) for name in text}
        weights |= {name: random_context(seed, f"promptsrc {name}", params.tokens, visual.width) for name in image}
        weights[text[0]] = first
        known = clip.text_features(setup.classnames, setup.spec.templates)

        def forward(tensors: fb.Tensors, inputs: Tensor, training: bool) -> fb.Outputs:
            prompts, tokens = [tensors[name] for name in text], [tensors[name] for name in image]
            texts = tower.encode(prompts[0], deep=[[prompt] for prompt in prompts[1:]])
            features = normalize(encode_with_tokens(visual, inputs, tokens[0], deep=tokens[1:]), dim=-1)
            logits = scaled_logits(features, texts, None, clip.logit_scale)
            if not training:
                return TextOutputs(logits, features, texts)
            with torch.no_grad():
                frozen = normalize(encode_with_tokens(visual, inputs), dim=-1)
                zero_shot = scaled_logits(frozen, known, None, clip.logit_scale)
            return RegulatedOutputs(logits, features, texts, frozen, zero_shot)

        return fb.Model(weights, forward, transform=clip.transform, constants={TEXT: known})

    @fb.hookimpl
    def loss_terms(self, step: fb.LocalStep) -> Tensor | None:
        """The three terms that hold texts, image features and predictions."""
        params, made = self.params, cast(RegulatedOutputs, step.outputs)
        terms = []
        if params.text_weight:
            terms.append(params.text_weight * (made.texts - step.model.constants[TEXT]).abs().mean())
        if params.image_weight:
            terms.append(params.image_weight * (made.features - made.frozen).abs().mean())
        if params.logit_weight:
            terms.append(params.logit_weight * mean_divergence(made.logits, made.known) / made.logits.shape[1])
        return torch.stack(terms).sum() if terms else None

    @fb.wrapper
    def aggregate(self, task: fb.AggregationTask, rest: Aggregate) -> Aggregated:
        """What the stack answers. The weights that the last round ended at are added to the mean over rounds."""
        rounds, kept = task.spec.training.rounds, task.state.get(self.name, {})
        if self.params.gaussian and not task.exchange:
            future = log_weight(task.round, self.params.mean * rounds, self.params.deviation * rounds)
            means, total = joined(kept, task.weights) if kept else (task.weights, torch.tensor(-torch.inf).double())
            state = {NEXT: torch.tensor(future).double(), WEIGHT: total}
            task.state[self.name] = {**state, **{MEAN + name: value for name, value in means.items()}}
        return rest(task)

    @fb.wrapper
    def evaluate(self, task: fb.EvaluationTask, rest: Evaluate) -> fb.Predictions:
        """The global model by the mean over rounds, the last among them; a client's own weights as they are."""
        kept = task.state.get(self.name, {})
        if not kept or task.client is not None:
            return rest(task)
        shared = {name: value for name, value in task.weights.items() if MEAN + name in kept}
        return rest(replace(task, weights={**task.weights, **joined(kept, shared)[0]}))
