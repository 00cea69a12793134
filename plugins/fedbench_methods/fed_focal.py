"""Fed-Focal Loss - Sarkar, Narang, Rai, "Fed-Focal Loss for imbalanced data classification in Federated Learning",
FL-IJCAI workshop 2020; arXiv 2011.06283. The loss is that of Lin et al., "Focal Loss for Dense Object Detection", 2017.

With p_i the model's probability of sample i's own class, every local step minimises
    L = −(1/B) Σ_i α (1 − p_i)^γ log p_i
so that samples which are already right count less: against cross-entropy the gradient of one of p = 0.9 is 0.029 at
γ = 2, of one of p = 0.5 it is 0.60. γ = 0 with α = 1 is cross-entropy.

Answers: local_loss. Stacks with methods that add loss terms or aggregate otherwise. Nothing is sent beyond FedAvg's
weights.
Left out: the abstract also speaks of tunable sampling, weights on the client models that the server selects. Its
equations were not available, so it is not here; the rows of this name in the tables of CReFF and CLIP2FL are, as far as
can be seen, the loss with FedAvg. No code of the authors was found. γ is that of public federated code (Fed-GraB's: 1).
α, one number for all classes as in that code, merely scales the learning rate; the 0.25 of the detector is for two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedbench.api import LocalStep, Method, hookimpl, hyper

SMALLEST = 1e-12
"""Of 1 − p, whose power below one would else have an infinite derivative where p rounds to one."""


@dataclass(frozen=True, kw_only=True)
class FedFocalParams:
    """Hyper-parameters of Fed-Focal."""

    gamma: float = hyper(
        2.0,
        symbol="γ",
        low=0.5,
        high=5.0,
        log=True,
        neutral=0.0,
        source="public federated code; 0 is FedAvg, where α = 1",
    )
    alpha: float = hyper(
        1.0, symbol="α", low=0.25, high=1.0, search=False, source="public federated code; 0.25 for two classes"
    )


def focal_loss(logits: Tensor, labels: Tensor, gamma: float, alpha: float) -> Tensor:
    """−α (1 − p)^γ log p, the mean over the batch, from ``logits`` (batch, C) and ``labels`` (batch,)."""
    likelihood = torch.log_softmax(logits, dim=1).gather(1, labels[:, None])
    missing = (-torch.expm1(likelihood)).clamp(min=SMALLEST)
    return -(alpha * missing.pow(gamma) * likelihood).mean()


class FedFocal(Method[FedFocalParams]):
    """FedAvg with the focal loss."""

    name = "fed-focal"
    citation = "Sarkar et al., Fed-Focal Loss for imbalanced data classification, arXiv 2011.06283, 2020"
    requires = ("labels",)

    @hookimpl
    def local_loss(self, step: LocalStep) -> Tensor:
        """The focal loss of the batch."""
        return focal_loss(step.outputs.logits, step.labels, self.params.gamma, self.params.alpha)
