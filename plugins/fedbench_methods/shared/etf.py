"""Equiangular classifiers: one fixed vector for each class, all at the same angle (a simplex ETF), dense or sparse.

The sparse form is SSE-C of FedLoGe (Xiao et al., ICLR 2024).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedbench.api import FedbenchError

SMALLEST = 1e-12
"""Length of a row below which it is not divided by."""
RATE = 1e-4
"""Adam's, of FedLoGe's released code; falls to zero here."""


def simplex(num_classes: int, width: int, generator: torch.Generator) -> Tensor:
    """Rows (C, d) of length one with cosine −1/(C−1) to each other, turned at random, float64; d ≥ C − 1.

    P (I − 11ᵀ/C) is an orthonormal basis (d, C−1) times that of the vectors (C,) of sum zero, so C − 1 columns do.
    """
    turned = torch.randn(width, num_classes - 1, generator=generator, dtype=torch.float64)
    sum_zero = torch.eye(num_classes, dtype=torch.float64)[:, 1:] - 1 / num_classes
    rows: Tensor = torch.linalg.qr(sum_zero).Q @ torch.linalg.qr(turned).Q.T
    return math.sqrt(num_classes / (num_classes - 1)) * rows


def kept_entries(rows: int, width: int, sparsity: float, generator: torch.Generator) -> Tensor:
    """(C, d) float64: 0 in a random share ``sparsity`` of the entries, else 1. FedbenchError for a row of zeros."""
    keep = torch.ones(rows * width, dtype=torch.float64)
    keep[torch.randperm(len(keep), generator=generator)[: round(sparsity * len(keep))]] = 0
    if not keep.view(rows, width).any(dim=1).all():
        raise FedbenchError(
            f"a sparsity of {sparsity} leaves a class without any of its {width} entries; choose a smaller one."
        )
    return keep.view(rows, width)


def row_norms(weight: Tensor) -> Tensor:
    """‖w_c‖, (C, 1)."""
    norms: Tensor = torch.linalg.vector_norm(weight, dim=1, keepdim=True)
    return norms


def unit_rows(weight: Tensor) -> Tensor:
    """Rows of length one; zero stays zero."""
    return weight / row_norms(weight).clamp_min(SMALLEST)


def smallest_angles(weight: Tensor) -> Tensor:
    """arccos max_{c'≠c} cos(e_c, e_c') of each row, (C,), in radians."""
    cosines = unit_rows(weight) @ unit_rows(weight).T
    nearest = cosines.masked_fill(torch.eye(len(weight), dtype=torch.bool), -2.0).amax(dim=1)
    # the slope of arccos is infinite at both ends
    return torch.arccos(nearest.clamp(-1 + 1e-6, 1 - 1e-6))


def simplex_loss(weight: Tensor, norm: float) -> Tensor:
    """Σ_c (‖e_c‖ − τ)² − (1/C) Σ_c arccos max_{c'≠c} cos(e_c, e_c'), a scalar; ``weight`` (C, d)."""
    return (row_norms(weight) - norm).square().sum() - smallest_angles(weight).mean()


def sparse_simplex(
    num_classes: int, width: int, sparsity: float, norm: float, steps: int, generator: torch.Generator
) -> Tensor:
    """E (C, d) float32: `simplex`, made sparse, then ``steps`` of Adam on norms and angles of what is left (SSE-C).

    Without sparsity it is the simplex with rows of length ``norm``, to what the steps move it by.
    """
    if width < num_classes - 1:
        raise FedbenchError(
            f"{num_classes} vectors at equal angles, one for each class, need features of width {num_classes - 1} or "
            f"more; this backbone has {width}: choose a wider one."
        )
    start = simplex(num_classes, width, generator)
    keep = kept_entries(num_classes, width, sparsity, generator).float()
    rows = (norm * unit_rows(start.float() * keep)).requires_grad_()
    optimiser = torch.optim.Adam([rows], lr=RATE)
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = RATE * (1 - step / steps)
        loss = simplex_loss(rows * keep, norm)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    return (rows * keep).detach()
