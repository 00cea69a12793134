"""Ditto - Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021
(Algorithm 1).

The global model x is trained as without it. Client k keeps a model v_k beside it, held near what it received:
    v_k ← v_k − η ∇ (F_k(v_k) + (λ/2) ‖v_k − x^t‖²)                                              (Eq. 1, over v)
Both take the same batches, with an optimiser each: their weights share nothing.

Wraps: build_model (a private copy of what the stack trains), local_objective (the stack's loss at both), evaluate. So
v_k is whatever the stack trains: a head, a prompt, an adapter, low-rank additions, a whole network. Answers: private.
Stacks with any method but another personalisation; what corrects the drift of the global model leaves v_k alone.
λ = 0: every client trains alone, beside the global model. The copy is never sent.
Left open / contradicted: the paper's solver draws batches of its own for v_k; it chooses λ of 0.05, 0.1, 0.2 (1 and 2
elsewhere) for every client on its validation data; here one λ serves all. The pull is to x^t as received, squared: some
released code pulls to the weights just trained. A client that was not sampled keeps its v_k, at first x⁰.
Cost: twice the local computation, no byte more.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor

import fedbench.api as fb
from fedbench.toolkit.losses import proximal_term
from fedbench.toolkit.wrapping import (
    Build,
    Evaluate,
    Objective,
    global_step,
    of_own,
    own_predictions,
    own_step,
    with_own,
    without_value,
)

OWN = "ditto/"


@dataclass(frozen=True, kw_only=True)
class DittoParams:
    """Hyper-parameters of Ditto."""

    pull: float = fb.hyper(
        0.1, symbol="λ", low=1e-3, high=10.0, log=True, off=0.0, search=(0.01, 2.0), source="the paper tries 0.05 to 2"
    )


class Ditto(fb.Method[DittoParams]):
    """A model of each client's own, held near the global one."""

    name = "ditto"
    citation = "Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021"
    keeps_lost_training = True
    requires = ("sent_steps",)

    @fb.wrapper
    def build_model(self, setup: fb.ModelSetup, rest: Build) -> fb.Model:
        """What the stack trains, twice."""
        return with_own(rest(setup), OWN)

    @fb.hookimpl
    def private(self, model: fb.Model, spec: fb.RunSpec) -> Collection[str]:
        """The copy v_k."""
        return [name for name in (*model.weights, *model.buffers) if name.startswith(OWN)]

    @fb.wrapper
    def local_objective(self, step: fb.LocalStep, rest: Objective) -> Tensor:
        """F_k(x), with the gradients of F_k(v_k) + (λ/2)‖v_k − x^t‖² besides, which has other weights."""
        own, loss = of_own(step.weights, OWN), rest(global_step(step))
        beside = rest(own_step(step, own, of_own(step.buffers, OWN)))
        if self.params.pull:
            beside = beside + proximal_term(own, step.received, self.params.pull)
        return loss + without_value(beside)

    @fb.wrapper
    def evaluate(self, task: fb.EvaluationTask, rest: Evaluate) -> fb.Predictions:
        """The global model as without it; own models by v_k."""

        def own(client: int) -> tuple[fb.Tensors, fb.Tensors]:
            weights, buffers = task.own_model(client)
            return of_own(weights, OWN), of_own(buffers, OWN)

        return own_predictions(task, rest, own)
