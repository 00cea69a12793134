"""FedDecorr - Shi, Liang, Zhang, Tan, Bai, "Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous
Federated Learning", ICLR 2023.

On skewed data the features of local models collapse to few directions. With K the correlations of the features' d
entries over the batch of N, from entries z brought to mean 0 and variance 1 (over N − 1):
    L = L_stack + β L_dec,     L_dec = (1/d²) ‖K‖²_F                                             (paper)
    L_dec = (1/N) mean_{i≠j} (Σ_n z_ni z_nj)²  =  ((N − 1)² / N) mean_{i≠j} K_ij²          (released code)

Answers: loss_terms. Stacks with any method; a model that another method lets a client keep has no term. Needs features
that are trained. β = 0 is FedAvg. Both forms pull alike but for their weight and the diagonal, which is constant.
Left open / contradicted: the code leaves out the division of the correlations by N − 1: its term is 62 times the mean
square of a correlation at N = 64, and rises with the batch. β = 0.1 goes with it, so it is the default (`form=code`).
A batch of one sample has no correlations and no term. The loss is over the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

import fedbench.api as fb

SMALLEST = 1e-8
"""Added to a variance, as in the released code."""


@dataclass(frozen=True, kw_only=True)
class FedDecorrParams:
    """Hyper-parameters of FedDecorr."""

    beta: float = fb.hyper(
        0.1, symbol="β", low=1e-3, high=10.0, log=True, neutral=0.0, search=(0.01, 1.0), source="paper: 0.1"
    )
    form: Literal["code", "paper"] = fb.hyper("code", symbol="L_dec", source="released code, with which β goes")


def standardised(features: Tensor) -> Tensor:
    """z (N, d): columns of ``features`` (N, d) with mean zero and variance one over N − 1."""
    centred = features - features.mean(dim=0)
    return centred / (features.var(dim=0) + SMALLEST).sqrt()


def decorrelation(features: Tensor, form: str) -> Tensor:
    """L_dec of ``features`` (N, d), a scalar; N and d of two or more."""
    count, width = features.shape
    z = standardised(features)
    squares = (z.T @ z).square()
    if form == "paper":
        return squares.sum() / ((count - 1) * width) ** 2
    return (squares.sum() - squares.diagonal().sum()) / (count * width * (width - 1))


class FedDecorr(fb.Method[FedDecorrParams]):
    """Features of a batch are decorrelated."""

    name = "feddecorr"
    citation = "Shi et al., Towards Understanding and Mitigating Dimensional Collapse, ICLR 2023"
    requires: tuple[str, ...] = ("trained_features", "sent_steps")

    def __init__(self, params: FedDecorrParams) -> None:
        super().__init__(params)
        if not params.beta:
            self.requires = ()

    @fb.hookimpl
    def loss_terms(self, step: fb.LocalStep) -> Tensor | None:
        """β L_dec; none for a model that the client keeps, nor of one sample."""
        if step.is_own or not self.params.beta or len(step.batch.inputs) == 1:
            return None
        return self.params.beta * decorrelation(step.outputs.features, self.params.form)
