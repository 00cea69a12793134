"""Fed-GraB - Xiao, Chen, Liu, Wang, Feng, Hao, Zhou, Wu, Yang, Liu, "Fed-GraB: Federated Long-tailed Learning with
Self-Adjusting Gradient Balancer", NeurIPS 2023; arXiv 2310.07587.

Classes are separated one against the rest, with logits o and y_ij = 1 where sample i is of class j:
    L = (1/B) Σ_i Σ_j BCE(σ(o_ij), y_ij)
Self-adjusting gradient balancer (SGB), for every client and every controlled class j; the loss itself has no weights:
    g_ij = w⁺_j ∂L/∂o_ij where y_ij = 1,   w⁻_j ∂L/∂o_ij elsewhere,   backpropagated in place of ∂L/∂o
    D_j = Σ over all batches so far (Σ_{y=1} |g_ij| − Σ_{y=0} |g_ij|),   e = −D_j
    u ← u + Kp (e − e₁) + Ki e + Kd (e − 2 e₁ + e₂),   e₁ and e₂ the errors of the last two batches
    w⁺_j = h(u),  w⁻_j = h(−u),  h(x) = (10/9) / (1/9 + e^{−x/2}):  from 0 to 10, h(0) = 1
Direct prior analyser (DPA), at the server after every aggregation (FedAvg's): lengths of the rows of the global head,
z-scored, shifted to minimum 0, divided by their sum; the mean of that over the rounds, sorted, is the estimated class
share. Largest first, the classes that begin at 95 % of the sum or later are the tail, and these are controlled.

Answers: start, broadcast, local_loss, aggregate. Stacks with methods that add loss terms. Sends a flag a class down. A
client keeps D, u and the last errors between participations; they move at every step: clients train one after another.
DPA needs a linear head, with logits that start near zero: rows of a text-initialised CLIP head start equally long, and
one class or none is controlled (`controlled=all` controls every class). None is before the first aggregation.
D stays where an update is lost and goes on for uncontrolled classes; it may grow without end (`reset=round`: anew).
The paper's equations were not at hand, these are the released code's (lr 0.03, momentum 0.5, batch 10). There
- the classifier is in no optimiser and stays random: here it is trained, with the balanced gradient;
- DPA is not called: here it is the default, being half of the method in the abstract (`controlled=all`: without);
- a gate that no text mentions exempts the i-th controlled class of m with probability 0.1^{i/(m−1)}: off (`gate=0.1`);
- averages take client sizes in a random order (here a client's own), and the bound of 100 on u has no effect.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import one_hot

import fedbench.api as fb
from fedbench.api import hookimpl, hyper
from fedbench.toolkit.fedavg import average
from fedbench.toolkit.losses import balanced_loss

TAIL_FROM = 0.95
"""The share of all samples, by DPA's estimate, that larger classes have together before the tail begins."""


@dataclass(frozen=True, kw_only=True)
class FedGraBParams:
    """Hyper-parameters of Fed-GraB."""

    kp: float = hyper(10.0, symbol="Kp", low=1.0, high=100.0, log=True, off=0.0, source="released code")
    ki: float = hyper(0.01, symbol="Ki", low=1e-3, high=0.1, log=True, off=0.0, source="released code")
    kd: float = hyper(0.1, symbol="Kd", low=0.01, high=1.0, log=True, off=0.0, source="released code")
    clamp: float = hyper(100.0, symbol="max u", low=10.0, high=100.0, off=0.0, search=False, source="released code")
    controlled: Literal["tail", "all"] = hyper("tail", symbol="DPA", source="abstract; all: released main script")
    gate: float = hyper(0.0, symbol="gate", low=0.01, high=1.0, off=0.0, search=False, source="released code 0.1")
    reset: Literal["never", "round"] = hyper("never", symbol="D = u = 0", source="released code; round: no wind-up")


@dataclass(frozen=True, eq=False)
class Controller:
    """What a client keeps of every class, (C,) each: D, u, e₁ and e₂."""

    balance: Tensor
    output: Tensor
    error: Tensor
    earlier: Tensor


def weight_of(output: Tensor) -> Tensor:
    """h(x) = (10/9) / (1/9 + e^{−x/2}), as 10 / (1 + 9 e^{−x/2}), which is exactly 1 at x = 0."""
    return 10 / (1 + 9 * torch.exp(-output / 2))


def controller_moved(state: Controller, controlled: Tensor, params: FedGraBParams) -> Controller:
    """The controller after it has seen D, where ``controlled`` (C,) bool; elsewhere, and D itself, unchanged."""
    now = -state.balance
    change = params.kp * (now - state.error) + params.ki * now + params.kd * (now - 2 * state.error + state.earlier)
    output = state.output + change
    output = output.clamp(-params.clamp, params.clamp) if params.clamp else output
    moved = zip((output, now, state.error), (state.output, state.error, state.earlier), strict=True)
    return Controller(state.balance, *(torch.where(controlled, new, old) for new, old in moved))


def gradient_weights(output: Tensor, targets: Tensor, balanced: Tensor) -> Tensor:
    """w⁺_j or w⁻_j for every sample and class, (batch, C), by ``targets`` y (batch, C); 1 where not ``balanced``."""
    return torch.where(balanced, torch.where(targets > 0, weight_of(output), weight_of(-output)), 1.0)


def batch_balance(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Σ_{y=1} |g_ij| − Σ_{y=0} |g_ij| of a batch, (C,); g is negative on positives and positive on negatives."""
    return -(weights * (logits.detach().sigmoid() - targets)).sum(dim=0) / len(logits)


def exempted(controlled: list[bool], ratio: float, draws: list[float]) -> list[bool]:
    """The gate: of m ``controlled`` classes in index order one is exempt where its draw is below ratio^{i/(m−1)}, i
    being how many already are. The first always is."""
    last, exempt = max(sum(controlled) - 1, 1), list[bool]()
    for is_controlled, draw in zip(controlled, draws, strict=True):
        exempt.append(is_controlled and draw < ratio ** (sum(exempt) / last))
    return exempt


def estimated_shares(weight: Tensor) -> Tensor:
    """DPA: class shares (C,) float64 from the head ``weight`` (C, d); all alike where the rows have one length."""
    # a z-score's mean and deviation drop out of (x − min) / Σ (x − min)
    lengths = torch.linalg.vector_norm(weight.double(), dim=1)
    above = lengths - lengths.min()
    return above / above.sum() if above.sum() > 0 else torch.full_like(above, 1 / len(above))


def tail_classes(shares: Tensor) -> Tensor:
    """Which classes begin at 95 % of the ``shares`` (C,) or later, with the largest first: (C,) bool."""
    order = torch.argsort(shares, descending=True, stable=True)
    largest_first = shares[order] / shares.sum()
    before = largest_first.cumsum(0) - largest_first
    return torch.zeros_like(shares, dtype=torch.bool).index_put((order,), before >= TAIL_FROM)


class FedGraB(fb.Method[FedGraBParams]):
    """Balances every class's gradients by a controller on each client."""

    name = "fed-grab"
    citation = "Xiao et al., Fed-GraB: Self-Adjusting Gradient Balancer, NeurIPS 2023"
    requires: tuple[str, ...] = ("labels", "linear_head", "sent_head", "global_model")

    def __init__(self, params: FedGraBParams) -> None:
        super().__init__(params)
        if params.controlled == "all":
            self.requires = ("labels",)

    @hookimpl
    def start(self, task: fb.StartTask) -> None:
        """No round is analysed and, with DPA, no class controlled; nothing is sent."""
        if self.params.controlled == "all":
            return
        weight = task.model.weights[task.model.linear_head.weight]
        zeros = weight.new_zeros(len(weight))
        task.state[self.name] = {"shares": zeros.double(), "rounds": zeros[:1], "controlled": zeros.bool()}

    @hookimpl
    def broadcast(self, task: fb.BroadcastTask) -> fb.Broadcast:
        """The global weights and, with DPA, which classes are controlled."""
        state = task.state.get(self.name)
        return fb.Broadcast(task.weights, {"controlled": state["controlled"]} if state else {})

    @hookimpl
    def local_loss(self, step: fb.LocalStep) -> Tensor:
        """L with the balanced gradient; the client's controller moves."""
        logits = step.outputs.logits.float()
        targets = one_hot(step.labels, logits.shape[1]).to(logits)
        controlled = step.task.payload.get("controlled", torch.ones_like(targets[0], dtype=torch.bool))
        state = controller_moved(self._kept(step, targets[0]), controlled, self.params)
        exempt = self._exempt(step, controlled)
        weights = gradient_weights(state.output, targets, controlled & ~exempt)
        counted = torch.where(exempt, 0.0, batch_balance(logits, targets, weights))
        step.task.state[self.name] = vars(replace(state, balance=state.balance + counted))
        return balanced_loss(logits, targets, weights)

    def _kept(self, step: fb.LocalStep, like: Tensor) -> Controller:
        """The client's controller before this step: all zero at first."""
        is_new = step.number == 0 and self.params.reset == "round"
        kept = None if is_new else step.task.state.get(self.name)
        return Controller(*[torch.zeros_like(like)] * 4) if kept is None else Controller(**kept)

    def _exempt(self, step: fb.LocalStep, controlled: Tensor) -> Tensor:
        """Which classes the gate exempts from this batch, (C,) bool; none where it is off."""
        if not self.params.gate:
            return torch.zeros_like(controlled)
        draws = torch.rand(len(controlled), generator=step.generator("gradient-gate")).tolist()
        return torch.tensor(exempted(controlled.tolist(), self.params.gate, draws), device=controlled.device)

    @hookimpl
    def aggregate(self, task: fb.AggregationTask) -> fb.Tensors:
        """The mean weighted by samples; with DPA, the tail by the lengths of the head's rows up to this round."""
        weights = average(task)
        if self.params.controlled == "tail":
            kept, now = task.state[self.name], estimated_shares(weights[task.model.linear_head.weight])
            rounds = kept["rounds"] + 1
            shares = kept["shares"] + (now - kept["shares"]) / rounds
            task.state[self.name] = {"shares": shares, "rounds": rounds, "controlled": tail_classes(shares)}
        return weights
