"""FedDC - Gao, Fu, Li, Chen, Xu, Xu, "FedDC: Federated Learning with Non-IID Data via Local Drift Decoupling and
Correction", CVPR 2022.

`feddyn` with a further linear term, which takes the part of SCAFFOLD's controls. With the drift h_k and estimates g_k
of the client's and g of all gradients (all 0 at first), and ω_k = N n_k / Σ n,
    client:  min_w  F_k(w) + (α/2) ‖w − (x − h_k)‖² + ⟨w − x, g/ω_k − g_k⟩,  from x, to y_k
             h_k ← h_k + y_k − x,    g_k⁺ = g_k − g/ω_k − (y_k − x) / (K η)
    server:  x ← (1/m) Σ_{k∈S} y_k + (1/N) Σ_{all k} h_k,    g ← g + (1/N) Σ_{k∈S} ω_k (g_k⁺ − g_k)

Wraps: broadcast, aggregate. Answers: start, loss_terms, after_training. Without g and g_k (`correction=off`) it is
`feddyn` bit for bit: server, drift and all. Stacks as that does. With momentum (K η) is η a(K), the weight of all
gradients in the change, as in `scaffold`. h_k and g_k stay as they were where an update is lost.
Left open / contradicted: this is the released code. The paper averages y_k + h_k over the participants by samples, and
takes for g_k the client's last change alone. The code has α_k = α / ω_k (`scaling=samples`) and clips at a norm of 10
(the recipe). Running statistics are averaged by the harness.
Cost: g down and a change of g_k up, so twice FedAvg's bytes both ways; a client's drift and g_k are kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

import fedbench.api as fb
from fedbench.toolkit.local_training import gradient_weight, local_steps, rates_by_name
from fedbench.toolkit.wrapping import Aggregate, Aggregated, Send, weights_of, with_weights
from fedbench_methods.shared import dynamic_regularisation as dynamic

GRADIENT = "gradient/"


@dataclass(frozen=True, kw_only=True)
class FedDCParams:
    """Hyper-parameters of FedDC."""

    alpha: float = fb.hyper(
        0.01, symbol="α", low=1e-4, high=10.0, log=True, search=(1e-3, 0.1), source="released code, CIFAR: 0.01"
    )
    scaling: dynamic.Scaling = dynamic.scaling_field()
    weighting: dynamic.Weighting = dynamic.weighting_field()
    correction: Literal["on", "off"] = fb.hyper("on", symbol="g", source="off is FedDyn")


def linear_term(weights: fb.Tensors, received: fb.Tensors, tilt: fb.Tensors) -> Tensor:
    """⟨w − x, g/ω_k − g_k⟩, a scalar whose gradient is the ``tilt``."""
    return torch.stack([((weights[name] - received[name]) * value).sum() for name, value in tilt.items()]).sum()


def estimate(change: Tensor, tilt: Tensor, length: float) -> Tensor:
    """g_k⁺ = −tilt − (y_k − x) / length, all of one shape; ``length`` is K η."""
    return -tilt - change / length


class FedDC(fb.Method[FedDCParams]):
    """Drifts of clients, and of their gradients, corrected."""

    name = "feddc"
    citation = "Gao et al., FedDC: Federated Learning with Non-IID Data via Local Drift Decoupling, CVPR 2022"
    requires: tuple[str, ...] = ("sgd", "sent_start", "global_model", "own_updates")
    recipe = {"clip_norm": 10.0}
    prevents = ("plain_steps",)

    def __init__(self, params: FedDCParams) -> None:
        super().__init__(params)
        if not self._corrects:
            self.requires = ("sent_start", "global_model", "own_updates")

    @fb.hookimpl
    def start(self, task: fb.StartTask) -> None:
        """ω_k."""
        task.state[self.name] = {dynamic.SHARE: dynamic.sizes_relative_to_the_mean(task)}

    @fb.wrapper
    def broadcast(self, task: fb.BroadcastTask, rest: Send) -> fb.Broadcast:
        """What the stack sends, g and ω_k; the client holds h_k."""
        kept = task.state[self.name]
        answer = dynamic.with_drift(rest(task), task, kept)
        sent = {}
        if self._corrects:
            sent = {GRADIENT + n: kept.get(GRADIENT + n, torch.zeros_like(x)) for n, x in task.weights.items()}
        if self._corrects or self.params.scaling == "samples":
            sent[dynamic.SHARE] = kept[dynamic.SHARE][task.client]
        return replace(answer, payload={**answer.payload, **sent})

    @fb.hookimpl
    def loss_terms(self, step: fb.LocalStep) -> Tensor | None:
        """Both terms; none for a model that the client keeps."""
        payload = step.task.payload
        drift = dynamic.drift_of(payload)
        if step.is_own or not drift:
            return None
        term = self.params.alpha * dynamic.dynamic_term(step.weights, step.received, drift)
        term = term / payload[dynamic.SHARE] if self.params.scaling == "samples" else term
        return term + linear_term(step.weights, step.received, self._tilt(step.task)) if self._corrects else term

    @fb.hookimpl
    def after_training(self, task: fb.ClientTask, update: fb.Update) -> fb.Tensors | None:
        """Keep g_k⁺ and send g_k⁺ − g_k, as large as the weights."""
        if not self._corrects:
            return None
        rates = rates_by_name(task.training, task.model, task.round)
        weight = gradient_weight(local_steps(task), task.training.momentum)
        before = task.state.get(self.name, {})
        after = {
            name: estimate(update.weights[name] - task.received[name], value, rates[name] * weight)
            for name, value in self._tilt(task).items()
        }
        task.state[self.name] = after
        return {GRADIENT + name: new - before[name] if name in before else new for name, new in after.items()}

    @fb.wrapper
    def aggregate(self, task: fb.AggregationTask, rest: Aggregate) -> Aggregated:
        """FedDyn's step; g moves by the mean over all clients."""
        answer = rest(dynamic.weighted_as(task, self.params.weighting))
        kept = dynamic.drifted(task, task.state[self.name], task.updates)
        if self._corrects:
            share = kept[dynamic.SHARE]
            for name, x in task.weights.items():
                changes = [share[u.client] * u.payload[GRADIENT + name] for u in task.updates]
                before = kept.get(GRADIENT + name, torch.zeros_like(x))
                kept[GRADIENT + name] = before + torch.stack(changes).sum(0) / task.num_clients
        task.state[self.name] = kept
        return with_weights(answer, {n: y + kept[dynamic.MEAN + n] for n, y in weights_of(answer).items()})

    @property
    def _corrects(self) -> bool:
        return self.params.correction == "on"

    def _tilt(self, task: fb.ClientTask) -> fb.Tensors:
        """g/ω_k − g_k by name, of the weights that the client is sent."""
        own, share = task.state.get(self.name, {}), task.payload[dynamic.SHARE]
        given = {n.removeprefix(GRADIENT): g for n, g in task.payload.items() if n.startswith(GRADIENT)}
        return {name: g / share - own[name] if name in own else g / share for name, g in given.items()}
