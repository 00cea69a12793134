"""APFL - Deng, Kamani, Mahdavi, "Adaptive Personalized Federated Learning", arXiv 2003.13461, 2020 (Algorithm 1).

Client k keeps a model v_k beside the global one and predicts by a mixture of both, with a share α_k of its own:
    v̄_k = α_k v_k + (1 − α_k) w,     w ← w − η ∇F_k(w),     v_k ← v_k − η ∇_v F_k(v̄_k)
    α_k ← clip(α_k − η ∂F_k(v̄_k)/∂α_k, 0, 1),     ∂F_k(v̄_k)/∂α_k = ⟨v_k − w, ∇F_k(v̄_k)⟩
w is averaged as under FedAvg; v_k and α_k stay. The gradient in v is α_k ∇F_k(v̄_k), and w is a constant in v̄_k.

Wraps: build_model (a private copy of what the stack trains), local_objective (the stack's loss at w and at v̄_k),
evaluate. So the mixture is of whatever the stack trains. Answers: private, after_training (α_k moves). Stacks with any
method but another personalisation; what corrects the drift of the global model leaves v̄_k alone. One optimiser takes
the steps of w and v_k on the same batches.
α_k moves once a round by plain SGD at the round's rate η and is clipped, as in the authors' code: by the round's first
batch, at the models that the round began with. Neither momentum, decay nor `clip_norm` acts on it.
`alpha_moves=step` is the other form, Algorithm 1's every step: α_k is a weight of the run's optimiser, with its
momentum and decay. It is not clipped where it is kept: outside [0, 1] it counts as the nearest bound, and can run far.
Left open / contradicted: in the authors' code the new α_k holds from the round's second step on, here from its end. It
adds 0.02 α to the gradient of α: not here. PFLlib steps v by the gradient at v instead of v̄ and overwrites v by the
mixture in every round: not here. `adaptive=false` keeps α as it starts. α_k = 0 is FedAvg's global model and 1 a model
trained alone; a client that was not sampled keeps v_k, at first x⁰, under the new w.
Cost: twice the local computation, and one more batch a round; no byte more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

import fedbench.api as fb
from fedbench.toolkit.local_training import batch_at, batches_of, learning_rate, step_loss
from fedbench.toolkit.wrapping import (
    Build,
    Evaluate,
    Objective,
    beside,
    global_step,
    of_own,
    own_predictions,
    own_step,
    tried,
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
    alpha_moves: Literal["round", "step"] = fb.hyper(
        "round", symbol="α_k ←", source="round: released code, clipped; step: Algorithm 1, by the run's optimiser"
    )


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
        """What the stack trains, twice, and α where it moves every step."""
        model = with_own(rest(setup), OWN)
        is_weight = self.params.adaptive and self.params.alpha_moves == "step"
        return beside(model, {SHARE: torch.tensor(self.params.alpha)}) if is_weight else model

    @fb.hookimpl
    def private(self, model: fb.Model, spec: fb.RunSpec) -> Collection[str]:
        """v_k, and α_k where it is a weight."""
        return [name for name in (*model.weights, *model.buffers) if name.startswith((OWN, SHARE))]

    @fb.wrapper
    def local_objective(self, step: fb.LocalStep, rest: Objective) -> Tensor:
        """F_k(w), with the gradients of F_k(v̄_k) in v and α besides: those of the three steps."""
        received = {name: value.detach() for name, value in without_own(step.weights, step.model).items()}
        mixture = mixed(of_own(step.weights, OWN), received, self._alpha(step.weights, step.task.state.get(self.name)))
        loss = rest(global_step(step))
        return loss + without_value(rest(own_step(step, mixture, of_own(step.buffers, OWN))))

    @fb.hookimpl
    def after_training(self, task: fb.ClientTask, update: fb.Update) -> None:
        """α_k ← clip(α_k − η ∂F_k(v̄_k)/∂α_k, 0, 1), once a round."""
        if not self.params.adaptive or self.params.alpha_moves == "step" or not of_own(task.received, OWN):
            return
        alpha = self._alpha(task.received, task.state.get(self.name)).detach().clone().requires_grad_()
        began = replace(task, state={**task.state, self.name: {SHARE: alpha}})
        batch = batch_at(task, batches_of(task)[0], task.generator("augmentation"))
        loss = step_loss(tried(fb.LocalStep(task.received, task.buffers, batch, began, 0)))
        [slope] = torch.autograd.grad(loss, [alpha])
        moved = alpha.detach() - learning_rate(task.training, task.round) * slope
        task.state[self.name] = {SHARE: moved.clamp(0, 1)}

    @fb.wrapper
    def evaluate(self, task: fb.EvaluationTask, rest: Evaluate) -> fb.Predictions:
        """The global model as without it; own models by v̄_k."""

        def own(client: int) -> tuple[fb.Tensors, fb.Tensors]:
            weights, buffers = task.own_model(client)
            kept = of_own(weights, OWN)
            alpha = self._alpha(weights, task.client_state.get(client, {}).get(self.name))
            return mixed(kept, weights, alpha), of_own(buffers, OWN)

        return own_predictions(task, rest, own)

    def _alpha(self, weights: fb.Tensors, kept: Mapping[str, Tensor] | None) -> Tensor:
        """α_k as a weight, as the client has ``kept`` it, or as it starts."""
        if SHARE in weights:
            return bounded(weights[SHARE])
        return kept[SHARE] if kept else next(iter(weights.values())).new_tensor(self.params.alpha)
