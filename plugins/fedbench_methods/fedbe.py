"""FedBE - Chen, Chao, "FedBE: Making Bayesian Model Ensemble Applicable to Federated Learning", ICLR 2021; arXiv
2009.01974.

The server takes the clients' models for draws from a distribution over global models, draws M more, and distils the
mean prediction of FedAvg's model w̄, the samples and the clients' own models back into w̄, on samples without labels:
    gaussian (released code), by tensor, u_k = (w_k − wᵗ) / ‖w_k − wᵗ‖ with plain mean ū and variance v over clients:
        w = wᵗ + ρ mean_k‖w_k − wᵗ‖ (ū + s √max(v, floor) ε),  ε ~ N(0, I)
    gaussian_paper:  w ~ N(w̄, diag Σ_k p_k (w_k − w̄)²),  p_k = n_k / Σ_j n_j
    dirichlet:  w = Σ_k γ_k w_k,  γ ~ Dir(a, ..., a)
    q̄ = mean over teachers of softmax(o),   q_c ∝ q̄_c^{1/T} (sharpened),   L = (1/b) Σ_i KL(q_i ‖ softmax(o_s,i))
by SGD, the weights averaged along the way (SWA); the average is the next global model.

Answers: aggregate. Stacks with methods that change what clients do and keep no tensor private. Requires server_data.
With steps = 0 it is FedAvg. Samples have w̄'s running statistics, since drawn variances may be negative; those of the
average are taken anew from the server's samples. A client whose tensor did not move is left out of its directions.
The released code, which does not run as it is, differs:
- Its v is at least 1e-5, for a large tensor more than v itself: the draw is isotropic noise. Floor here: 0.
- Its loss is the mean over classes as well, C times smaller (`reduction=mean`).
- Its budget is 1560 steps, averaged every 25 from step 500 on. Here it is 100, averaged over the same part of them.
- Its weights in w̄ are by position, right at full participation only. Here a participant has its own n_k.
Cost: M + S + 1 passes over the server's samples for S clients, `steps` steps a round: 1.0 s for convnet, S = 8, 200.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

import fedbench.api as fb
from fedbench.api import FedbenchError, hookimpl, hyper
from fedbench.toolkit import server_training as server
from fedbench.toolkit.fedavg import mean_model, participant_shares, weighted_mean

TeacherMix = Literal["gaussian", "gaussian_paper", "dirichlet"]
GAUSSIAN, DIRICHLET = {"teacher_mix": ("gaussian",)}, {"teacher_mix": ("dirichlet",)}


@dataclass(frozen=True, kw_only=True)
class FedBeParams:
    """Hyper-parameters of FedBE."""

    samples: int = hyper(10, symbol="M", low=0, high=100, search=(5, 20), source="paper and released code")
    teacher_mix: TeacherMix = hyper(
        "gaussian", symbol="p(w|D)", source="gaussian: released code; gaussian_paper, dirichlet: paper"
    )
    var_scale: float = hyper(
        0.1, symbol="s", low=0.0, high=10.0, search=(0.01, 1.0), when=GAUSSIAN, source="released code"
    )
    variance_floor: float = hyper(0.0, symbol="floor", low=0.0, high=1.0, search=False, source="released code 1e-5")
    step_length: float = hyper(1.0, symbol="ρ", low=0.1, high=10.0, log=True, search=False, source="released code")
    concentration: float = hyper(
        1.0, symbol="a", low=0.01, high=100.0, log=True, when=DIRICHLET, source="released code; every client's"
    )
    use_mean: bool = hyper(True, symbol="w̄", source="whether w̄ teaches; paper: yes")
    use_clients: bool = hyper(True, symbol="w_k", source="whether the w_k teach; use_client")
    sharpening: float = hyper(0.5, symbol="T", low=0.25, high=1.0, needs="steps", source="released code: squares")
    steps: int = server.steps_field("released code 20 epochs, 1560 steps")
    lr: float = server.rate_field("released code")
    momentum: float = hyper(0.9, symbol="ρ_s", low=0.0, high=0.99, search=False, source="released code")
    weight_decay: float = hyper(1e-5, symbol="λ_s", low=0.0, high=0.1, search=False, source="released code")
    batch_size: int = server.batch_field("released code")
    reduction: Literal["batch", "mean"] = hyper(
        "batch", symbol="L", source="batch: a divergence; mean: by C as well, released code"
    )
    swa_start: float = hyper(
        0.32, symbol="SWA", low=0.0, high=1.0, search=False, source="part of the steps; released 500 of 1560; 1: off"
    )
    swa_every: int = hyper(2, symbol="SWA freq", low=1, high=1000, search=False, source="released 25, of 1560 steps")


def unit_gaussian(clients: list[Tensor], received: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """ū, v (like ``received``) and the mean norm, of the clients' moves in one tensor; zeros where nobody moved."""
    moves = [move for move in (client - received for client in clients) if move.any()]
    if not moves:
        return torch.zeros_like(received), torch.zeros_like(received), received.new_zeros(())
    norms = torch.stack([torch.linalg.vector_norm(move) for move in moves])
    units = torch.stack([move / norm for move, norm in zip(moves, norms, strict=True)])
    return units.mean(dim=0), units.var(dim=0, correction=0), norms.mean()


def weighted_gaussian(clients: list[Tensor], shares: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of one tensor over the clients, by their ``shares`` (m,), which sum to one."""
    mean = weighted_mean(clients, shares)
    return mean, weighted_mean([(client - mean) ** 2 for client in clients], shares)


def sharpened(probabilities: Tensor, temperature: float) -> Tensor:
    """q_c ∝ q̄_c^{1/T}, rows of (n, C)."""
    powers = probabilities ** (1 / temperature)
    return powers / powers.sum(dim=1, keepdim=True)


def draw_models(task: fb.AggregationTask, params: FedBeParams) -> Iterator[fb.Tensors]:
    """The M sampled models' weights, one after another."""
    # in the order of names, which noise is drawn in: that of a run which was resumed is another
    clients = {name: [u.weights[name] for u in task.updates] for name in sorted(task.weights)}
    generator = task.generator("sampled-models")

    def noise(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator).to(like)

    if params.teacher_mix == "dirichlet":
        rng = fb.numpy_generator(task.spec.seed, "sampled-models", task.round, task.exchange)
        for gamma in rng.dirichlet([params.concentration] * len(task.updates), params.samples):
            yield {name: weighted_mean(values, torch.from_numpy(gamma)) for name, values in clients.items()}
        return
    if params.teacher_mix == "gaussian_paper":
        shares = participant_shares(task.updates, "samples")
        fitted = {name: weighted_gaussian(values, shares) for name, values in clients.items()}
        for _ in range(params.samples):
            yield {name: mean + variance.sqrt() * noise(mean) for name, (mean, variance) in fitted.items()}
        return
    units = {name: unit_gaussian(values, task.weights[name]) for name, values in clients.items()}
    for _ in range(params.samples):
        yield {
            name: task.weights[name]
            + params.step_length
            * norm
            * (mean + params.var_scale * variance.clamp(min=params.variance_floor).sqrt() * noise(mean))
            for name, (mean, variance, norm) in units.items()
        }


class FedBE(fb.Method[FedBeParams]):
    """Distils a Bayesian ensemble of clients on samples at the server, with averaged students."""

    name = "fedbe"
    citation = "Chen and Chao, FedBE: Bayesian Model Ensemble for Federated Learning, ICLR 2021"
    requires = ("server_data", "whole_model", "own_updates")

    def __init__(self, params: FedBeParams) -> None:
        if not (params.samples or params.use_mean or params.use_clients):
            raise FedbenchError("fedbe has no teacher; set samples above 0, use_mean or use_clients.")
        super().__init__(params)

    def teachers(self, task: fb.AggregationTask, mean: fb.GlobalModel) -> Iterator[fb.GlobalModel]:
        """FedAvg's model, the samples with its running statistics, and the clients' models."""
        if self.params.use_mean:
            yield mean
        for weights in draw_models(task, self.params):
            yield fb.GlobalModel(weights, mean.buffers)
        if self.params.use_clients:
            yield from server.client_models(task)

    def targets(self, task: fb.AggregationTask, inputs: fb.InputSource, mean: fb.GlobalModel) -> Tensor:
        """q (n, C): the sharpened mean prediction of all teachers for each of the server's n samples."""
        soft = partial(torch.softmax, dim=1)
        return sharpened(server.ensemble(task.model, self.teachers(task, mean), inputs, soft), self.params.sharpening)

    @hookimpl
    def aggregate(self, task: fb.AggregationTask) -> fb.GlobalModel:
        """FedAvg's model after `steps` of distillation: the average of the weights on the way."""
        params, inputs = self.params, server.granted(task).inputs
        start = mean_model(task, task.spec.training.weighting)
        targets = self.targets(task, inputs, start)
        generator = task.generator("distillation")
        course = server.Course(
            server.server_batches(len(inputs), params.batch_size, params.steps, generator),
            lambda weights: torch.optim.SGD(
                weights.values(), lr=params.lr, momentum=params.momentum, weight_decay=params.weight_decay
            ),
            averaged_from=max(1, round(params.swa_start * params.steps)) if params.swa_start < 1 else None,
            averaged_every=params.swa_every,
        )
        divisor = targets.shape[1] if params.reduction == "mean" else 1

        def gradient(logits: Tensor, index: Tensor) -> Tensor:
            return server.divergence_gradient(logits, targets[index]) / divisor

        return server.trained_copy(task.model, start, inputs, gradient, course)
