"""FedRS - Li and Zhan, "FedRS: Federated Learning with Restricted Softmax for Label Distribution Non-IID Data", KDD
2021.

A client without samples of a class only ever pushes that class's weights away. Its logits of such classes are made
smaller in training, so that they move less:
    p_c = exp(α_c o_c) / Σ_j exp(α_j o_j),     α_c = 1 for a class that the client has, α for one that it lacks

Wraps: local_objective (the stack's loss on the logits α_c o_c, in training alone). Stacks with any method; a model that
another method lets a client keep, and a loss that does not read logits (that of `fedclip`), are left alone. Predictions
use o. α = 1 is FedAvg.
Left open / contradicted: released code has α_c = α + (1 − α) n_c / max_j n_j, with n_c the client's samples
(`form=counts`): every class but the largest is restricted. It leaves the bias out of o, which is in it here. A logit
below zero is raised by α_c, not lowered; cosines to texts, all of one sign, are not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

import fedbench.api as fb
from fedbench.toolkit.wrapping import Objective, with_outputs


@dataclass(frozen=True, kw_only=True)
class FedRsParams:
    """Hyper-parameters of FedRS."""

    alpha: float = fb.hyper(
        0.5, symbol="α", low=0.0, high=1.0, neutral=1.0, search=(0.1, 0.95), source="paper and released code: 0.5"
    )
    form: Literal["missing", "counts"] = fb.hyper("missing", symbol="α_c", source="paper; counts: released code")


def factors(counts: Tensor, alpha: float, form: str) -> Tensor:
    """α_c, (C,), from the client's ``counts`` n (C,) by class."""
    if form == "counts":
        return alpha + (1 - alpha) * counts.float() / counts.max()
    return torch.where(counts > 0, 1.0, alpha)


class FedRS(fb.Method[FedRsParams]):
    """Logits of the classes that a client lacks are restricted."""

    name = "fedrs"
    citation = "Li and Zhan, FedRS: FL with Restricted Softmax for Label Distribution Non-IID Data, KDD 2021"
    requires = ("labels", "sent_steps")

    @fb.wrapper
    def local_objective(self, step: fb.LocalStep, rest: Objective) -> Tensor:
        """The stack's loss of the restricted logits."""
        if step.is_own or self.params.alpha == 1:
            return rest(step)
        scale = factors(step.task.visible_counts, self.params.alpha, self.params.form)
        return rest(with_outputs(step, lambda outputs: replace(outputs, logits=outputs.logits * scale)))
