"""FedPer - Arivazhagan, Aggarwal, Singh, Choudhary, "Federated Learning with Personalization Layers", arXiv 1912.00818,
2019.

A network is base layers W_B, which all clients share, and K_P last layers of each client's own, W_P,k. Both take every
step together:
    (W_B, W_P,k) ← (W_B, W_P,k) − η ∇ F_k(W_B, W_P,k),      W_B ← Σ_k (n_k / Σ_j n_j) W_B,k,      W_P,k stays

Wraps: build_model, evaluate. Answers: private. Stacks with any method but another personalisation. With a linear head
the last layer is the head; else layers are told apart by the names of their weights, in the model's order. A learner
that trains one prompt has no layers: of its M context vectors the last are private, which is the "PromptFL + FedPer" of
the papers on federated prompts (`private_share` is not stated there). A linear head on frozen features would leave
nothing to share, and is refused. Running statistics stay with the layers that they are of.
Left open / contradicted: the paper has no global model. In the columns of one it is W_B with the initial W_P, and so is
the model of a client that has not taken part. W_P,k stays as trained where the update was lost.
Cost: FedAvg's bytes without those of W_P.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import fedbench.api as fb
from fedbench.toolkit.layers import two_parts, vectors_apart
from fedbench.toolkit.wrapping import Build, Evaluate, own_predictions


@dataclass(frozen=True, kw_only=True)
class FedPerParams:
    """Hyper-parameters of FedPer."""

    layers: int = fb.hyper(1, symbol="K_P", low=1, high=100, search=False, source="the paper tries 1 to 4")
    private_share: float = fb.hyper(0.5, symbol="m / M", low=0.01, high=0.99, search=(0.1, 0.9), source="ours")


class FedPer(fb.Method[FedPerParams]):
    """The last layers stay with the clients."""

    name = "fedper"
    citation = "Arivazhagan et al., Federated Learning with Personalization Layers, arXiv 1912.00818, 2019"
    keeps_lost_training = True

    @fb.wrapper
    def build_model(self, setup: fb.ModelSetup, rest: Build) -> fb.Model:
        """What the stack trains; the vectors of a prompt in two tensors."""
        return vectors_apart(rest(setup), self.params.private_share, self.name)

    @fb.hookimpl
    def private(self, model: fb.Model, spec: fb.RunSpec) -> Collection[str]:
        """W_P: the last K_P layers, or a prompt's last vectors."""
        return two_parts(model, self.params.layers, self.name)[1]

    @fb.wrapper
    def evaluate(self, task: fb.EvaluationTask, rest: Evaluate) -> fb.Predictions:
        """The shared layers with each client's own; globally with the initial ones."""
        return own_predictions(task, rest, task.own_model)
