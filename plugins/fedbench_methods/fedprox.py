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

from torch import Tensor

from fedbench.api import LocalStep, Method, hookimpl, hyper
from fedbench.toolkit.losses import proximal_term, unsquared_term


@dataclass(frozen=True, kw_only=True)
class FedProxParams:
    """Hyper-parameters of FedProx."""

    mu: float = hyper(
        0.01, symbol="μ", low=1e-4, high=1.0, log=True, neutral=0.0, source="Eq. 2; the paper tries 0.001 to 1"
    )
    form: Literal["squared", "sqrt"] = hyper(
        "squared", symbol="form", source="Eq. 2; sqrt as in the FedCLIP authors' baseline"
    )


class FedProx(Method[FedProxParams]):
    """Adds (μ/2)‖w − wᵗ‖² to every local loss."""

    name = "fedprox"
    citation = "Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020"
    requires = ("sent_steps",)

    @hookimpl
    def loss_terms(self, step: LocalStep) -> Tensor | None:
        """The proximal term (Eq. 2); none for a model that the client keeps."""
        if step.is_own:
            return None
        term = proximal_term if self.params.form == "squared" else unsquared_term
        return term(step.weights, step.received, self.params.mu)
