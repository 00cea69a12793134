"""Mixtures of Gaussians of features by class: fitted by expectation-maximisation, reported, drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedbench.api import Tensors
from fedbench_methods.shared.gaussians import symmetric, upper_triangle

Kind = Literal["spherical", "diagonal", "full"]
ADDED = 1e-6
"""To every variance."""
MOST_STEPS = 1000
TOLERANCE = 1e-12
"""Of the mean log-likelihood, at which fitting ends."""


@dataclass(frozen=True, eq=False)
class Mixture:
    """``weights`` (k,), ``means`` (k, d) and ``covariances`` (k,), (k, d) or (k, d, d) by kind; float64."""

    weights: Tensor
    means: Tensor
    covariances: Tensor


def fitted(rows: Tensor, components: int, kind: Kind, generator: torch.Generator) -> Mixture:
    """The mixture of ``rows`` (n, d) with at most n components; they begin as clusters by k-means."""
    rows, components = rows.double(), min(components, len(rows))
    shares = _clusters(rows, components, generator)
    found = _maximised(rows, shares, kind)
    before = -torch.inf
    for _ in range(MOST_STEPS if components > 1 else 0):
        joint = found.weights.log() + _log_densities(rows, found, kind)
        likelihood = float(joint.logsumexp(1).mean())
        if abs(likelihood - before) < TOLERANCE:
            break
        before, found = likelihood, _maximised(rows, joint.softmax(1), kind)
    return found


def drawn(mixture: Mixture, count: int, kind: Kind, generator: torch.Generator) -> Tensor:
    """``count`` rows (m, d), float64. What rounding has made negative of a covariance counts as zero."""
    which = torch.multinomial(mixture.weights.cpu(), count, replacement=True, generator=generator)
    width = mixture.means.shape[1]
    noise = torch.randn(count, width, generator=generator, dtype=torch.float64).to(mixture.means.device)
    which = which.to(mixture.means.device)
    if kind == "full":
        values, vectors = torch.linalg.eigh(mixture.covariances)
        factors: Tensor = vectors * values.clamp(min=0).sqrt()[:, None]
        return mixture.means[which] + (factors[which] @ noise[..., None])[..., 0]
    spread = mixture.covariances.clamp(min=0).sqrt()[which]
    return mixture.means[which] + noise * (spread[:, None] if kind == "spherical" else spread)


def class_mixtures(
    features: Tensor,
    labels: Tensor,
    num_classes: int,
    components: int,
    kind: Kind,
    least: int,
    generator: torch.Generator,
) -> Tensors:
    """What a client reports of ``features`` (n, d): the mixtures of the classes that have ``least`` samples or more.

    "counts" and "components" (C,) int64, zero for other classes; "weights" (k,), "means" (k, d) and "covariances" (k,),
    (k, d) or (k, d (d + 1)/2), upper triangles, of the k components of all classes, ascending by class.
    """
    counts = torch.bincount(labels, minlength=num_classes)
    counts = torch.where(counts >= least, counts, 0)
    found = [fitted(features[labels == owned], components, kind, generator) for owned in counts.nonzero().flatten()]
    width = features.shape[1]
    sizes = {"spherical": (), "diagonal": (width,), "full": (width * (width + 1) // 2,)}[kind]
    covariances = [
        torch.stack([upper_triangle(c) for c in m.covariances]) if kind == "full" else m.covariances for m in found
    ]
    return {
        "counts": counts,
        "components": torch.where(counts > 0, counts.clamp(max=components), 0),
        "weights": torch.cat([features.new_zeros(0), *(m.weights for m in found)]),
        "means": torch.cat([features.new_zeros(0, width), *(m.means for m in found)]),
        "covariances": torch.cat([features.new_zeros(0, *sizes), *covariances]),
    }


def drawn_classes(reports: Sequence[Tensors], kind: Kind, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """As many features (n, d), float32, as the reports count samples, and their labels (n,) int64."""
    features, labels = [reports[0]["means"].float()[:0]], [torch.zeros(0, dtype=torch.int64)]
    for report in reports:
        at = 0
        for label, (count, size) in enumerate(
            zip(report["counts"].tolist(), report["components"].tolist(), strict=True)
        ):
            if not count:
                continue
            weights, means, covariances = (
                report[n][at : at + size].double() for n in ("weights", "means", "covariances")
            )
            at += size
            if kind == "full":
                covariances = torch.stack([symmetric(entries, means.shape[1]) for entries in covariances])
            features.append(drawn(Mixture(weights, means, covariances), count, kind, generator).float())
            labels.append(torch.full((count,), label))
    return torch.cat(features), torch.cat(labels)


def _clusters(rows: Tensor, components: int, generator: torch.Generator) -> Tensor:
    """Which of the clusters by k-means each of ``rows`` is in, one-hot (n, k)."""
    centres = rows[torch.randperm(len(rows), generator=generator)[:components].to(rows.device)]
    for _ in range(100):
        nearest = torch.cdist(rows, centres).argmin(1)
        members = torch.nn.functional.one_hot(nearest, components).double()
        sizes = members.sum(0)
        moved = torch.where(sizes[:, None] > 0, members.T @ rows / sizes.clamp(min=1)[:, None], centres)
        if torch.equal(moved, centres):
            break
        centres = moved
    return members


def _maximised(rows: Tensor, shares: Tensor, kind: Kind) -> Mixture:
    """The mixture from how far each row (n, d) is of each component, ``shares`` (n, k)."""
    sizes = shares.sum(0).clamp(min=torch.finfo(torch.float64).eps)
    means = shares.T @ rows / sizes[:, None]
    apart = rows[None] - means[:, None]
    weighted = shares.T[..., None] * apart
    if kind == "full":
        covariances = weighted.mT @ apart / sizes[:, None, None]
        covariances = covariances + ADDED * torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
    else:
        covariances = (weighted * apart).sum(1) / sizes[:, None] + ADDED
        covariances = covariances.mean(1) if kind == "spherical" else covariances
    return Mixture(sizes / sizes.sum(), means, covariances)


def _log_densities(rows: Tensor, mixture: Mixture, kind: Kind) -> Tensor:
    """log N(row; component), (n, k), but for a constant."""
    apart = rows[None] - mixture.means[:, None]
    if kind == "full":
        factors: Tensor = torch.linalg.cholesky(mixture.covariances)
        scaled: Tensor = torch.linalg.solve_triangular(factors, apart.mT, upper=False)
        return -0.5 * scaled.square().sum(1).T - factors.diagonal(dim1=1, dim2=2).log().sum(1)
    variances = mixture.covariances[:, None].expand(-1, rows.shape[1]) if kind == "spherical" else mixture.covariances
    return -0.5 * ((apart.square() / variances[:, None]).sum(2).T + variances.log().sum(1))
