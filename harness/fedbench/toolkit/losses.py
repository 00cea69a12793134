"""Losses that methods share: cross-entropy, one against the rest, and the pull back to the weights received."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from fedbench.core.types import Tensors


def mean_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """−log softmax(logits)_y, the mean over the batch; ``logits`` (b, C), ``labels`` (b,)."""
    # what torch's own gives, in operations that vmap takes as they are: a cohort's step of PromptFL is 3 % faster
    return -torch.log_softmax(logits, dim=1).gather(1, labels[:, None]).mean()


def mean_divergence(logits: Tensor, known: Tensor) -> Tensor:
    """(1/b) Σ_i KL(softmax(known_i) ‖ softmax(logits_i)), a scalar, of ``logits`` and ``known`` ones, (b, C) each."""
    wanted = torch.log_softmax(known, dim=1)
    return (wanted.exp() * (wanted - torch.log_softmax(logits, dim=1))).sum(dim=1).mean()


FEWEST = 1e-8
"""Replaces a count of zero samples of a class, whose logarithm is taken."""


def balance(counts: Tensor, gamma: float = 1.0) -> Tensor:
    """γ log n, (C,), of a client's ``counts`` n by class: what balanced softmax adds to its logits in training."""
    return gamma * counts.float().clamp(min=FEWEST).log()


def class_prior(counts: Tensor) -> Tensor:
    """π (C,), float32, from the clients' samples by class (N, C)."""
    totals = counts.sum(dim=0).float()
    return totals / totals.sum()


def adjusted(logits: Tensor, prior: Tensor, tau: float = 1.0) -> Tensor:
    """o + τ log π, (b, C), from ``logits`` o (b, C) and ``prior`` π (C,). A class that nobody has counts as 1e-8."""
    return logits + balance(prior, tau).to(logits.device)


def squared_distance(weights: Tensors, received: Tensors) -> Tensor:
    """‖w − wᵗ‖² over the trainable tensors, a scalar."""
    return torch.stack([(weights[name] - received[name]).square().sum() for name in weights]).sum()


def proximal_term(weights: Tensors, received: Tensors, mu: float) -> Tensor:
    """(μ/2) ‖w − wᵗ‖² (Li et al., MLSys 2020, Eq. 2); its gradient is μ (w − wᵗ)."""
    return 0.5 * mu * squared_distance(weights, received)


def unsquared_term(weights: Tensors, received: Tensors, mu: float) -> Tensor:
    """(μ/2) ‖w − wᵗ‖, as some released code has it; the gradient at w = wᵗ is taken as zero."""
    distance = squared_distance(weights, received)
    moved = distance > 0
    # the inner where keeps the derivative of the root finite at zero
    return 0.5 * mu * torch.where(moved, torch.where(moved, distance, 1.0).sqrt(), 0.0)


def one_versus_rest(logits: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """L = (1/B) Σ_i Σ_j BCE(σ(o_ij), y_ij), each term times ``weights`` (batch, C) where given."""
    return binary_cross_entropy_with_logits(logits, targets, weights, reduction="sum") / len(logits)


def balanced_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """L without weights in value, and with ``weights`` times ∂L/∂o as its gradient; all (batch, C)."""
    # weights are constants: what multiplies a term multiplies its gradient
    weighted = one_versus_rest(logits, targets, weights)
    return one_versus_rest(logits, targets).detach() + (weighted - weighted.detach())
