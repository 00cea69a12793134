"""SCAFFOLD - Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled Averaging for Federated
Learning", ICML 2020 (Algorithm 1).

Controls c of the server and c_k of every client estimate the gradients of all and of its own data, zero at first:
    y ← y − η (g_k(y) − c_k + c), K steps from x                                                     (client)
    Option I:  c_k⁺ = ∇f_k(x), over all its data;    Option II:  c_k⁺ = c_k − c + (x − y_k) / (η K)
    x ← x + (η_g / m) Σ_{k∈S} (y_k − x),    c ← c + (1/N) Σ_{k∈S} (c_k⁺ − c_k)                        (server)
N counts all clients, m the cohort: so c stays the mean of all c_k, whoever takes part.

The correction c − c_k is the gradient of ⟨w − x, c − c_k⟩, which is added to the loss: zero where a round begins. So it
passes through the momentum ρ, and Option II divides by η a(K) instead of η K, a(K) the weight of all gradients in the
change (`fedbench.toolkit.local_training`; K itself without momentum, 4.1 times K at K = 10 and ρ = 0.9). The recorded
training loss includes this term, which can be negative: it cannot be compared with that of other methods.

Answers: start (refuses other optimisers than SGD), broadcast (c), loss_terms, after_training (keeps c_k⁺, sends its
change), aggregate. Stacks with methods that change the local loss or the model only; what they add is part of g_k, and
so is weight decay, in both options.
Left open / contradicted: Option II is the default, as in released code; `option=I` costs one pass over the data a
round, after training (stacked with `moon` it contrasts with the model just trained). The paper averages the y_k without
weights; some released code weights them by samples: `weighting`. Some starts the controls with a random network's
weights, once divided by m, corrects running statistics too, or adds the correction after an optimiser step with
momentum while dividing by η K: none of it here. Running statistics are averaged by the harness, with the run's own
weighting. η_g = 1 in released code.
A client keeps c_k⁺ only if its update arrives, or c would no longer be the mean of all c_k.
Cost: c down and a control up, as large as the weights each: twice FedAvg's bytes both ways, without the running
statistics. One copy of the weights for every client that took part, kept and saved with the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

import fedbench.api as fb
from fedbench.api import hookimpl, hyper
from fedbench.toolkit.fedavg import average
from fedbench.toolkit.local_training import (
    batch_at,
    batch_table,
    gradient_weight,
    local_steps,
    rates_by_name,
    step_loss,
)

CONTROL = "control/"


@dataclass(frozen=True, kw_only=True)
class ScaffoldParams:
    """Hyper-parameters of SCAFFOLD."""

    server_lr: float = hyper(
        1.0, symbol="η_g", low=0.01, high=10.0, log=True, search=(0.1, 1.0), source="Alg. 1; released code 1"
    )
    option: Literal["II", "I"] = hyper("II", symbol="option", source="Alg. 1, line 12")
    weighting: Literal["uniform", "samples"] = hyper(
        "uniform", symbol="1/m", source="uniform: Alg. 1; samples: released code"
    )


def correction(server: fb.Tensors, own: fb.Tensors) -> fb.Tensors:
    """c − c_k by name; a client that has no control yet has zero."""
    return {name: c - own[name] if name in own else c for name, c in server.items()}


def correction_term(weights: fb.Tensors, received: fb.Tensors, correction: fb.Tensors) -> Tensor:
    """⟨w − x, c − c_k⟩ over the tensors of ``correction``, a scalar whose gradient in w is c − c_k."""
    return torch.stack([((weights[name] - received[name]) * value).sum() for name, value in correction.items()]).sum()


def control_of_change(received: Tensor, trained: Tensor, correction: Tensor, length: float) -> Tensor:
    """c_k⁺ = (x − y_k) / length − (c − c_k) (Option II), all of one shape; ``length`` is η a(K)."""
    return (received - trained) / length - correction


def full_gradient(task: fb.ClientTask) -> fb.Tensors:
    """The gradient of the client's loss at x over all its data, weight decay and every loss term included, by name."""
    weights = {name: value.detach().clone().requires_grad_() for name, value in task.received.items()}
    total = {name: task.training.weight_decay * value for name, value in task.received.items()}
    noise, count = task.generator("augmentation of the control"), len(task.inputs)
    for index in batch_table(count, 1, task.training.batch_size, task.generator("batches of the control")):
        # the pass must not count as training: running statistics are thrown away
        buffers = {name: value.clone() for name, value in task.buffers.items()}
        loss = step_loss(fb.LocalStep(weights, buffers, batch_at(task, index, noise), task, 0))
        gradients = torch.autograd.grad(loss * (len(index) / count), list(weights.values()), allow_unused=True)
        total |= {n: total[n] + g for n, g in zip(weights, gradients, strict=True) if g is not None}
    return total


class SCAFFOLD(fb.Method[ScaffoldParams]):
    """Corrects client drift by control variates."""

    name = "scaffold"
    citation = "Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging, ICML 2020"
    requires = ("sgd", "plain_steps", "sent_start", "global_model")
    prevents: tuple[str, ...] = ("weighed_clients",)

    def __init__(self, params: ScaffoldParams) -> None:
        super().__init__(params)
        self.prevents = () if params.weighting == "samples" else self.prevents

    @hookimpl
    def start(self, task: fb.StartTask) -> None:
        """c = 0, of the weights only."""
        task.state[self.name] = {name: torch.zeros_like(x) for name, x in task.model.weights.items()}

    @hookimpl
    def broadcast(self, task: fb.BroadcastTask) -> fb.Broadcast:
        """The global weights and c."""
        control = task.state[self.name]
        return fb.Broadcast(task.weights, {CONTROL + name: control[name] for name in task.weights if name in control})

    @hookimpl
    def loss_terms(self, step: fb.LocalStep) -> Tensor | None:
        """⟨w − x, c − c_k⟩; none for a model that the client keeps."""
        return None if step.is_own else correction_term(step.weights, step.received, self._correction(step.task))

    @hookimpl
    def after_training(self, task: fb.ClientTask, update: fb.Update) -> fb.Tensors:
        """Keep c_k⁺ and send c_k⁺ − c_k, both as large as c."""
        drift = self._correction(task)
        if self.params.option == "I":
            # the gradient at x of this method's own term, which is no part of f_k, is the correction
            gradient = full_gradient(task)
            control = {name: gradient[name] - value for name, value in drift.items()}
        else:
            rates = rates_by_name(task.training, task.model, task.round)
            weight = gradient_weight(local_steps(task), task.training.momentum)
            control = {
                name: control_of_change(task.received[name], update.weights[name], value, rates[name] * weight)
                for name, value in drift.items()
            }
        before = task.state.get(self.name, {})
        task.state[self.name] = control
        return {CONTROL + name: new - before[name] if name in before else new for name, new in control.items()}

    @hookimpl
    def aggregate(self, task: fb.AggregationTask) -> fb.Tensors:
        """x and c of Algorithm 1: x by the mean over the cohort, c by the sum over N."""
        control, means = task.state[self.name], average(task, self.params.weighting)
        changes = {name: sum(u.payload[CONTROL + name] for u in task.updates) for name in task.weights}
        task.state[self.name] = {name: control[name] + change / task.num_clients for name, change in changes.items()}
        return {name: torch.lerp(x, means[name], self.params.server_lr) for name, x in task.weights.items()}

    def _correction(self, task: fb.ClientTask) -> fb.Tensors:
        control = {n.removeprefix(CONTROL): c for n, c in task.payload.items() if n.startswith(CONTROL)}
        return correction(control, task.state.get(self.name, {}))
