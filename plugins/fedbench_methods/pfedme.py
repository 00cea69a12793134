"""pFedMe - Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020 (Algorithm 1).

The global model w minimises Moreau envelopes of the clients' losses, min_θ F_k(θ) + (λ/2) ‖θ − w‖², whose gradient is
λ (w − θ_k(w)); θ_k is the client's own model. In every local step, on one batch:
    θ ← θ − η_p (∇F_k(θ) + λ (θ − w)),   K times
    w ← w − η λ (w − θ)                                                                     (by the run's optimiser)
The server moves by a share of the mean:  w ← (1 − β) w + β Σ_k p_k w_k.

Wraps: local_gradients, aggregate, evaluate. So θ is whatever a stack trains, and F_k the stack's loss at θ. Stacks with
any method but another personalisation; what corrects the drift of the global model has no part in θ, and so none in w.
Clients train one by one, since θ goes on from step to step.
θ starts a round at the received w and each later step where the last one ended, as in released code, where θ has a
decay μ of its own too, which is left out here. The θ of a client's last step is its own model, with the running
statistics at its end; it is kept where the update was lost. One that has not taken part has the global model.
Left open / contradicted: η_p is 0.01 here, and 0.09 by default in the released main.py. The server's mean is the run's
own (n_k by default; `weighting=uniform` is the paper's).
With the paper's η = 0.005 w moves by 0.075 of its way to θ in a step: the run's rate can be larger than for FedAvg.
Cost: K times the local computation, no byte more; one copy of the weights a client, saved with the run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import fedbench.api as fb
from fedbench.toolkit.wrapping import (
    Aggregate,
    Aggregated,
    Evaluate,
    Gradients,
    of_own,
    own_predictions,
    own_step,
    weights_of,
    with_weights,
)

WEIGHTS, BUFFERS = "weights/", "buffers/"


@dataclass(frozen=True, kw_only=True)
class PFedMeParams:
    """Hyper-parameters of pFedMe."""

    pull: float = fb.hyper(15.0, symbol="λ", low=0.1, high=100.0, log=True, search=(1.0, 50.0), source="paper: 15")
    inner_lr: float = fb.hyper(
        0.01, symbol="η_p", low=1e-5, high=1.0, log=True, search=(1e-3, 0.1), source="set here; main.py: 0.09"
    )
    inner_steps: int = fb.hyper(5, symbol="K", low=1, high=50, search=(1, 10), source="paper: 5")
    beta: float = fb.hyper(1.0, symbol="β", low=0.01, high=4.0, search=False, source="paper: 1, it tries up to 4")


def approached(theta: Tensor, gradient: Tensor, centre: Tensor, lr: float, pull: float) -> Tensor:
    """θ − η_p (∇F(θ) + λ (θ − w)), all of one shape."""
    return theta - lr * (gradient + pull * (theta - centre))


class PFedMe(fb.Method[PFedMeParams]):
    """Own models solve a proximal problem around the global one, which follows them."""

    name = "pfedme"
    citation = "Dinh, Tran, Nguyen, Personalized FL with Moreau Envelopes, NeurIPS 2020"
    role = "personalisation"
    keeps_lost_training = True
    prevents = ("plain_steps", "sent_start", "sent_steps")

    @fb.wrapper
    def local_gradients(self, step: fb.LocalStep, rest: Gradients) -> fb.StepGradients:
        """λ (w − θ) after K steps of θ, which the client keeps."""
        params, factors = self.params, step.model.lr_factors
        centre = {name: value.detach() for name, value in step.weights.items()}
        kept = step.task.state.get(self.name, {})
        theta = of_own(kept, WEIGHTS) if step.number else centre
        for _ in range(params.inner_steps):
            leaves = {name: value.clone().requires_grad_() for name, value in theta.items()}
            found = rest(own_step(step, leaves, step.buffers))
            theta = {
                name: approached(
                    value,
                    found.by_name.get(name, torch.zeros_like(value)),
                    centre[name],
                    params.inner_lr * factors.get(name, 1.0),
                    params.pull,
                )
                for name, value in theta.items()
            }
        step.task.state[self.name] = {
            **{WEIGHTS + name: value for name, value in theta.items()},
            **{BUFFERS + name: value.clone() for name, value in step.buffers.items()},
        }
        return fb.StepGradients({n: params.pull * (w - theta[n]) for n, w in centre.items()}, found.loss)

    @fb.wrapper
    def aggregate(self, task: fb.AggregationTask, rest: Aggregate) -> Aggregated:
        """(1 − β) w + β times the stack's mean; the mean itself, to the bit, at β = 1."""
        answer = rest(task)
        means = weights_of(answer)
        return with_weights(answer, {n: torch.lerp(w, means[n], self.params.beta) for n, w in task.weights.items()})

    @fb.wrapper
    def evaluate(self, task: fb.EvaluationTask, rest: Evaluate) -> fb.Predictions:
        """The global model w; own models by θ."""

        def own(client: int) -> tuple[fb.Tensors, fb.Tensors]:
            kept = task.client_state.get(client, {}).get(self.name)
            return (task.weights, task.buffers) if kept is None else (of_own(kept, WEIGHTS), of_own(kept, BUFFERS))

        return own_predictions(task, rest, own)
