"""FedNTD - Lee, Jeong, Shin, Bae, Yun, "Preservation of the Global Knowledge by Not-True Distillation in Federated
Learning", NeurIPS 2022; arXiv 2106.03097.

A client keeps what the received model thinks of the classes that are *not* true: with o the local and o^g the received
logits, and o_{-y} the C-1 of them left when the true class y is deleted,
    q̃ = softmax(o_{-y} / τ),   q̃^g = softmax(o^g_{-y} / τ)
    L_NTD = (1/B) Σ_i τ² KL(q̃^g_i ‖ q̃_i),     L = L_CE + β L_NTD

Answers: loss_terms. Stacks with any method that does not replace local_train. Nothing is sent beyond FedAvg's weights.
Left open / contradicted: the released class defaults to τ = 3, the released configuration runs τ = 1: the default here,
since it is what that code trains with (β = 1 in both). The factor τ², which keeps the gradient's size when τ changes,
is the released code's. Its first client of a round keeps the received model in train mode, later ones in eval mode, an
accident of order that matters with batch-norm or dropout only: here always eval mode. With two classes one logit is
left, and the term is zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from fedbench.api import LocalStep, Method, hookimpl, hyper


@dataclass(frozen=True, kw_only=True)
class FedNtdParams:
    """Hyper-parameters of FedNTD."""

    beta: float = hyper(
        1.0, symbol="β", low=0.1, high=10.0, log=True, neutral=0.0, source="released configuration and class default"
    )
    tau: float = hyper(
        1.0,
        symbol="τ",
        low=0.5,
        high=10.0,
        log=True,
        needs="beta",
        source="released configuration; its class defaults to 3",
    )


def not_true(logits: Tensor, labels: Tensor) -> Tensor:
    """o_{-y}: ``logits`` (batch, C) without the column of each row's own label (batch,), shape (batch, C - 1)."""
    rest = torch.arange(logits.shape[1] - 1, device=logits.device)
    # columns below the label keep their number, those from the label on move up by one
    return logits.gather(1, rest + (rest >= labels[:, None]).long())


def not_true_distillation(logits: Tensor, received: Tensor, labels: Tensor, tau: float) -> Tensor:
    """L_NTD = τ² KL(q̃^g ‖ q̃), the mean over the batch; ``logits`` o and ``received`` o^g are (batch, C)."""
    ours = log_softmax(not_true(logits, labels) / tau, dim=1)
    theirs = log_softmax(not_true(received, labels) / tau, dim=1)
    return tau**2 * (theirs.exp() * (theirs - ours)).sum(dim=1).mean()


class FedNTD(Method[FedNtdParams]):
    """Distils the received model's view of the classes that are not true."""

    name = "fedntd"
    citation = "Lee et al., Preservation of the Global Knowledge by Not-True Distillation, NeurIPS 2022"
    requires = ("labels",)

    @hookimpl
    def loss_terms(self, step: LocalStep) -> Tensor:
        """β L_NTD between the received model's logits and the current ones."""
        term = not_true_distillation(step.outputs.logits, step.received_outputs.logits, step.labels, self.params.tau)
        return self.params.beta * term
