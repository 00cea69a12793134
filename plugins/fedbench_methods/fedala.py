"""FedALA - Zhang, Hua, Wang, Song, Xue, Ma, Guan, "FedALA: Adaptive Local Aggregation for Personalized Federated
Learning", AAAI 2023.

Client k keeps the weights θ_k that it trained last. In its last p layers it starts the next round not from the received
x but from a mixture, entry by entry, whose shares W in [0, 1] it learns first:
    θ̂ = θ_k + (x − θ_k) ⊙ W,     W ← clip(W − η ∇_θ̂ F_k(θ̂) ⊙ (x − θ_k), 0, 1)
on a share s of its samples, drawn anew; other layers start from x. W is one at first. In its second participation
passes go on until the last ten losses have a standard deviation below 0.1; in each later one there is a single pass.

Wraps: local_train (before it, the mixture), evaluate (own models by θ_k). So the start is of whatever a stack trains,
on the stack's loss. Stacks with any method but another personalisation. A pull to the received weights (fedprox) is to
the mixture; what takes the change x − y_k for a sum of gradients (scaffold, fednova) does not fit. What is averaged are
the θ_k, and the mean is the global model. Clients train one by one. Layers are by the names of the weights, a linear
head the last; of a prompt the whole.
Left open / contradicted: p counts layers here and tensors in released code, whose default of 2 is the head. That code
takes a contiguous slice of the samples, and leaves the mixture out where the sums of two tensors agree; here a random
subset, and in a client's first participation. Learning ends after 50 passes, converged or not (ours). Running
statistics do not move in it. The code scores the mixture before training, here θ_k after it. A client's θ_k and W stay
where the update was lost.
Cost: a pass over that share of the samples a round, no byte more; a copy of the weights a client, and of W, saved with
the run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

import fedbench.api as fb
from fedbench.toolkit.layers import last_layers
from fedbench.toolkit.local_training import batch_at, batch_table, step_loss
from fedbench.toolkit.wrapping import Evaluate, Train, of_own, own_predictions, own_step

WEIGHTS, BUFFERS, SHARES = "weights/", "buffers/", "shares/"
SPREAD, WINDOW, MOST_PASSES = 0.1, 10, 50


@dataclass(frozen=True, kw_only=True)
class FedAlaParams:
    """Hyper-parameters of FedALA."""

    layers: int = fb.hyper(1, symbol="p", low=1, high=100, search=False, source="released code: the head")
    rate: float = fb.hyper(
        1.0, symbol="η", low=1e-3, high=100.0, log=True, search=(0.1, 10.0), source="released code: 1"
    )
    sampled: float = fb.hyper(0.8, symbol="s", low=0.05, high=1.0, search=False, source="released code: 80 %")


def mixed(kept: Tensor, received: Tensor, share: Tensor) -> Tensor:
    """θ̂ = θ + (x − θ) ⊙ W, all of one shape; x itself, to the bit, where W is one."""
    return torch.lerp(kept, received, share)


def next_share(share: Tensor, gradient: Tensor, kept: Tensor, received: Tensor, rate: float) -> Tensor:
    """clip(W − η ∇F(θ̂) ⊙ (x − θ), 0, 1), all of one shape."""
    return (share - rate * gradient * (received - kept)).clamp(0, 1)


class FedALA(fb.Method[FedAlaParams]):
    """Clients start from a learned mixture of the global weights and their last ones."""

    name = "fedala"
    citation = "Zhang et al., FedALA: Adaptive Local Aggregation for Personalized FL, AAAI 2023"
    role = "personalisation"
    keeps_lost_training = True
    prevents = ("plain_steps", "sent_start")

    @fb.wrapper
    def local_train(self, task: fb.ClientTask, rest: Train) -> fb.Update:
        """Training from the mixture, in a client's first participation from x; θ_k and W are kept."""
        kept = task.state.get(self.name)
        start, shares = task.received, fb.Tensors()
        if kept is not None:
            top = last_layers(task.model, self.params.layers)
            own = {name: value for name, value in of_own(kept, WEIGHTS).items() if name in top}
            shares = self._learned(task, own, of_own(kept, SHARES))
            start = {**start, **{name: mixed(value, start[name], shares[name]) for name, value in own.items()}}
        update = rest(replace(task, received=start))
        parts = ((WEIGHTS, update.weights), (BUFFERS, update.buffers), (SHARES, shares))
        task.state[self.name] = {prefix + name: t for prefix, tensors in parts for name, t in tensors.items()}
        return update

    @fb.wrapper
    def evaluate(self, task: fb.EvaluationTask, rest: Evaluate) -> fb.Predictions:
        """The mean as global model; own models by θ_k."""

        def own(client: int) -> tuple[fb.Tensors, fb.Tensors]:
            kept = task.client_state.get(client, {}).get(self.name)
            return (task.weights, task.buffers) if kept is None else (of_own(kept, WEIGHTS), of_own(kept, BUFFERS))

        return own_predictions(task, rest, own)

    def _learned(self, task: fb.ClientTask, own: fb.Tensors, shares: fb.Tensors) -> fb.Tensors:
        """W by name, from the ``shares`` of the client's last participation, if it has learned some, and θ ``own``."""
        passes = 1 if shares else MOST_PASSES
        shares = shares or {name: torch.ones_like(value) for name, value in own.items()}
        generator, noise, count = task.generator("ala"), task.generator("augmentation of ala"), len(task.inputs)
        chosen = torch.randperm(count, generator=generator)[: max(round(self.params.sampled * count), min(count, 2))]
        losses: list[float] = []
        while len(losses) < passes and not (len(losses) > WINDOW and _spread(losses[-WINDOW:]) < SPREAD):
            for number, index in enumerate(batch_table(len(chosen), 1, task.training.batch_size, generator)):
                leaves = {n: mixed(t, task.received[n], shares[n]).detach().requires_grad_() for n, t in own.items()}
                buffers = {name: value.clone() for name, value in task.buffers.items()}
                batch = batch_at(task, chosen[index], noise)
                step = fb.LocalStep({**task.received, **leaves}, buffers, batch, task, number)
                loss = step_loss(own_step(step, step.weights, buffers))
                found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
                shares = {
                    n: shares[n] if g is None else next_share(shares[n], g, own[n], task.received[n], self.params.rate)
                    for n, g in zip(leaves, found, strict=True)
                }
            losses.append(float(loss.detach()))
        return shares


def _spread(losses: list[float]) -> float:
    """Their standard deviation, over the number of them."""
    return float(torch.tensor(losses).std(unbiased=False))
