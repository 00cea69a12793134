"""Optimal transport between the patches of images and the texts of several prompts, as logits (FedOTP, PLOT).

For one image and class, S ∈ R^{P×N} the cosines of P patches to the texts of N prompts and Q = exp(−(1 − S)/ε):
    T = argmin_T ⟨1 − S, T⟩ − ε H(T)   with Tᵀ1 = γ/N (columns) and rows T 1 ≤ 1/P, or = 1/P if balanced
      by  u ← (1/P) / (Q v), at most 1 unless balanced;   v ← (γ/N) / (Qᵀ u),   from v = 1 until mean |Δv| < thresh
      T = diag(u) Q diag(v)
Columns of Q are divided by their largest entry, which changes no iterate's plan and keeps exp from underflow at small
ε. The stop is judged for each image and class by itself: predictions do not depend on the rest of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedbench.api import diverged

ENTRIES = 2**23
"""Of plans, b K P, at once where no gradient is needed: images of a batch do not depend on each other."""
CHECKED_EVERY = 10
"""Iterations between looks at whether all plans are found: at 10, a step of FedOTP on clip:embedded takes two thirds of
the time that a look behind each one takes."""


@dataclass(frozen=True)
class Transport:
    """How plans are found."""

    eps: float
    """ε."""
    gamma: float = 1.0
    """γ, the mass that is transported; 1 where it is balanced."""
    thresh: float = 1e-3
    max_iter: int = 100
    balanced: bool = False
    """Whether every patch gives all its mass."""


def transport_plans(similarities: Tensor, how: Transport) -> Tensor:
    """T (N, ..., P) of ``similarities`` S (N, ..., P), by prompt, image and class, and patch.

    Columns, T[n].sum(-1), are γ/N; rows, T.sum(0), at most 1/P when converged. NaN only where S is.
    """
    top = similarities.amax(dim=-1, keepdim=True)
    # with Q = Q' c, c the largest entry of a column, v' = c v has the same u and T as v
    kernel, largest = ((similarities - top) / how.eps).exp(), ((top - 1) / how.eps).exp().squeeze(-1)
    column = how.gamma / len(similarities)

    def rows(v: Tensor) -> Tensor:
        given = (kernel * (similarities.shape[-1] * v)[..., None]).sum(dim=0)
        return (given if how.balanced else given.clamp(min=1)).reciprocal()

    iterates, stopped = [largest], list[Tensor]()
    while len(stopped) < how.max_iter:
        first = len(stopped)
        for _ in range(min(CHECKED_EVERY, how.max_iter - first)):
            iterates.append(column / (kernel * rows(iterates[-1])).sum(dim=-1))
        changes = torch.stack(iterates[first:]).diff(dim=0).abs() / largest
        stopped += (changes.mean(dim=1) < how.thresh).unbind()  # 0/0, where c underflows, is no stop
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
    def forward(similarities: Tensor, checked: bool, how: Transport) -> Tensor:
        """T (N, ..., P)."""
        plans = transport_plans(similarities.float().contiguous(), how)
        if checked and bool(plans.isnan().any()):
            raise diverged("the transport plan of a prompt is not a number; lower the learning rate.")
        return plans

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """A plan is a constant of the loss."""
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], similarities: Tensor, *options: Any) -> tuple[Tensor, int]:
        """The mapped dimension is one more of those over which plans are independent."""
        return Plans.apply(similarities.movedim(in_dims[0], 1), *options), 1


def transported(patches: Tensor, texts: Tensor, how: Transport, *, checked: bool) -> Tensor:
    """⟨T, S⟩, (b, K), of unit ``patches`` F (b, P, d) and ``texts`` t (N, K, d); T has no gradient."""
    at_once = max(2 * ENTRIES // (len(texts) * texts.shape[1] * patches.shape[1]), 1)
    if len(patches) > at_once and not torch.is_grad_enabled():
        parts = torch.split(patches, at_once)
        return torch.cat([transported(part, texts, how, checked=checked) for part in parts])
    similarities = torch.einsum("bpd,nkd->nbkp", patches, texts)
    plans: Tensor = Plans.apply(similarities.detach(), checked, how)
    return (plans * similarities).sum(dim=(0, -1))
