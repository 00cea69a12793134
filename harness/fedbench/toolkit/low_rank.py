"""Low-rank additions γ B A to frozen projections W (w', w): pairs of weights ``NAME.A`` (r, w) and ``NAME.B`` (w', r).

A learner names its factors so; methods about their federation find them by these names. Where a server's
exact mean of products is no product of two such factors, what is missing is a residual R (w', w), ``NAME.residual``,
which a learner adds as γ R x to what the projection gives. It is a buffer of the model that the server alone changes
(`Model.of_server`), so that every pass reads it; clients are sent what makes R of the one they have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedbench.core.errors import Unworkable
from fedbench.core.method.hooks import wrapper
from fedbench.core.method.tasks import AggregationTask, BroadcastTask, ModelSetup
from fedbench.core.types import Broadcast, GlobalModel, Model, Tensors, Update
from fedbench.toolkit.fedavg import average_buffers
from fedbench.toolkit.wrapping import Aggregated, Build, Send, without_own

RESIDUAL, CLIENTS = ".residual", "clients"
Split = Literal["root", "left"]


def pairs_of(weights: Iterable[str], method: str) -> list[str]:
    """The names of the pairs, without ".A" and ".B". Raises Unworkable where ``method`` finds none."""
    names = set(weights)
    stems = (name.removesuffix(".A") for name in names if name.endswith(".A"))
    pairs = [stem for stem in stems if f"{stem}.B" in names]
    if not pairs:
        raise Unworkable(
            f"{method} needs low-rank factors A and B that clients share, and this model has no such pair; stack it "
            f"with a learner that has them (clip-lora+{method}, with clip-lora.lora_agg=factors)."
        )
    return sorted(pairs)


def uniform_factor(rank: int, width: int, generator: torch.Generator) -> Tensor:
    """A (r, w), uniform in ±1/√w (Kaiming's with a = √5)."""
    bound: float = width**-0.5
    return (2 * torch.rand(rank, width, generator=generator) - 1) * bound


def sent_factors(updates: Sequence[Update], name: str) -> tuple[list[Tensor], list[Tensor]]:
    """The clients' A (r, w) and B (w', r) of a pair."""
    return [u.weights[f"{name}.A"] for u in updates], [u.weights[f"{name}.B"] for u in updates]


def stacked(a: Sequence[Tensor], b: Sequence[Tensor], shares: Tensor) -> tuple[Tensor, Tensor]:
    """[A_1; ...; A_m] (m r, w) and [p_1 B_1, ..., p_m B_m] (w', m r), whose product is Σ_i p_i B_i A_i."""
    return torch.cat([*a]), torch.cat([p * each for p, each in zip(shares.tolist(), b, strict=True)], dim=1)


def product_mean(
    a: Sequence[Tensor], b: Sequence[Tensor], shares: Tensor, split: Split = "root"
) -> tuple[Tensor, Tensor]:
    """A (r, w) and B (w', r) whose product is the best rank-r approximation of Σ_i p_i B_i A_i (Frobenius norm).

    It uses QR decompositions of the factors, so that no (w', w) matrix is decomposed. The singular values go to B
    (``left``), or their roots to both (``root``).
    """
    left, right = torch.linalg.qr(torch.cat([p * each for p, each in zip(shares, b, strict=True)], dim=1))
    other, last = torch.linalg.qr(torch.cat([*a]).T)
    u, s, v = torch.linalg.svd(right @ last.T, full_matrices=False)
    rank = a[0].shape[0]
    first, second = (s.sqrt(), s.sqrt()) if split == "root" else (torch.ones_like(s), s)
    return (first[:rank, None] * (v @ other.T)[:rank]), (left @ u)[:, :rank] * second[:rank]


def residuals_of(tensors: Tensors) -> Tensors:
    """The residuals (w', w) by name, among a model's buffers."""
    return {name: value for name, value in tensors.items() if name.endswith(RESIDUAL)}


def with_residuals(model: Model, method: str) -> Model:
    """``model`` with a residual of zero beside every pair of factors. Raises Unworkable where it has no pair."""
    shared = without_own(model.weights, model)
    pairs = pairs_of(shared, method)
    zeros = {name + RESIDUAL: shared[f"{name}.B"].new_zeros(_shape(shared, name)) for name in pairs}
    return replace(model, buffers={**model.buffers, **zeros}, of_server=model.of_server.union(zeros))


def _shape(weights: Tensors, name: str) -> tuple[int, int]:
    return weights[f"{name}.B"].shape[0], weights[f"{name}.A"].shape[1]


def changed(task: AggregationTask, answer: Aggregated, changes: Tensors) -> GlobalModel:
    """``answer`` to `aggregate` with the residuals after their ``changes`` (w', w), by pair."""
    if not isinstance(answer, GlobalModel):
        answer = GlobalModel(answer, average_buffers(task.updates, task.spec.training.weighting, task.buffers))
    moved = {name + RESIDUAL: task.buffers[name + RESIDUAL] + change for name, change in changes.items()}
    return replace(answer, buffers={**answer.buffers, **moved})


def news_of(changes: Tensors, stacks: Tensors, updates: Sequence[Update]) -> Tensors:
    """The news that a server keeps until it sends: the clients of the round, and what they need to know of ``changes``.

    ``stacks``: "NAME.A" and "NAME.B" whose product is the change, sent if they have fewer entries than it.
    """
    news: Tensors = {CLIENTS: torch.tensor([update.client for update in updates])}
    for name, change in changes.items():
        a, b = stacks[f"{name}.A"], stacks[f"{name}.B"]
        factors = {f"{name}.change.A": a, f"{name}.change.B": b}
        news |= factors if a.numel() + b.numel() < change.numel() else {f"{name}.change": change}
    return news


def with_news(task: BroadcastTask, sent: Broadcast, news: Tensors | None) -> Broadcast:
    """Add residuals to ``sent``: clients that trained in the last round get the last change, others all of R."""
    if news is None:
        return sent
    changes = {name: value for name, value in news.items() if name != CLIENTS}
    there = task.client in news[CLIENTS].tolist()
    return replace(sent, payload={**sent.payload, **(changes if there else residuals_of(task.buffers))})


class WithResiduals:
    """A base of methods that change residuals and keep `news_of` them under their name in the server's state.

    Methods inherit it before `Method`.
    """

    name: ClassVar[str]

    @wrapper
    def build_model(self, setup: ModelSetup, rest: Build) -> Model:
        """The learner's model with residuals. Raises Unworkable for one without low-rank factors."""
        return with_residuals(rest(setup), self.name)

    @wrapper
    def broadcast(self, task: BroadcastTask, rest: Send) -> Broadcast:
        """The stack's broadcast with residuals or their last change."""
        return with_news(task, rest(task), task.state.get(self.name))
