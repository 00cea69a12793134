"""FedSAM - Qu, Li, Duan, Liu, Tang, Lu, "Generalized Federated Learning via Sharpness Aware Minimization", ICML 2022;
Caldarola, Caputo, Ciccone, "Improving Generalization in Federated Learning by Seeking Flat Minima", ECCV 2022.

Clients step by the gradient at the worst of the weights nearby, of the same batch:
    g = ∇F_k(w),    e = ρ g / ‖g‖,    w ← w − η ∇F_k(w + e)         (the norm over all weights of the model)

Wraps: local_gradients. Stacks with any learner, local objective and server; all terms of the stack's loss are in both
gradients. A model that a client keeps beside the global one (`ditto`) climbs by a norm of its own. Clients train one
after another. A stack climbs once: `fedasam` and `fedspeed` are refused beside it. ρ = 0 is FedAvg bit for bit.
Cost: twice the local computation, no byte more.
Left open / contradicted: both passes of the released code move running statistics unless told otherwise; here the
second alone does, and so does what a loss keeps from step to step. The recorded loss is that at w, comparable with
other methods'. The server's weight averaging of the ECCV paper is not part of this.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedbench.api import LocalStep, Method, StepGradients, hyper, wrapper
from fedbench.toolkit.wrapping import Gradients
from fedbench_methods.shared.ascent import both


@dataclass(frozen=True, kw_only=True)
class FedSAMParams:
    """Hyper-parameters of FedSAM."""

    rho: float = hyper(
        0.1,
        symbol="ρ",
        low=1e-4,
        high=10.0,
        log=True,
        neutral=0.0,
        search=(0.01, 1.0),
        source="ECCV paper's code, CIFAR-10",
    )


class FedSAM(Method[FedSAMParams]):
    """Sharpness-aware local steps."""

    name = "fedsam"
    citation = "Qu et al., Generalized Federated Learning via Sharpness Aware Minimization, ICML 2022"
    requires = ("own_ascent",)
    prevents = ("own_ascent",)

    @wrapper
    def local_gradients(self, step: LocalStep, rest: Gradients) -> StepGradients:
        """The gradients at w + e."""
        if not self.params.rho:
            return rest(step)
        first, second = both(step, rest, self.params.rho)
        return replace(second, loss=first.loss)
