"""FedProx - Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks",
MLSys 2020.

Each local step minimises  F_k(w) + (mu/2) ||w - w^t||^2   (Eq. 2), w^t the weights received in round t.

Answers: loss_terms. Stacks with any method that does not replace local_train.
Running statistics are no weights, so no term pulls them. Left open / contradicted:
- The authors' released solver has no momentum; here it is the run's.
- Some released baselines, the FedCLIP authors' too, use (mu/2) ||w - w^t||: `form=sqrt`. Default: the paper's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedbench.api import LocalStep, Method, Tensors, hookimpl, hyper
from fedbench.toolkit.losses import proximal_term, squared_distance


@dataclass(frozen=True, kw_only=True)
class FedProxParams:
    """Hyper-parameters of FedProx."""

    mu: float = hyper(
        0.01, symbol="μ", low=1e-4, high=1.0, log=True, neutral=0.0, source="Eq. 2; the paper tries 0.001 to 1"
    )
    form: Literal["squared", "sqrt"] = hyper(
        "squared", symbol="form", source="Eq. 2; sqrt as in the FedCLIP authors' baseline"
    )


def unsquared_term(weights: Tensors, received: Tensors, mu: float) -> Tensor:
    """(μ/2) ‖w − wᵗ‖; the gradient at w = wᵗ is taken as zero."""
    distance = squared_distance(weights, received)
    moved = distance > 0
    # the inner where keeps the derivative of the root finite at zero
    return 0.5 * mu * torch.where(moved, torch.where(moved, distance, 1.0).sqrt(), 0.0)


class FedProx(Method[FedProxParams]):
    """Adds (μ/2)‖w − wᵗ‖² to every local loss."""

    name = "fedprox"
    citation = "Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020"

    @hookimpl
    def loss_terms(self, step: LocalStep) -> Tensor | None:
        """The proximal term (Eq. 2); none for a model that the client keeps."""
        if step.is_own:
            return None
        term = proximal_term if self.params.form == "squared" else unsquared_term
        return term(step.weights, step.received, self.params.mu)
