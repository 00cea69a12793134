"""FedDF - Lin, Kong, Stich, Jaggi, "Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS 2020.

The server starts a student from the mean of the K participants' models and lets it learn what their ensemble says of
samples without labels: with o_k the logits of client k's model and o_s the student's,
    q = softmax((1/K) Σ_k o_k / T)  (avg_logits)   or   q = (1/K) Σ_k softmax(o_k / T)  (avg_probs)
    L = (1/b) Σ_i KL(q_i ‖ softmax(o_s,i / T)),  times T² with t_squared
by Adam on batches of the server's samples, gradients clipped, the rate falling to zero by half a cosine.

Answers: aggregate. Stacks with methods that change what clients do and keep no tensor private. Requires server_data.
Left open / contradicted:
- The released code starts from the plain mean of the clients' weights, Algorithm 1 from FedAvg's (`student_start`).
- The code has no T², here it is on: without it a higher T is also a T² times smaller gradient (Hinton et al. 2015).
- By labelled data the code stops early, takes the best student and can drop teachers. Here there are none.
The student trains on batch statistics, its teachers answer in eval mode: with batch-norm it moves even where all agree.
For avg_logits on a linear head over frozen features it is the uniform mean exactly. There avg_probs fits head-biased
clients fully, below the mean: longtail-full, CLIP features, seed 0: 52.1 against 66.0. That is the method's doing.
Cost: K + 1 models in memory, K passes over the server's samples, `steps` steps a round: 0.9 s for convnet, K = 8, 200.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from fedbench.api import AggregationTask, GlobalModel, InputSource, Method, hookimpl, hyper
from fedbench.toolkit import server_training as server
from fedbench.toolkit.fedavg import mean_model

Scheme = Literal["avg_logits", "avg_probs", "avg_losses"]


@dataclass(frozen=True, kw_only=True)
class FedDfParams:
    """Hyper-parameters of FedDF."""

    steps: int = server.steps_field("released code 10 000, stopped early on labelled data")
    scheme: Scheme = hyper(
        "avg_logits", symbol="q", source="Eq. 3 and released README: avg_logits; its code falls back to avg_losses"
    )
    temperature: float = hyper(1.0, symbol="T", low=1.0, high=4.0, needs="steps", source="released code 1")
    t_squared: bool = hyper(True, symbol="T²", source="Hinton et al. 2015; released code: without, at T = 1 the same")
    lr: float = server.rate_field("released code")
    batch_size: int = server.batch_field("released code 128, in its README 64")
    clip: float = hyper(5.0, symbol="‖g‖", low=0.1, high=100.0, log=True, search=False, source="released code")
    student_start: Literal["uniform", "fedavg"] = hyper(
        "uniform",
        symbol="x_{t,0}",
        neutral="fedavg",
        source="uniform: released code; fedavg: Algorithm 1, weighted by n_k",
    )


def soften(logits: Tensor, temperature: float) -> Tensor:
    """softmax(o / T) over the classes of ``logits`` (n, C)."""
    return torch.softmax(logits / temperature, dim=1)


def student_gradient(logits: Tensor, targets: Tensor, temperature: float, t_squared: bool) -> Tensor:
    """Of the batch's L with respect to the student's logits; all (b, C)."""
    return (temperature**2 if t_squared else 1.0) * server.divergence_gradient(logits, targets, temperature)


class FedDF(Method[FedDfParams]):
    """Distils the ensemble of clients on samples at the server."""

    name = "feddf"
    citation = "Lin et al., Ensemble Distillation for Robust Model Fusion, NeurIPS 2020"
    requires = ("server_data", "whole_model", "own_updates")

    def targets(self, task: AggregationTask, inputs: InputSource) -> Tensor:
        """q (n, C): what the ensemble says of each of the server's n samples."""
        soft = partial(soften, temperature=self.params.temperature)
        teachers = server.client_models(task)
        if self.params.scheme == "avg_logits":
            return soft(server.ensemble(task.model, teachers, inputs, lambda logits: logits))
        return server.ensemble(task.model, teachers, inputs, soft)

    @hookimpl
    def aggregate(self, task: AggregationTask) -> GlobalModel:
        """The student: the mean model after `steps` of distillation, with the running statistics it met."""
        params, inputs = self.params, server.granted(task).inputs
        plain = params.student_start == "uniform"
        start = mean_model(task, "uniform" if plain else task.spec.training.weighting)
        targets = self.targets(task, inputs)
        generator = task.generator("distillation")
        course = server.Course(
            server.server_batches(len(inputs), params.batch_size, params.steps, generator),
            lambda weights: torch.optim.Adam(weights.values(), lr=params.lr),
            cosine=True,
            clip=params.clip,
        )

        def gradient(logits: Tensor, index: Tensor) -> Tensor:
            return student_gradient(logits, targets[index], params.temperature, params.t_squared)

        return server.trained_copy(task.model, start, inputs, gradient, course)
