"""FLoRA - Wang, Shen, He, Sun, Wang, Lyu, Li, "FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous
Low-Rank Adaptations", NeurIPS 2024; arXiv 2409.05976.

The clients' factors of every low-rank addition γ B A are stacked rather than averaged, and merged into the frozen
weights of all; every round begins with fresh ones:
    A = [A_1; ...; A_m],   B = [p_1 B_1, ..., p_m B_m],   W₀ ← W₀ + γ B A = W₀ + γ Σ_i p_i B_i A_i
    A_i drawn anew, uniform in ±1/√w,   B_i = 0
so that the server's model is the mean of the clients' models, exactly.

Wraps: build_model (W₀ − W₀⁰ becomes a buffer of the model, which every pass reads), aggregate, broadcast. Other weights
than the factors are what the rest of the stack answers. Stacks on a learner with such factors (clip-lora+flora), of
which it knows the names `*.A` and `*.B`, and with methods that change losses. Not with another server step, to which
fresh factors are no change to go on from, nor where factors never leave a client.
Left open / contradicted: here all clients have one rank, and start from one A, of the server's; with ranks of their own
the stack is as exact. Since B = 0 in every round, its first step moves B alone. `restart=keep` leaves A as drawn for
round 1. In the released repository the baseline with averaged factors (FedIT) never sums: it returns p_1 times the
factors of one client; do not compare with its numbers.
Cost: up 2 r w floats a projection; down the fresh factors, 2 r w, and the stack, 2 m r w, or w² where that is less. A
client that was not in the round before is sent all of W₀ − W₀⁰, w². Methods that keep an earlier model of a client
(moon) keep its merged weights too. Own models of clients beside it (ditto) add factors to the merged weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

import fedbench.api as fb
from fedbench.toolkit.fedavg import participant_shares
from fedbench.toolkit.low_rank import (
    WithResiduals,
    changed,
    news_of,
    pairs_of,
    sent_factors,
    stacked,
    uniform_factor,
)
from fedbench.toolkit.wrapping import Aggregate, Aggregated, weights_of, with_weights


@dataclass(frozen=True, kw_only=True)
class FLoRAParams:
    """Hyper-parameters of FLoRA."""

    restart: Literal["fresh", "keep"] = fb.hyper("fresh", symbol="A", source="fresh: the paper; keep: ours")


class FLoRA(WithResiduals, fb.Method[FLoRAParams]):
    """Merges stacked low-rank additions into the frozen weights and starts anew."""

    name = "flora"
    citation = "Wang et al., FLoRA: Federated Fine-Tuning LLMs with Heterogeneous Low-Rank Adaptations, NeurIPS 2024"
    role = "server step"
    requires = ("whole_model", "sent_start", "weighed_clients")
    prevents = ("weighed_clients", "kept_factors")
    needs_learner = "clip-lora"

    @fb.wrapper
    def aggregate(self, task: fb.AggregationTask, rest: Aggregate) -> Aggregated:
        """Merge the clients' additions and draw the factors of the next round."""
        answer, shares = rest(task), participant_shares(task.updates, task.spec.training.weighting)
        changes: fb.Tensors = {}
        stacks: fb.Tensors = {}
        fresh: fb.Tensors = {}
        for name in pairs_of(task.weights, self.name):
            a, b = stacked(*sent_factors(task.updates, name), shares)
            changes[name] = (b.double() @ a.double()).to(a.dtype)
            stacks |= {f"{name}.A": a, f"{name}.B": b}
            old = task.weights[f"{name}.A"]
            drawn = uniform_factor(old.shape[0], old.shape[1], task.generator(f"flora {name}")).to(old)
            fresh |= {f"{name}.A": drawn if self.params.restart == "fresh" else old}
            fresh |= {f"{name}.B": torch.zeros_like(task.weights[f"{name}.B"])}
        task.state[self.name] = news_of(changes, stacks, task.updates)
        return changed(task, with_weights(answer, {**weights_of(answer), **fresh}), changes)
