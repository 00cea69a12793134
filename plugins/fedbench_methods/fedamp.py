"""FedAMP - Huang, Chu, Zhou, Wang, Liu, Pei, Zhang, "Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI
2021.

The server keeps every client's last weights w_k and sends client k a mean of its own, in which those of clients like it
count most; the client trains near it:
    ξ_kj = α A′(‖w_k − w_j‖²),   A(t) = 1 − e^{−t/σ},   A′(t) = e^{−t/σ} / σ
    u_k = Σ_{j≠k} ξ_kj w_j + (1 − Σ_{j≠k} ξ_kj) w_k
    w_k ← argmin F_k(w) + (λ / 2α) ‖w − u_k‖²                       (by the run's local steps, from u_k)

Wraps: broadcast (u_k in place of the global weights), aggregate (keeps w_k), evaluate (own models by w_k). Answers:
loss_terms. So w_k is whatever a stack trains: a head, a prompt, an adapter, a whole network. Stacks with any method but
another personalisation. σ is a squared distance, so it has to rise with the number of weights and the learning rate.
Left open / contradicted: nothing keeps Σ_j ξ_kj from passing 1, where u_k would be pushed away from w_k; since ξ ≤ α/σ,
that takes more than σ/α clients. It is refused here; released code goes on. PFLlib pulls by the distance, not its
square (`norm=unsquared`), and mixes the clients of the last round alone; PromptFolio's baseline has the sign of the
exponent reversed. A client that has sent nothing yet receives the global model, the mean of the cohort's weights, which
the columns of a global model score, and which has no part in the method. With λ = 0 nothing pulls to u_k but the start.
Running statistics have no part in ‖·‖; a client receives its own again.
Cost: FedAvg's bytes; at the server one copy of the weights a client, saved with the run, and a pass over all of them
for every client that is sent something.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

import fedbench.api as fb
from fedbench.toolkit.losses import proximal_term, squared_distance, unsquared_term
from fedbench.toolkit.wrapping import Aggregate, Aggregated, Evaluate, Send, of_own, own_predictions

WEIGHTS, BUFFERS = "weights/", "buffers/"


@dataclass(frozen=True, kw_only=True)
class FedAmpParams:
    """Hyper-parameters of FedAMP."""

    sigma: float = fb.hyper(
        100.0, symbol="σ", low=1e-3, high=1e8, log=True, search=(1.0, 1e4), source="ours: safe for 100 clients at α = 1"
    )
    alpha: float = fb.hyper(
        1.0, symbol="α_K", low=1e-4, high=1e6, log=True, search=False, source="PFLlib: 1; the paper lets it fall"
    )
    pull: float = fb.hyper(1.0, symbol="λ", low=1e-3, high=100.0, log=True, off=0.0, source="PFLlib: 1")
    norm: Literal["squared", "unsquared"] = fb.hyper("squared", symbol="‖·‖", source="paper; unsquared: PFLlib")


def attention(distances: Tensor, sigma: float, alpha: float) -> Tensor:
    """ξ_k = α e^{−t/σ} / σ of the squared ``distances`` t (N − 1,) to the other clients' weights."""
    return alpha * torch.exp(-distances / sigma) / sigma


def kept_by(kept: fb.Tensors) -> dict[int, fb.Tensors]:
    """What the server keeps, by client: "3/weights/head.bias" is client 3's "weights/head.bias"."""
    found: dict[int, fb.Tensors] = {}
    for name, tensor in kept.items():
        client, _, rest = name.partition("/")
        found.setdefault(int(client), {})[rest] = tensor
    return found


def personal_mean(weights: dict[int, fb.Tensors], client: int, sigma: float, alpha: float) -> fb.Tensors:
    """u_k of ``client`` k, from all clients' ``weights``. Raises Unworkable where Σ ξ is above one."""
    own, others = weights[client], [each for other, each in weights.items() if other != client]
    if not others:
        return own
    shares = attention(torch.stack([squared_distance(own, other) for other in others]), sigma, alpha)
    if shares.sum() > 1:
        raise fb.Unworkable(
            f"fedamp gives the weights of other clients a share of {float(shares.sum()):.3g} in that of client "
            f"{client}, which is more than all; raise sigma, or lower alpha to below sigma / {len(others)}."
        )
    # w_k + Σ ξ (w_j − w_k): w_k itself, to the bit, where nobody is near
    return {
        name: value + sum(share * (other[name] - value) for share, other in zip(shares, others, strict=True))
        for name, value in own.items()
    }


class FedAMP(fb.Method[FedAmpParams]):
    """Each client is sent a mean in which the clients like it count most."""

    name = "fedamp"
    citation = "Huang et al., Personalized Cross-Silo Federated Learning on Non-IID Data, AAAI 2021"
    role = "personalisation"
    requires = ("own_updates",)
    prevents = ("sent_start",)

    @fb.wrapper
    def broadcast(self, task: fb.BroadcastTask, rest: Send) -> fb.Broadcast:
        """u_k, and the client's own running statistics; the global model where it has sent nothing yet."""
        answer, kept = rest(task), kept_by(task.state.get(self.name, {}))
        if task.client not in kept:
            return answer
        weights = {client: of_own(held, WEIGHTS) for client, held in kept.items()}
        mean = personal_mean(weights, task.client, self.params.sigma, self.params.alpha)
        return replace(answer, weights=mean, buffers=of_own(kept[task.client], BUFFERS))

    @fb.hookimpl
    def loss_terms(self, step: fb.LocalStep) -> Tensor | None:
        """(λ / 2α) ‖w − u_k‖²."""
        params = self.params
        term = proximal_term if params.norm == "squared" else unsquared_term
        return term(step.weights, step.received, params.pull / params.alpha) if params.pull else None

    @fb.wrapper
    def aggregate(self, task: fb.AggregationTask, rest: Aggregate) -> Aggregated:
        """The stack's global model; w_k of the cohort are kept."""
        answer, kept = rest(task), dict(task.state.get(self.name, {}))
        for update in task.updates:
            for prefix, tensors in ((WEIGHTS, update.weights), (BUFFERS, update.buffers)):
                kept |= {f"{update.client}/{prefix}{name}": tensor for name, tensor in tensors.items()}
        task.state[self.name] = kept
        return answer

    @fb.wrapper
    def evaluate(self, task: fb.EvaluationTask, rest: Evaluate) -> fb.Predictions:
        """The mean of the cohort as global model; own models by w_k."""
        kept = kept_by(task.state.get(self.name, {}))

        def own(client: int) -> tuple[fb.Tensors, fb.Tensors]:
            held = kept.get(client)
            return (task.weights, task.buffers) if held is None else (of_own(held, WEIGHTS), of_own(held, BUFFERS))

        return own_predictions(task, rest, own)
