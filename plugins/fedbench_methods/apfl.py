"""APFL - Deng, Kamani, Mahdavi, "Adaptive Personalized Federated Learning", arXiv 2003.13461, 2020 (Algorithm 1).

Client k keeps a model v_k beside the global one and predicts by a mixture of both, with a share α_k of its own:
    v̄_k = α_k v_k + (1 − α_k) w
    w ← w − η ∇F_k(w),     v_k ← v_k − η ∇_v F_k(v̄_k),     α_k ← α_k − η ∂F_k(v̄_k)/∂α_k = α_k − η ⟨v_k − w, ∇F_k(v̄_k)⟩
w is averaged as under FedAvg; v_k and α_k stay. The gradient in v is α_k ∇F_k(v̄_k), and w is a constant in v̄_k.

Wraps: build_model (a private copy of what the stack trains, and α), local_objective (the stack's loss at w and at v̄_k),
evaluate. So the mixture is of whatever the stack trains. Answers: private. Stacks with any method but another
personalisation; what corrects the drift of the global model leaves v̄_k alone. One optimiser takes the three steps on
the same batches. α_k outside [0, 1] counts as the nearest bound, and goes on from where it is.
Left open / contradicted: PFLlib steps v by the gradient at v instead of v̄ and overwrites v by the mixture in every
round: not here. The authors' code adds 0.02 α to the gradient of α; here the run's decay acts on α as on any weight.
α falls or rises with momentum where the run has some. `adaptive=false` keeps α as it starts. α_k = 0 is FedAvg's global
model and 1 a model trained alone; a client that was not sampled keeps v_k, at first x⁰, under the new w.
Cost: twice the local computation, no byte more.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

import fedbench.api as fb
from fedbench.toolkit.wrapping import (
    Build,
    Evaluate,
    Objective,
    beside,
    global_step,
    of_own,
    own_predictions,
    own_step,
    with_own,
    without_own,
    without_value,
)

OWN, SHARE = "apfl/", "apfl share"


@dataclass(frozen=True, kw_only=True)
class ApflParams:
    """Hyper-parameters of APFL."""

    alpha: float = fb.hyper(0.5, symbol="α", low=0.0, high=1.0, search=(0.1, 0.9), source="released code: 0.5 at first")
    adaptive: bool = fb.hyper(True, symbol="α_k", source="Algorithm 1; false keeps α")


def bounded(alpha: Tensor) -> Tensor:
    """α as a share in [0, 1], with the gradient of α itself."""
    return alpha + (alpha.clamp(0, 1) - alpha).detach()


def mixed(own: fb.Tensors, shared: fb.Tensors, alpha: Tensor) -> fb.Tensors:
    """v̄ = α v + (1 − α) w by name, of tensors of one shape each; w itself, to the bit, where v = w or α = 0."""
    return {name: shared[name] + alpha * (value - shared[name]) for name, value in own.items()}


class APFL(fb.Method[ApflParams]):
    """Every client mixes a model of its own with the global one."""

    name = "apfl"
    citation = "Deng, Kamani, Mahdavi, Adaptive Personalized Federated Learning, arXiv 2003.13461, 2020"
    keeps_lost_training = True
    requires = ("sent_steps",)

    @fb.wrapper
    def build_model(self, setup: fb.ModelSetup, rest: Build) -> fb.Model:
        """What the stack trains, twice, and α."""
        model = with_own(rest(setup), OWN)
        return beside(model, {SHARE: torch.tensor(self.params.alpha)}) if self.params.adaptive else model

    @fb.hookimpl
    def private(self, model: fb.Model, spec: fb.RunSpec) -> Collection[str]:
        """v_k and α_k."""
        return [name for name in (*model.weights, *model.buffers) if name.startswith((OWN, SHARE))]

    @fb.wrapper
    def local_objective(self, step: fb.LocalStep, rest: Objective) -> Tensor:
        """F_k(w), with the gradients of F_k(v̄_k) in v and α besides: those of the three steps."""
        received = {name: value.detach() for name, value in without_own(step.weights, step.model).items()}
        mixture = mixed(of_own(step.weights, OWN), received, self._alpha(step.weights))
        loss = rest(global_step(step))
        return loss + without_value(rest(own_step(step, mixture, of_own(step.buffers, OWN))))

    @fb.wrapper
    def evaluate(self, task: fb.EvaluationTask, rest: Evaluate) -> fb.Predictions:
        """The global model as without it; own models by v̄_k."""

        def own(client: int) -> tuple[fb.Tensors, fb.Tensors]:
            weights, buffers = task.own_model(client)
            kept = of_own(weights, OWN)
            return mixed(kept, weights, self._alpha(weights)), of_own(buffers, OWN)

        return own_predictions(task, rest, own)

    def _alpha(self, weights: fb.Tensors) -> Tensor:
        return bounded(weights[SHARE]) if self.params.adaptive else torch.tensor(self.params.alpha)
