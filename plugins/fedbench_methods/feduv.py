"""FedUV - Son, Kim, Chung, Hall, "FedUV: Uniformity and Variance for Heterogeneous Federated Learning", CVPR 2024.

Two terms make a local model behave as if its data were balanced. With p the probabilities of a batch of b samples over
C classes and z its features:
    L_V = mean_c max(0, g − std_b(p_c)),   g = 1/√C, the deviation of a column of the identity         (variance)
    L_U = mean_{i<j} exp(−‖z_i − z_j‖² / σ),   σ the median of these squared distances               (uniformity)
    L = L_stack + λ L_V + μ L_U                                                        (deviations over b − 1 and C − 1)

Answers: loss_terms. Stacks with any method; a model that another method lets a client keep has no terms. Needs features
that are trained, unless μ = 0. λ = μ = 0 is FedAvg.
Left open / contradicted: as in released code, the gradient flows through the median too. Its z are the outputs of a
projection head: backbone=resnet50?projector=256&projector_layers=2; here they are whatever the classifier reads. There
pairs at no distance are left out of the median; here they count. A batch of one sample has no terms. The loss is over
the whole batch: g is reached by a batch of C samples whose predictions are sure and all different, not by larger ones
(of k samples of every class √((C − 1) / (C² − C/k)) is the most), so the variance term seldom vanishes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import fedbench.api as fb

SMALLEST = 1e-12


@dataclass(frozen=True, kw_only=True)
class FedUvParams:
    """Hyper-parameters of FedUV."""

    variance: float = fb.hyper(
        2.5, symbol="λ", low=1e-2, high=100.0, log=True, neutral=0.0, search=(0.1, 10.0), source="released code: 2.5"
    )
    uniformity: float = fb.hyper(
        0.5, symbol="μ", low=1e-2, high=100.0, log=True, neutral=0.0, search=(0.05, 5.0), source="released code: 0.5"
    )


def variance_term(probabilities: Tensor) -> Tensor:
    """L_V of p (b, C), a scalar; b of two or more."""
    goal = probabilities.shape[1] ** -0.5
    # finite slope where a class has the same probability in all samples
    deviations = (probabilities.var(dim=0) + SMALLEST).sqrt()
    return torch.relu(goal - deviations).mean()


def uniformity_term(features: Tensor) -> Tensor:
    """L_U of z (b, d), a scalar; b of two or more. The median of an even number is the lower one, as torch's."""
    first, second = torch.triu_indices(len(features), len(features), 1, device=features.device)
    products = features @ features.T
    lengths = products.diagonal()
    distances = (lengths[first] + lengths[second] - 2 * products[first, second]).clamp_min(0)
    median = distances.sort().values[(len(distances) - 1) // 2]
    return torch.exp(-distances / median.clamp_min(SMALLEST)).mean()


class FedUV(fb.Method[FedUvParams]):
    """Predictions as varied, and features as spread, as of balanced data."""

    name = "feduv"
    citation = "Son et al., FedUV: Uniformity and Variance for Heterogeneous Federated Learning, CVPR 2024"
    requires: tuple[str, ...] = ("trained_features", "sent_steps")

    def __init__(self, params: FedUvParams) -> None:
        super().__init__(params)
        if not params.uniformity:
            self.requires = ()

    @fb.hookimpl
    def loss_terms(self, step: fb.LocalStep) -> Tensor | None:
        """λ L_V + μ L_U; none for a model that the client keeps, nor of one sample."""
        params, outputs = self.params, step.outputs
        if step.is_own or len(step.batch.inputs) == 1 or not (params.variance or params.uniformity):
            return None
        variance = params.variance * variance_term(torch.softmax(outputs.logits, dim=1))
        return variance + params.uniformity * uniformity_term(outputs.features) if params.uniformity else variance
