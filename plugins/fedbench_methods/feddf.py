"""FedDF - Lin, Kong, Stich, Jaggi, "Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS 2020.

The server starts a student from the mean of the K participants' models and lets it learn what their ensemble says of
samples without labels: with o_k the logits of client k's model and o_s the student's,
    q = softmax((1/K) Σ_k o_k / T)  (avg_logits)   or   q = (1/K) Σ_k softmax(o_k / T)  (avg_probs)
    L = (1/b) Σ_i KL(q_i ‖ softmax(o_s,i / T)),  times T² with t_squared
by Adam on batches of the server's samples, gradients clipped, the rate falling to zero by half a cosine.

Answers: aggregate. Stacks with methods that change what clients do and keep no tensor private. Requires server_data.
Left open / contradicted:
- The released code starts from the plain mean of the clients' weights, Algorithm 1 from FedAvg's (`student_start`).
- The code has no T², here it is on: without it a higher T is also a T² times smaller gradient (Hinton et al. 2015). At
  T = 1, the default of both, it is the same.
- The code's fall-back avg_losses differs from avg_probs by a constant in the loss: its steps are the same.
- By labelled validation data the code stops early, takes the best student and can drop teachers below 1.2 times chance.
  With unlabelled data only there are fixed steps, the last student, and all teachers.
Teachers answer in eval mode, the student trains in train mode on batch statistics, so with
batch-norm it moves even where all teachers agree with it; without, its gradient is then exactly zero. So it is, always,
for avg_logits on a linear head over frozen features: the mean head has the mean logits, and FedDF is the uniform mean.
There avg_probs differs, and by Adam at 1e-3 fits the ensemble of head-biased clients fully, well below the mean: suite
longtail-full, CLIP features, seed 0: 52.1 against 66.0 (60.8 at lr 1e-4, 63.5 at T = 4). That is the method's doing.
Cost: K + 1 models in memory, K forward passes over the server's samples and `steps` steps a round: 0.9 s of a core for
convnet, 8 teachers and 200 samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from fedbench.api import AggregationTask, GlobalModel, InputSource, Method, hookimpl, hyper
from fedbench.toolkit.fedavg import mean_model
from fedbench.toolkit.server_training import (
    Course,
    batch_field,
    client_models,
    divergence_gradient,
    ensemble,
    granted,
    rate_field,
    server_batches,
    steps_field,
    trained_copy,
)

Scheme = Literal["avg_logits", "avg_probs", "avg_losses"]


@dataclass(frozen=True, kw_only=True)
class FedDfParams:
    """Hyper-parameters of FedDF."""

    steps: int = steps_field("released code 10 000, stopped early on labelled data")
    scheme: Scheme = hyper(
        "avg_logits", symbol="q", source="Eq. 3 and released README: avg_logits; its code falls back to avg_losses"
    )
    temperature: float = hyper(1.0, symbol="T", low=1.0, high=4.0, needs="steps", source="released code 1")
    t_squared: bool = hyper(True, symbol="T²", source="Hinton et al. 2015; released code: without, at T = 1 the same")
    lr: float = rate_field("released code")
    batch_size: int = batch_field("released code 128, in its README 64")
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
    return (temperature**2 if t_squared else 1.0) * divergence_gradient(logits, targets, temperature)


class FedDF(Method[FedDfParams]):
    """Distils the ensemble of clients on samples at the server."""

    name = "feddf"
    citation = "Lin et al., Ensemble Distillation for Robust Model Fusion, NeurIPS 2020"
    Params = FedDfParams
    requires = ("server_data", "whole_model")

    def targets(self, task: AggregationTask, inputs: InputSource) -> Tensor:
        """q (n, C): what the ensemble says of each of the server's n samples."""
        soft = partial(soften, temperature=self.params.temperature)
        teachers = client_models(task)
        if self.params.scheme == "avg_logits":
            return soft(ensemble(task.model, teachers, inputs, lambda logits: logits))
        return ensemble(task.model, teachers, inputs, soft)

    @hookimpl
    def aggregate(self, task: AggregationTask) -> GlobalModel:
        """The student: the mean model after `steps` of distillation, with the running statistics it met."""
        params, inputs = self.params, granted(task).inputs
        plain = params.student_start == "uniform"
        start = mean_model(task, "uniform" if plain else task.spec.training.weighting)
        targets = self.targets(task, inputs)
        generator = task.generator("distillation")
        course = Course(
            server_batches(len(inputs), params.batch_size, params.steps, generator),
            lambda weights: torch.optim.Adam(weights.values(), lr=params.lr),
            cosine=True,
            clip=params.clip,
        )

        def gradient(logits: Tensor, index: Tensor) -> Tensor:
            return student_gradient(logits, targets[index], params.temperature, params.t_squared)

        return trained_copy(task.model, start, inputs, gradient, course)
