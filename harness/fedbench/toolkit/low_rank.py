"""Low-rank additions γ B A to frozen projections W (w', w): pairs of weights ``NAME.A`` (r, w) and ``NAME.B`` (w', r).

A learner names its factors so; methods about their federation find them by these names. Where a server's
exact mean of products is no product of two such factors, what is missing is a residual R (w', w), ``NAME.residual``,
which a learner adds as γ R x to what the projection gives. The server keeps the R of all rounds; clients are sent it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedbench.core.errors import Unworkable
from fedbench.core.method.hooks import wrapper
from fedbench.core.method.tasks import BroadcastTask, EvaluationTask, LocalStep, ModelSetup
from fedbench.core.types import Broadcast, Model, Predictions, Tensors, Update
from fedbench.toolkit.wrapping import Build, Evaluate, Objective, Send

RESIDUAL = ".residual"
Split = Literal["root", "left"]


def pairs_of(weights: Iterable[str], method: str) -> list[str]:
    """The names of the pairs, without ".A" and ".B". Raises Unworkable where ``method`` finds none."""
    names = set(weights)
    stems = (name.removesuffix(".A") for name in names if name.endswith(".A"))
    found = [stem for stem in stems if f"{stem}.B" in names]
    if not found:
        raise Unworkable(
            f"{method} needs low-rank factors A and B that clients share, and this model has no such pair; stack it "
            f"with a learner that has them (clip-lora+{method}, with clip-lora.lora_agg=factors)."
        )
    return sorted(found)


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

    By way of the factors' QR decompositions, so that no (w', w) matrix is decomposed. The singular values go to B
    (``left``), or their roots to either (``root``).
    """
    left, right = torch.linalg.qr(torch.cat([p * each for p, each in zip(shares, b, strict=True)], dim=1))
    other, last = torch.linalg.qr(torch.cat([*a]).T)
    u, s, v = torch.linalg.svd(right @ last.T, full_matrices=False)
    rank = a[0].shape[0]
    first, second = (s.sqrt(), s.sqrt()) if split == "root" else (torch.ones_like(s), s)
    return (first[:rank, None] * (v @ other.T)[:rank]), (left @ u)[:, :rank] * second[:rank]


def residuals_of(tensors: Tensors | None) -> Tensors:
    """The residuals (w', w) by name, of a payload or of what a server keeps."""
    return {name: value for name, value in (tensors or {}).items() if name.endswith(RESIDUAL)}


def kept_residuals(before: Tensors | None, changes: Tensors, stacks: Tensors, updates: Sequence[Update]) -> Tensors:
    """What a server keeps: R of every pair after its ``changes`` (w', w), and what clients need to know of these.

    ``stacks``: "NAME.A" and "NAME.B" whose product makes the change, sent where they have fewer entries than it.
    """
    kept: Tensors = {"clients": torch.tensor([update.client for update in updates])}
    old = residuals_of(before)
    for name, change in changes.items():
        key = name + RESIDUAL
        kept[key] = old[key] + change if key in old else change
        a, b = stacks[f"{name}.A"], stacks[f"{name}.B"]
        factors = {f"{name}.change.A": a, f"{name}.change.B": b}
        kept |= factors if a.numel() + b.numel() < change.numel() else {f"{name}.change": change}
    return kept


def with_residuals(task: BroadcastTask, sent: Broadcast, kept: Tensors | None) -> Broadcast:
    """``sent`` and the residuals: those that trained in the round before are sent the last change, others all of R."""
    if kept is None:
        return sent
    residuals, clients = residuals_of(kept), kept["clients"]
    if task.client not in clients.tolist():
        return replace(sent, payload={**sent.payload, **residuals})
    changes = {name: value for name, value in kept.items() if name not in residuals and value is not clients}
    return replace(sent, payload={**sent.payload, **changes}, held={**sent.held, **residuals})


def at_residuals(step: LocalStep) -> LocalStep:
    """``step`` with the residuals that the client was sent among the tensors of every forward pass."""
    found = residuals_of(step.task.payload)
    task = replace(step.task, buffers={**step.task.buffers, **found})
    return replace(step, buffers={**step.buffers, **found}, task=task)


def tested_at_residuals(task: EvaluationTask, kept: Tensors | None) -> EvaluationTask:
    """``task`` with the server's residuals, which a client's own model has as well."""
    return replace(task, buffers={**task.buffers, **residuals_of(kept)})


class AtResiduals:
    """What methods share that keep residuals, by `kept_residuals`, under their name in the server's state.

    They inherit it before `Method`.
    """

    name: ClassVar[str]

    @wrapper
    def build_model(self, setup: ModelSetup, rest: Build) -> Model:
        """The learner's model as it is. Raises Unworkable for one without low-rank factors."""
        model = rest(setup)
        pairs_of(model.weights, self.name)
        return model

    @wrapper
    def broadcast(self, task: BroadcastTask, rest: Send) -> Broadcast:
        """The stack's, and the residuals."""
        return with_residuals(task, rest(task), task.state.get(self.name))

    @wrapper
    def local_objective(self, step: LocalStep, rest: Objective) -> Tensor:
        """The stack's loss, of the weights with the residuals."""
        return rest(at_residuals(step))

    @wrapper
    def evaluate(self, task: EvaluationTask, rest: Evaluate) -> Predictions:
        """The stack's predictions, of the weights with the residuals."""
        return rest(tested_at_residuals(task, task.state.get(self.name)))
