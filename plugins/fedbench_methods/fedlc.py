"""FedLC - Zhang, Li, Li, Xu, Wu, Ding, Wu, "Federated Learning with Label Distribution Skew via Logits Calibration",
ICML 2022.

With n_c the client's own samples of class c and o its logits, every local step trains on calibrated logits
    a_c = o_c − τ n_c^{−1/4}
    l = −log [exp(a_y) / Σ_c exp(a_c)],   the mean over the batch
so that classes a client has few of need a larger margin. Predictions use o, as under FedAvg.

Answers: local_loss. Stacks with methods that add loss terms or aggregate otherwise. Nothing is sent beyond FedAvg's
weights.
Paper against code: the paper's sum leaves the positive out (c ≠ y). Logits being unbounded, so is that loss from below,
and training with it was reported to collapse (issue 5 of the public re-implementation FL-bench, which then kept the
positive in; the authors released no code). Default: kept; `denominator=exclude` is the formula as printed.
Left open: a class without samples. Its n_c is taken as 1e-8, as in FL-bench, which lowers its logit by 100 τ: it leaves
the denominator and its logit gets no gradient from this client. As printed, a client of one class alone has only such
terms in the sum, and does pull them down. τ is FL-bench's. τ = 0, or as many samples of every class, is cross-entropy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedbench.api import LocalStep, Method, hookimpl, hyper
from fedbench.toolkit.losses import mean_cross_entropy

FEWEST = 1e-8
"""What stands for n_c where a client has no sample of class c."""


@dataclass(frozen=True, kw_only=True)
class FedLcParams:
    """Hyper-parameters of FedLC."""

    tau: float = hyper(
        1.0,
        symbol="τ",
        low=0.01,
        high=10.0,
        log=True,
        neutral=0.0,
        source="FL-bench; 0 with y in the sum is FedAvg",
    )
    denominator: Literal["include", "exclude"] = hyper(
        "include", symbol="c ≠ y", source="FL-bench; exclude is the paper's formula"
    )


def calibrated(logits: Tensor, counts: Tensor, tau: float) -> Tensor:
    """a_c = o_c − τ n_c^{−1/4}, (batch, C), from ``logits`` o (batch, C) and the client's ``counts`` n (C,)."""
    return logits - tau * counts.float().clamp(min=FEWEST).pow(-0.25)


def left_out(logits: Tensor, labels: Tensor) -> Tensor:
    """−a_y + log Σ_{c≠y} exp(a_c), the mean over the batch: as printed, unbounded below."""
    positive = logits.gather(1, labels[:, None])
    others = logits.scatter(1, labels[:, None], -torch.inf)
    return (others.logsumexp(dim=1, keepdim=True) - positive).mean()


class FedLC(Method[FedLcParams]):
    """Calibrates logits by the client's class counts."""

    name = "fedlc"
    citation = "Zhang et al., Label Distribution Skew via Logits Calibration, ICML 2022"
    requires = ("labels",)

    @hookimpl
    def local_loss(self, step: LocalStep) -> Tensor:
        """Cross-entropy of the calibrated logits."""
        loss = mean_cross_entropy if self.params.denominator == "include" else left_out
        return loss(calibrated(step.outputs.logits, step.task.visible_counts, self.params.tau), step.labels)
