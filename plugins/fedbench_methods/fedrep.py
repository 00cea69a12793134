"""FedRep - Collins, Hassani, Mokhtari, Shakkottai, "Exploiting Shared Representations for Personalized Federated
Learning", ICML 2021 (Algorithm 1).

Clients share a representation φ (the body) and keep a head h_k each. In a round client k trains its head first, for
τ_h steps on the φ that it received, and then φ under that head:
    h_k ← h_k − η ∇_h F_k(φ, h_k),   τ_h times;      φ_k ← φ_k − η ∇_φ F_k(φ_k, h_k);      φ ← Σ_k (n_k / Σ_j n_j) φ_k

Wraps: build_model, local_objective (what is not trained is a constant), evaluate. Answers: private. Stacks with any
method but another personalisation. What is frozen is left alone by momentum and decay. The head is the model's linear
one, or its last layers by the names of the weights; of a learner that trains one prompt the last context vectors. A
linear head on frozen features has no body, and is refused.
Left open / contradicted: the paper's experiments take ten epochs of the head and one of the body (its analysis one step
of it); the released code 5 to 11 epochs in all, of which the last is the body's. Here the run's local steps are as many
as for every other method, and the last `body_share` of them are the body's: one epoch of five, by default. Either part
has one step at least; a client with a single step takes it for both. Running statistics of the body move in all steps.
In the columns of a global model it is φ with the initial head, as for a client that has not taken part. h_k stays as
trained where the update was lost.
Cost: FedAvg's bytes without those of the head. How many steps a client takes is its own: clients train one by one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor

import fedbench.api as fb
from fedbench.toolkit.layers import two_parts, vectors_apart
from fedbench.toolkit.local_training import local_steps
from fedbench.toolkit.wrapping import Build, Evaluate, Objective, frozen, own_predictions


@dataclass(frozen=True, kw_only=True)
class FedRepParams:
    """Hyper-parameters of FedRep."""

    body_share: float = fb.hyper(
        0.2,
        symbol="1 / (1 + τ_h)",
        low=0.01,
        high=0.99,
        search=(0.05, 0.5),
        source="released code: 1 epoch of 5",
    )
    layers: int = fb.hyper(1, symbol="h", low=1, high=100, search=False, source="the paper's head is the last layer")
    private_share: float = fb.hyper(0.5, symbol="m / M", low=0.01, high=0.99, search=(0.1, 0.9), source="ours")


def head_steps(steps: int, body_share: float) -> int:
    """τ_h of a client's ``steps``; of one step alone none, since it is both parts'."""
    return steps - max(round(body_share * steps), 1) or min(steps - 1, 1)


class FedRep(fb.Method[FedRepParams]):
    """Clients train a head of their own, then the shared body under it."""

    name = "fedrep"
    citation = "Collins et al., Exploiting Shared Representations for Personalized FL, ICML 2021"
    keeps_lost_training = True
    prevents = ("plain_steps",)

    @fb.wrapper
    def build_model(self, setup: fb.ModelSetup, rest: Build) -> fb.Model:
        """What the stack trains; the vectors of a prompt in two tensors."""
        return vectors_apart(rest(setup), self.params.private_share, self.name)

    @fb.hookimpl
    def private(self, model: fb.Model, spec: fb.RunSpec) -> Collection[str]:
        """The head."""
        return two_parts(model, self.params.layers, self.name)[1]

    @fb.wrapper
    def local_objective(self, step: fb.LocalStep, rest: Objective) -> Tensor:
        """The stack's loss, of the head in the first τ_h steps and of the body in the others."""
        steps = local_steps(step.task)
        if steps == 1:
            return rest(step)
        body, head = two_parts(step.model, self.params.layers, self.name)
        return rest(frozen(step, body if step.number < head_steps(steps, self.params.body_share) else head))

    @fb.wrapper
    def evaluate(self, task: fb.EvaluationTask, rest: Evaluate) -> fb.Predictions:
        """The body with each client's own head; globally with the initial one."""
        return own_predictions(task, rest, task.own_model)
