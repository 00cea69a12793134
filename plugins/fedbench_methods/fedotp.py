"""FedOTP - Li, Huang, Wang, Shi, "Global and Local Prompts Cooperation via Optimal Transport for Federated Learning",
CVPR 2024; arXiv 2403.00041.

A global prompt v^g and one of each client's own v^l, in R^{M×d_t}, divide an image's patches; CLIP is frozen:
    t_{k,n} = g([v^n; name_k]) / |·|, n ∈ {g, l};   F ∈ R^{P×d} unit patch features;   S_pn = F_p·t_{k,n}
    T = argmin_T ⟨1 − S, T⟩ − ε H(T)   with T 1 ≤ 1/P (rows, relaxed) and Tᵀ1 = γ/2 (columns)
      by  u ← min(1, (1/P) / (Q v)),  v ← (γ/2) / (Qᵀ u),  Q = exp(−(1 − S)/ε), from u = v = 1 until mean |Δv| < thresh;
      T = diag(u) Q diag(v), one for each image and class, without a gradient
    logit_k = s ⟨T, S⟩,   L = CE                                   (s: CLIP's own scale, frozen; the mass γ scales it)
    v^g ← Σ_i (n_i / Σ_j n_j) v^g_i;   v^l stays
v^g is sent; v^l is not, nor counted or averaged. All v^l begin at one draw of the server, other than that of v^g.

Answers: build_model, private, evaluate. Stacks with methods that change the loss or aggregate otherwise; terms on the
weights (fedprox) hold v^l as well. Any CLIP whose tower has features of single patches (`ClipPatchEncoder`), which are
cached: P d halves an image, 8 times its pooled feature for clip:embedded and 98 times for ViT-B/16.
Own models, in the columns `personal_...`, are the new v^g with the client's v^l; a client that has not taken part has
the first draw. The global model has v^g in both places, so that its columns know nothing of any client. v^l stays as
trained where the update with v^g was lost.
Paper against released code: the script of CIFAR-100 has M = 4 and ε = 0.1, that of few shots 16 and 0.01, and γ is 0.8
in both but 1 by default. The code lets all clients train in the first round and carries SGD's momentum from client to
client; here the run's participation holds, and every client begins anew. Columns of Q are divided by their largest
entry, which changes no iterate's plan and keeps exp from underflow at small ε. The stop is judged for each image and
class by itself: predictions do not depend on the rest of a batch. Recipe: SGD 1e-3 of the code, with momentum 0.9 and
decay 5e-4 of the toolbox it is built on.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fedbench.api as fb
from fedbench.api import hookimpl, hyper
from fedbench.models.clip.patches import ClipPatchEncoder
from fedbench.models.heads import clip_of
from fedbench.models.prompts.context import initial_context, prompt_tower, random_context
from fedbench.toolkit.fedavg import personal_predictions

GLOBAL, LOCAL = "prompt.global", "prompt.local"
ENTRIES = 2**23
"""Of plans, b K P, at once where no gradient is needed: images of a batch do not depend on each other."""
CHECKED_EVERY = 10
"""Iterations between looks at whether all plans are found: at 10, a step on clip:embedded takes two thirds of the time
that a look behind each one takes."""


@dataclass(frozen=True, kw_only=True)
class FedOtpParams:
    """Hyper-parameters of FedOTP."""

    context_length: int = hyper(
        16, symbol="M", low=1, high=64, search=(4, 16), source="released code; its CIFAR-100 script: 4"
    )
    eps: float = hyper(0.1, symbol="ε", low=0.01, high=0.5, log=True, source="released code; its few-shot script: 0.01")
    gamma: float = hyper(0.8, symbol="γ", low=0.5, high=1.0, source="released scripts; 1 transports every patch")
    thresh: float = hyper(1e-3, symbol="thresh", low=0.0, high=1.0, search=False, source="released code; mean |Δv|")
    max_iter: int = hyper(100, symbol="iterations", low=1, high=10_000, search=False, source="released code")


def transport_plans(similarities: Tensor, eps: float, gamma: float, thresh: float, max_iter: int) -> Tensor:
    """T (2, ..., P) of ``similarities`` S (2, ..., P), by prompt, image and class, and patch.

    Columns, T[n].sum(-1), are γ/2; rows, T.sum(0), at most 1/P when converged. NaN only where S is.
    """
    top = similarities.amax(dim=-1, keepdim=True)
    # with Q = Q' c, c the largest entry of a column, v' = c v has the same u and T as v
    kernel, largest = ((similarities - top) / eps).exp(), ((top - 1) / eps).exp().squeeze(-1)

    def rows(v: Tensor) -> Tensor:
        return (kernel * (similarities.shape[-1] * v)[..., None]).sum(dim=0).clamp(min=1).reciprocal()

    iterates, stopped = [largest], list[Tensor]()
    while len(stopped) < max_iter:
        first = len(stopped)
        for _ in range(min(CHECKED_EVERY, max_iter - first)):
            iterates.append(gamma / 2 / (kernel * rows(iterates[-1])).sum(dim=-1))
        changes = torch.stack(iterates[first:]).diff(dim=0).abs() / largest
        stopped += (changes.mean(dim=1) < thresh).unbind()  # 0/0, where c underflows, is no stop
        if torch.stack(stopped).any(dim=0).all():
            break
    stopped[-1] = torch.ones_like(stopped[-1])
    last = torch.stack(stopped).int().argmax(dim=0).expand(1, *largest.shape)
    found = torch.stack(iterates)
    before, after = found[:-1].gather(0, last)[0], found[1:].gather(0, last)[0]
    return rows(before) * kernel * after[..., None]


class Plans(torch.autograd.Function):
    """`transport_plans` as an operation of torch's own kind, so that vmap leaves its stop to the data.

    Unworkable where ``checked`` and a plan is not a number.
    """

    @staticmethod
    def forward(similarities: Tensor, checked: bool, *options: Any) -> Tensor:
        """T (2, ..., P); ``options`` are those of `transport_plans`."""
        plans = transport_plans(similarities.float().contiguous(), *options)
        if checked and bool(plans.isnan().any()):
            raise fb.Unworkable("fedotp has prompts whose transport plan is not a number; lower the learning rate.")
        return plans

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """A plan is a constant of the loss."""
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], similarities: Tensor, *options: Any) -> tuple[Tensor, int]:
        """The mapped dimension is one more of those over which plans are independent."""
        return Plans.apply(similarities.movedim(in_dims[0], 1), *options), 1


def transported(patches: Tensor, texts: Tensor, params: FedOtpParams, *, checked: bool) -> Tensor:
    """⟨T, S⟩, (b, K), of unit ``patches`` F (b, P, d) and ``texts`` t (2, K, d); T has no gradient."""
    at_once = max(ENTRIES // (texts.shape[1] * patches.shape[1]), 1)
    if len(patches) > at_once and not torch.is_grad_enabled():
        parts = torch.split(patches, at_once)
        return torch.cat([transported(part, texts, params, checked=checked) for part in parts])
    similarities = torch.einsum("bpd,nkd->nbkp", patches, texts)
    options = (params.eps, params.gamma, params.thresh, params.max_iter)
    plans: Tensor = Plans.apply(similarities.detach(), checked, *options)
    return (plans * similarities).sum(dim=(0, -1))


class FedOTP(fb.Method[FedOtpParams]):
    """A global and a private prompt divide an image's patches by optimal transport."""

    name = "fedotp"
    citation = "Li et al., Global and Local Prompts Cooperation via Optimal Transport for FL, CVPR 2024"
    requires = ("clip", "context", "patches")
    recipe = {"optimizer": "sgd", "lr": 1e-3, "momentum": 0.9, "weight_decay": 5e-4}
    keeps_lost_training = True

    @hookimpl
    def build_model(self, setup: fb.ModelSetup) -> fb.Model:
        """Both prompts; logits from the patches of an image and the texts of both."""
        clip, params, seed = clip_of(setup), self.params, setup.spec.seed
        tower = prompt_tower(clip, setup.classnames, params.context_length)
        scale = clip.logit_scale

        def forward(tensors: fb.Tensors, inputs: Tensor, training: bool) -> fb.Outputs:
            texts = tower.encode(torch.stack([tensors[GLOBAL], tensors[LOCAL]])[:, None])
            logits = scale * transported(inputs, texts, params, checked=not training)
            return fb.Outputs(logits, inputs.mean(dim=1))

        weights = {
            GLOBAL: initial_context(clip, seed, params.context_length, "random"),
            LOCAL: random_context(seed, "local context", params.context_length, tower.width),
        }
        return fb.Model(weights=weights, forward=forward, encoder=ClipPatchEncoder(clip))

    @hookimpl
    def private(self, model: fb.Model, spec: fb.RunSpec) -> Collection[str]:
        """The local prompt."""
        return (LOCAL,)

    @hookimpl
    def evaluate(self, task: fb.EvaluationTask) -> fb.Predictions:
        """The global model by v^g alone, in both places; own models by the new v^g and the client's v^l."""
        return personal_predictions(task, {LOCAL: task.weights[GLOBAL]})
