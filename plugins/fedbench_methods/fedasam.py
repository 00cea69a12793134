"""FedASAM - Caldarola, Caputo, Ciccone, "Improving Generalization in Federated Learning by Seeking Flat Minima",
ECCV 2022, with the step of Kwon et al., "ASAM", ICML 2021.

`fedsam`, whose neighbourhood is scaled by the weights, so that it does not depend on their size:
    g = ∇F_k(w),    e = ρ T² g / ‖T g‖,    T = |w| + η_T for weights, 1 for biases,    w ← w − η ∇F_k(w + e)

Wraps: local_gradients; stacks and costs as `fedsam` does. ρ = 0 is FedAvg bit for bit.
Left open: the released code scales tensors with "weight" in their names. Here all but biases are scaled, which on a
network is the same, and prompts and low-rank factors, whose names are others, are scaled as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedbench.api import LocalStep, Method, StepGradients, Tensors, hyper, wrapper
from fedbench.toolkit.wrapping import Gradients
from fedbench_methods.shared.ascent import both


@dataclass(frozen=True, kw_only=True)
class FedASAMParams:
    """Hyper-parameters of FedASAM."""

    rho: float = hyper(
        0.7,
        symbol="ρ",
        low=1e-4,
        high=10.0,
        log=True,
        neutral=0.0,
        search=(0.05, 2.0),
        source="released code, CIFAR-10",
    )
    eta: float = hyper(
        0.2, symbol="η_T", low=0.0, high=1.0, search=False, needs="rho", source="released code, CIFAR-10"
    )


def scales(weights: Tensors, eta: float) -> Tensors:
    """T = |w| + η_T of all weights but biases, by name; a bias is left out, where T is 1."""
    return {name: w.detach().abs() + eta for name, w in weights.items() if not name.endswith("bias")}


class FedASAM(Method[FedASAMParams]):
    """Sharpness-aware local steps in a neighbourhood scaled by the weights."""

    name = "fedasam"
    citation = "Caldarola, Caputo, Ciccone, Improving Generalization by Seeking Flat Minima, ECCV 2022"
    requires = ("own_ascent",)
    prevents = ("own_ascent",)

    @wrapper
    def local_gradients(self, step: LocalStep, rest: Gradients) -> StepGradients:
        """The gradients at w + e."""
        if not self.params.rho:
            return rest(step)
        first, second = both(step, rest, self.params.rho, scales(step.weights, self.params.eta))
        return replace(second, loss=first.loss)
