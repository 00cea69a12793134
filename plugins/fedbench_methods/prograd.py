"""ProGrad - Zhu, Niu, Han, Wu, Zhang, "Prompt-aligned Gradient for Prompt Tuning", ICCV 2023; arXiv 2205.14865; at the
clients of a federation.

A step does not undo what zero-shot CLIP knows. With the gradient g of what the stack minimises (in the paper
cross-entropy) and h of the divergence from zero-shot CLIP's predictions p⁰ to the model's p,
    L_kl = (T²/b) Σ_i Σ_c p⁰_ic (log p⁰_ic − log p_ic),  p⁰ = softmax(o⁰/T), p = softmax(o/T), o⁰_ic = s cos(f⁰_i, t⁰_c)
    g' = g                           where ⟨g, h⟩ ≥ 0
    g' = g − λ (⟨g, h⟩ / |h|²) h     elsewhere                         (λ = 1: what of g works against h is taken out)
f⁰ and t⁰ are features of frozen CLIP, t⁰ of the run's `templates`. λ = 0 is the stack without it, bit for bit.

Wraps: build_model (t⁰ and f⁰ beside the model), local_gradients (g becomes g'). The paper's ProGrad, on CoOp's context,
is `promptfl+prograd`; alone it trains the linear head. Stacks with any learner on CLIP, with losses, server rules and
personalisations: a model of each client's own beside the global one has no part in h and keeps its g.
Paper against released code, and left open:
- Of several trained tensors g and h are the gradients in all of them together; the code, whose learner has one, takes
  each by itself. A gradient h of zero leaves g as it is; the code would divide by it.
- FLiP's "ProGrad" adds L_kl to the loss and projects nothing: that is a distillation, and not here.
- f⁰ is that of the images as they are, also where the run augments them.
It has no recipe: the learner's holds. Cost: a second backward pass; clients train one after another.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

import fedbench.api as fb
from fedbench.models.heads import clip_of
from fedbench.toolkit.local_training import in_precision
from fedbench.toolkit.losses import mean_divergence
from fedbench.toolkit.wrapping import Build, Gradients

TEXTS, IMAGES = "prograd.texts", "prograd.images"


@dataclass(frozen=True, kw_only=True)
class ProGradParams:
    """Hyper-parameters of ProGrad."""

    strength: float = fb.hyper(
        1.0, symbol="λ", low=0.01, high=1.0, off=0.0, search=(0.1, 1.0), source="paper and released code"
    )
    temperature: float = fb.hyper(
        1.0, symbol="T", low=0.1, high=10.0, log=True, needs="strength", search=False, source="released code"
    )


def divergence(logits: Tensor, known: Tensor, temperature: float) -> Tensor:
    """L_kl, a scalar, from the model's ``logits`` o and zero-shot ones ``known`` o⁰, (b, C) each."""
    return temperature**2 * mean_divergence(logits / temperature, known / temperature)


def aligned(found: fb.Tensors, general: fb.Tensors, strength: float) -> fb.Tensors:
    """g' by name, from g ``found`` and h ``general``; a weight that lacks either is left out and keeps its g."""
    both = sorted(found.keys() & general.keys())
    if not both:
        return found
    along = torch.stack([(found[name] * general[name]).sum() for name in both]).sum()
    length = torch.stack([general[name].square().sum() for name in both]).sum()
    share = strength * along / length
    moved = {name: torch.where(along < 0, found[name] - share * general[name], found[name]) for name in both}
    return {**found, **moved}


class ProGrad(fb.Method[ProGradParams]):
    """Gradients without what works against zero-shot CLIP."""

    name = "prograd"
    citation = "Zhu et al., Prompt-aligned Gradient for Prompt Tuning, ICCV 2023"
    requires: tuple[str, ...] = ("clip",)
    role = "local objective"

    @fb.wrapper
    def build_model(self, setup: fb.ModelSetup, rest: Build) -> fb.Model:
        """The stack's model, with zero-shot CLIP's texts and, for the training samples, its image features."""
        model, clip = rest(setup), clip_of(setup)
        texts = clip.text_features(setup.classnames, setup.spec.templates)
        return replace(
            model,
            constants={**model.constants, TEXTS: clip.logit_scale * texts},
            side_encoders={**model.side_encoders, IMAGES: clip.image_encoder()},
        )

    @fb.wrapper
    def local_gradients(self, step: fb.LocalStep, rest: Gradients) -> fb.StepGradients:
        """g' in place of the stack's g."""
        if not self.params.strength:
            return rest(step)
        known = normalize(step.batch.side[IMAGES], dim=-1) @ step.model.constants[TEXTS].T
        leaves = {name: weight for name, weight in step.weights.items() if weight.requires_grad}
        # running statistics are to move once a step
        own = replace(step, buffers={name: value.clone() for name, value in step.buffers.items()})
        with in_precision(step):
            loss = divergence((own if step.buffers else step).outputs.logits, known, self.params.temperature)
        gradients = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True, allow_unused=True)
        general = {name: h for name, h in zip(leaves, gradients, strict=True) if h is not None}
        answer = rest(step)
        return replace(answer, by_name=aligned(answer.by_name, general, self.params.strength))
