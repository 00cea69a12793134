"""Gaussians of features by class: what each client reports of its own samples, pooled as if they lay in one place.

A client with n samples of a class reports their mean and their unbiased covariance (the sum of squares over n - 1).
With μ_k and S_k of the clients that own the class, n = Σ_k n_k:
    μ = Σ_k n_k μ_k / n
    S = [Σ_k (n_k - 1) S_k + Σ_k n_k (μ_k - μ)(μ_k - μ)ᵀ] / (n - 1)
are mean and unbiased covariance of all these samples, however they are partitioned among clients. The second sum equals
Σ_k n_k μ_k μ_kᵀ - n μ μᵀ, but nothing cancels in it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbench.api import Tensors
from fedbench.toolkit.prototypes import class_means

ROUNDING = float(torch.finfo(torch.float32).eps)
"""Of the trace, added to a covariance's diagonal: more than sending it as float32 can have made it less than zero."""
SMALLEST = 1e-30
"""The least variance that is drawn from, so that a single sample, without spread, has a factor as well."""


@dataclass(frozen=True, eq=False)
class Gaussian:
    """``mean`` (d,) and ``covariance`` (d, d) of a class, float64."""

    mean: Tensor
    covariance: Tensor


def covariance(rows: Tensor) -> Tensor:
    """Unbiased covariance (d, d) of ``rows`` (n, d), float64; zeros for a single row."""
    centred = rows.double() - rows.double().mean(dim=0)
    return centred.T @ centred / max(len(rows) - 1, 1)


def upper_triangle(matrix: Tensor) -> Tensor:
    """The d (d + 1) / 2 entries of a symmetric ``matrix`` (d, d) on and above its diagonal, row by row."""
    rows, columns = torch.triu_indices(*matrix.shape, device=matrix.device)
    return matrix[rows, columns]


def symmetric(entries: Tensor, width: int) -> Tensor:
    """The matrix (d, d), d = ``width``, again from what ``upper_triangle`` made of it."""
    rows, columns = torch.triu_indices(width, width, device=entries.device)
    matrix = entries.new_zeros(width, width)
    matrix[rows, columns] = entries
    matrix[columns, rows] = entries
    return matrix


def class_report(features: Tensor, labels: Tensor, num_classes: int) -> Tensors:
    """What a client reports of its ``features`` (n, d) with ``labels`` (n,): for the k classes it owns, ascending,
    "means" (k, d) and "covariances" (k, d (d + 1) / 2), upper triangles; for every class "counts" (C,) int64.
    """
    statistics = class_means(features, labels)
    triangles = [upper_triangle(covariance(features[labels == owned])) for owned in statistics.classes]
    return {
        "means": statistics.means,
        "covariances": torch.stack(triangles).to(features.dtype),
        "counts": torch.bincount(labels, minlength=num_classes),
    }


def pooled(means: Tensor, covariances: Tensor, counts: Tensor) -> Gaussian:
    """The Gaussian of all samples of a class, from ``means`` (k, d), unbiased ``covariances`` (k, d, d) and ``counts``
    (k,) of the k clients that own it.
    """
    sizes, means = counts.double(), means.double()
    total = sizes.sum()
    mean = sizes @ means / total
    apart = means - mean
    within = torch.tensordot(sizes - 1, covariances.double(), dims=1)
    between = (sizes[:, None] * apart).T @ apart
    return Gaussian(mean, (within + between) / (total - 1).clamp(min=1))


def pooled_by_class(reports: Collection[Tensors]) -> Iterator[tuple[int, Gaussian]]:
    """Each class that any of the clients owns, ascending, with its pooled Gaussian, from their ``class_report``."""
    num_classes = max((len(report["counts"]) for report in reports), default=0)
    for label in range(num_classes):
        owners = [report for report in reports if report["counts"][label] > 0]
        if not owners:
            continue
        # the row of a class among those that a client owns
        rows = [int((report["counts"][:label] > 0).sum()) for report in owners]
        means = torch.stack([report["means"][row] for report, row in zip(owners, rows, strict=True)])
        covariances = [
            symmetric(report["covariances"][row], means.shape[1]) for report, row in zip(owners, rows, strict=True)
        ]
        counts = torch.stack([report["counts"][label] for report in owners])
        yield label, pooled(means, torch.stack(covariances), counts)


def shrunk(matrix: Tensor, share: float) -> Tensor:
    """(1 - ρ) S + ρ (tr S / d) I for a covariance S (d, d) and ρ = ``share``; the trace stays."""
    spread = matrix.diagonal().mean() * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    return torch.lerp(matrix, spread, share)


def drawn(gaussian: Gaussian, count: int, generator: torch.Generator) -> Tensor:
    """``count`` samples (m, d) of N(mean, covariance), float64, by a Cholesky factor; the covariance may be singular.

    ``generator`` is on the CPU, so that every device draws the same numbers.
    """
    width, device = len(gaussian.mean), gaussian.mean.device
    ridge = ROUNDING * gaussian.covariance.trace() + SMALLEST
    padding = ridge * torch.eye(width, dtype=torch.float64, device=device)
    factor: Tensor = torch.linalg.cholesky(gaussian.covariance + padding)
    noise = torch.randn(count, width, generator=generator, dtype=torch.float64).to(device)
    return gaussian.mean + noise @ factor.T
