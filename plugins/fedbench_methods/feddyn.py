"""FedDyn - Acar, Zhao, Matas, Mattina, Whatmough, Saligrama, "Federated Learning Based on Dynamic Regularization",
ICLR 2021 (Algorithm 1).

Every client's loss is tilted, so that a point where all clients stand still is a minimum of the global loss. With the
drift h_k, the sum of all changes of client k (0 at first),
    client:  min_w  F_k(w) + α ⟨w − x, h_k⟩ + (α/2) ‖w − x‖²,  from x, to y_k;    h_k ← h_k + y_k − x
    server:  x ← (1/m) Σ_{k∈S} y_k + (1/N) Σ_{all k} h_k
In the paper's terms −α h_k is the gradient ∇L_k that client k keeps, and −(α/N) Σ h_k the server's state h.

Wraps: broadcast, aggregate (whose answer takes the place of the mean of the y_k). Answers: start, loss_terms. Stacks
with any method but another server step or correction of drift. A model that a client keeps has no drift. Bytes are
FedAvg's: both sides work h_k out. h_k moves with the updates that the server accepts. No value of α gives FedAvg: at
α = 0 the server still adds the mean drift. Memory: one copy of the weights for every client, saved with the run.
Left open / contradicted:
- The released code has α_k = α / ω_k with ω_k = N n_k / Σ n (`scaling=samples`, four bytes down). Default: one α.
- It adds α to the weight decay, so that the pull passes through neither loss nor its record. Here it is a loss term.
- Widely used re-implementations lack the quadratic term: then nothing holds w near x but clipping.
- It clips gradients at a norm of 10, without which runs diverge late: the recipe. The run's `clip_norm` covers the
  pull too: it clips the gradient of F_k and of the pull together. Running statistics are averaged.
- The official tables report the mean of all clients' last models; here it is x.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

import fedbench.api as fb
from fedbench.toolkit.wrapping import Aggregate, Aggregated, Send, weights_of, with_weights
from fedbench_methods.shared import dynamic_regularisation as dynamic


@dataclass(frozen=True, kw_only=True)
class FedDynParams:
    """Hyper-parameters of FedDyn."""

    alpha: float = fb.hyper(
        0.01, symbol="α", low=1e-4, high=10.0, log=True, search=(1e-3, 0.1), source="the paper tries 0.001 to 0.1"
    )
    scaling: dynamic.Scaling = dynamic.scaling_field()
    weighting: dynamic.Weighting = dynamic.weighting_field()


class FedDyn(fb.Method[FedDynParams]):
    """Tilts every client's loss by the sum of its changes."""

    name = "feddyn"
    citation = "Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021"
    requires = ("global_model", "sent_start", "own_updates")
    recipe = {"clip_norm": 10.0}
    prevents = ("plain_steps",)

    @fb.hookimpl
    def start(self, task: fb.StartTask) -> None:
        """ω_k, with scaling=samples."""
        if self.params.scaling == "samples":
            task.state[self.name] = {dynamic.SHARE: dynamic.sizes_relative_to_the_mean(task)}

    @fb.wrapper
    def broadcast(self, task: fb.BroadcastTask, rest: Send) -> fb.Broadcast:
        """What the stack sends; the client holds h_k."""
        kept = task.state.get(self.name, {})
        answer = dynamic.with_drift(rest(task), task, kept)
        if dynamic.SHARE not in kept:
            return answer
        return replace(answer, payload={**answer.payload, dynamic.SHARE: kept[dynamic.SHARE][task.client]})

    @fb.hookimpl
    def loss_terms(self, step: fb.LocalStep) -> Tensor | None:
        """α_k (⟨w − x, h_k⟩ + ‖w − x‖²/2); none for a model that the client keeps."""
        drift = dynamic.drift_of(step.task.payload)
        if step.is_own or not drift:
            return None
        term = self.params.alpha * dynamic.dynamic_term(step.weights, step.received, drift)
        return term / step.task.payload[dynamic.SHARE] if self.params.scaling == "samples" else term

    @fb.wrapper
    def aggregate(self, task: fb.AggregationTask, rest: Aggregate) -> Aggregated:
        """The mean of the participants and the mean drift of all clients."""
        answer = rest(dynamic.weighted_as(task, self.params.weighting))
        kept = dynamic.drifted(task, task.state.get(self.name, {}), task.updates)
        task.state[self.name] = kept
        return with_weights(answer, {n: y + kept[dynamic.MEAN + n] for n, y in weights_of(answer).items()})
