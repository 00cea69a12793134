"""LG-FedAvg - Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, "Think Locally, Act Globally:
Federated Learning with Local and Global Representations", arXiv 2001.01523, 2020.

Every client keeps the layers ℓ_k that represent its data, and shares the last ones g, which classify:
    (ℓ_k, g) ← (ℓ_k, g) − η ∇ F_k(ℓ_k, g),      g ← Σ_k (n_k / Σ_j n_j) g_k,      ℓ_k stays
The reverse of FedPer, and of fewer bytes.

Wraps: build_model, evaluate. Answers: private. Stacks with any method but another personalisation. g is the model's
linear head, or its last layer by the names of the weights, in the model's order; of a learner that trains one prompt
the first context vectors are private and the last are shared. A linear head on frozen features leaves nothing to keep,
and is refused. Running statistics stay with the layers that they are of.
Left open / contradicted: FL-bench's LG-FedAvg shares the first layer and keeps the others. The paper starts from a
model trained by FedAvg and scores new data by the mean of all clients' predictions; here all start from one random
model, and in the columns of a global model it is g with the initial ℓ, as it is for a client that has not taken part.
ℓ_k stays as trained where the update was lost.
Cost: the bytes of g alone.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import fedbench.api as fb
from fedbench.toolkit.layers import two_parts, vectors_apart
from fedbench.toolkit.wrapping import Build, Evaluate, own_predictions


@dataclass(frozen=True, kw_only=True)
class LgFedAvgParams:
    """Hyper-parameters of LG-FedAvg."""

    layers: int = fb.hyper(1, symbol="g", low=1, high=100, search=False, source="the head, as in PFLlib")
    private_share: float = fb.hyper(0.5, symbol="m / M", low=0.01, high=0.99, search=(0.1, 0.9), source="ours")


class LgFedAvg(fb.Method[LgFedAvgParams]):
    """All but the last layers stay with the clients."""

    name = "lg-fedavg"
    citation = "Liang et al., Think Locally, Act Globally, arXiv 2001.01523, 2020"
    keeps_lost_training = True

    @fb.wrapper
    def build_model(self, setup: fb.ModelSetup, rest: Build) -> fb.Model:
        """What the stack trains; the vectors of a prompt in two tensors."""
        return vectors_apart(rest(setup), 1 - self.params.private_share, self.name)

    @fb.hookimpl
    def private(self, model: fb.Model, spec: fb.RunSpec) -> Collection[str]:
        """ℓ: all before the last layers, or a prompt's first vectors."""
        return two_parts(model, self.params.layers, self.name)[0]

    @fb.wrapper
    def evaluate(self, task: fb.EvaluationTask, rest: Evaluate) -> fb.Predictions:
        """The shared layers with each client's own; globally with the initial ones."""
        return own_predictions(task, rest, task.own_model)
