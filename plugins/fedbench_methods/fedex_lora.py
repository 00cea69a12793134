"""FedEx-LoRA - Singhal, Ponkshe, Vepakomma, "FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of
Foundation Models", ACL 2025; arXiv 2410.09432.

Factors A and B of every low-rank addition γ B A are averaged apart, and what that misses of the mean of the products
goes into the frozen weights of all:
    Ā = Σ_i p_i A_i,   B̄ = Σ_i p_i B_i,   W₀ ← W₀ + γ (Σ_i p_i B_i A_i − B̄ Ā)
so that W₀ + γ B̄ Ā is the mean of the clients' models, exactly. The residual is dense, of rank m r at most.

Wraps: build_model (the residual becomes a buffer of the model, which every pass reads), aggregate, broadcast. Ā and B̄
are what the rest of the stack answers; whatever it is, the residual makes up for it. Stacks on a learner with such
factors (clip-lora+fedex-lora), of which it knows the names `*.A` and `*.B`, and with methods that change losses. Not
with another server step, which would leave the residual behind, nor where factors never leave a client.
Left open / contradicted: the released code transposes the residual before it is added, which suits weights kept as
(inputs, outputs) and is wrong for linear layers; square ones raise no error. Default: the paper's;
`orientation=transposed` is that code. It weights clients alike (`weighting=uniform` of the run).
Cost: beside A and B, of each residual the m factors p_i B_i and A_i down, or w² floats where that is less. A client
that was not in the round before is sent all of W₀ − W₀⁰, w² floats a projection. Up nothing more. Methods that keep an
earlier model of a client (moon) keep its residual too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

import fedbench.api as fb
from fedbench.toolkit.fedavg import participant_shares
from fedbench.toolkit.low_rank import (
    WithResiduals,
    changed,
    news_of,
    pairs_of,
    sent_factors,
    stacked,
)
from fedbench.toolkit.wrapping import Aggregate, Aggregated, weights_of


@dataclass(frozen=True, kw_only=True)
class FedExLoRAParams:
    """Hyper-parameters of FedEx-LoRA."""

    orientation: Literal["exact", "transposed"] = fb.hyper(
        "exact", symbol="R", source="exact: the paper; transposed: the released code"
    )


def residual(many_a: Tensor, many_b: Tensor, mean_a: Tensor, mean_b: Tensor) -> Tensor:
    """Σ_i p_i B_i A_i − B̄ Ā, (w', w), from the stacks (m r, w) and (w', m r) and the means (r, w) and (w', r)."""
    exact = many_b.double() @ many_a.double() - mean_b.double() @ mean_a.double()
    return exact.to(mean_a.dtype)


class FedExLoRA(WithResiduals, fb.Method[FedExLoRAParams]):
    """Averages low-rank additions exactly, by a residual in the frozen weights."""

    name = "fedex-lora"
    citation = "Singhal et al., FedEx-LoRA: Exact Aggregation for Federated Fine-Tuning, ACL 2025"
    role = "server step"
    requires = ("whole_model", "sent_start", "weighed_clients")
    prevents = ("weighed_clients",)
    needs_learner = "clip-lora"

    @fb.wrapper
    def aggregate(self, task: fb.AggregationTask, rest: Aggregate) -> Aggregated:
        """The stack's answer; what it misses of the mean of the products is kept."""
        answer = rest(task)
        shares, means = participant_shares(task.updates, task.spec.training.weighting), weights_of(answer)
        changes: fb.Tensors = {}
        stacks: fb.Tensors = {}
        for name in pairs_of(task.weights, self.name):
            a, b = stacked(*sent_factors(task.updates, name), shares)
            found = residual(a, b, means[f"{name}.A"], means[f"{name}.B"])
            changes[name] = found if self.params.orientation == "exact" else found.T.contiguous()
            stacks |= {f"{name}.A": a, f"{name}.B": b}
        task.state[self.name] = news_of(changes, stacks, task.updates)
        return changed(task, answer, changes)
