"""FedNova - Wang, Liu, Liang, Joshi, Poor, "Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization", NeurIPS 2020.

Clients that take more local steps must not weigh more. With x − y_k = η Σ_s a_{k,s} g_{k,s} the change of client k and
a_k = ‖a_{k,·}‖₁ the weight of all its gradients in it,
    d_k = (x − y_k) / (η a_k),    τ_eff = Σ_k p_k a_k,    x ← x − η τ_eff Σ_k p_k d_k
    plain SGD: a_k = τ_k;    momentum ρ: a_k = [τ_k − ρ (1 − ρ^τ_k) / (1 − ρ)] / (1 − ρ)
    proximal term (μ/2) ‖w − x‖², ρ = 0: a_k = [1 − (1 − η μ)^τ_k] / (η μ)
    server momentum:  u ← gmf u + (step above) / η,    x ← x − η u
η is the round's own rate, also where it decays, and a_k follows from the steps taken, the last short batch included
(`fedbench.toolkit.local_training`). Equal a_k make it FedAvg bit for bit, whatever the p_k.

Answers: start (refuses what it is not defined for), loss_terms (μ > 0), after_training (sends a_k, four bytes, and
τ_k with tau_eff=steps), aggregate (with gmf keeps a copy of the weights). Stacks with any method that replaces neither
local_train nor aggregate. A proximal term of another method is part of g and leaves a_k alone; this method's own μ, for
one learning rate of all weights, enters a_k.
Left open / contradicted:
- With μ > 0 the released code takes τ_eff = Σ p_k τ_k, the raw steps: `tau_eff=steps`. The equations' is the default.
- It adds the proximal gradient after the momentum. Here it is part of the loss, and a_k is worked out for that.
- Running statistics are averaged by the harness: τ_eff / a_k > 1 would extrapolate a variance below zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

import fedbench.api as fb
from fedbench.api import FedbenchError, hookimpl, hyper
from fedbench.toolkit.fedavg import mean_over_clients, participant_shares, weighted_mean
from fedbench.toolkit.local_training import gradient_weight, local_steps, rates_by_name
from fedbench.toolkit.losses import proximal_term

WEIGHT, STEPS = "fednova.a", "fednova.tau"


@dataclass(frozen=True, kw_only=True)
class FedNovaParams:
    """Hyper-parameters of FedNova."""

    gmf: float = hyper(0.0, symbol="gmf", low=0.1, high=0.99, off=0.0, search=(0.1, 0.95), source="released code: 0")
    mu: float = hyper(0.0, symbol="μ", low=1e-4, high=1.0, log=True, off=0.0, source="released code: 0, no such term")
    tau_eff: Literal["weights", "steps"] = hyper("weights", symbol="τ_eff", needs="mu", source="steps: released code")


def normalised_shares(shares: Tensor, weight: Tensor, tau_eff: Tensor) -> Tensor:
    """Of x and the y_k in the new x, (1 + m,), from p and a (m,) and τ_eff, float64; (0, p) where all a_k = τ_eff."""
    ratio = tau_eff / weight
    return torch.cat([(shares * (1 - ratio)).sum()[None], shares * ratio])


class FedNova(fb.Method[FedNovaParams]):
    """Averages updates normalised by the clients' local steps."""

    name = "fednova"
    citation = "Wang et al., Tackling the Objective Inconsistency Problem, NeurIPS 2020"
    requires = ("sgd", "plain_steps", "sent_start", "global_model")

    @hookimpl
    def start(self, task: fb.StartTask) -> None:
        """Nothing; FedbenchError for μ > 0 with several learning rates."""
        if self.params.mu and len(set(rates_by_name(task.spec.training, task.model, 1).values())) > 1:
            raise FedbenchError("fednova.mu above 0 needs one learning rate; this model has several: stack fedprox.")

    @hookimpl
    def loss_terms(self, step: fb.LocalStep) -> Tensor | None:
        """The proximal term of the variant with μ > 0."""
        if not self.params.mu or step.is_own:
            return None
        return proximal_term(step.weights, step.received, self.params.mu)

    @hookimpl
    def after_training(self, task: fb.ClientTask, update: fb.Update) -> fb.Tensors:
        """a_k, a scalar; with tau_eff=steps also τ_k."""
        steps, rate = local_steps(task), next(iter(rates_by_name(task.training, task.model, task.round).values()))
        sent = {WEIGHT: torch.tensor(gradient_weight(steps, task.training.momentum, rate * self.params.mu))}
        return {**sent, STEPS: torch.tensor(float(steps))} if self._counts_steps else sent

    @hookimpl
    def aggregate(self, task: fb.AggregationTask) -> fb.Tensors:
        """The normalised step, with server momentum where gmf > 0."""
        shares = participant_shares(task.updates, task.spec.training.weighting)
        weight = torch.tensor([float(u.payload[WEIGHT]) for u in task.updates], dtype=torch.float64)
        counted = torch.tensor([float(u.payload[STEPS]) for u in task.updates]) if self._counts_steps else weight
        parts = normalised_shares(shares, weight, mean_over_clients(counted.double(), shares))
        stepped = {n: weighted_mean([x, *(u.weights[n] for u in task.updates)], parts) for n, x in task.weights.items()}
        return self._with_momentum(task, stepped) if self.params.gmf else stepped

    def _with_momentum(self, task: fb.AggregationTask, stepped: fb.Tensors) -> fb.Tensors:
        """x − η u, from where x would be without the momentum; u is kept."""
        gmf, rates = self.params.gmf, rates_by_name(task.spec.training, task.model, task.round)
        before = task.state.get(self.name) or {name: torch.zeros_like(x) for name, x in task.weights.items()}
        u = {n: gmf * before[n] + (x - stepped[n]) / rates[n] for n, x in task.weights.items()}
        task.state[self.name] = u
        return {name: x - rates[name] * u[name] for name, x in task.weights.items()}

    @property
    def _counts_steps(self) -> bool:
        return self.params.tau_eff == "steps" and self.params.mu > 0
