"""CCVR - Luo, Chen, Hu, Zhang, Liang, Feng, "No Fear of Heterogeneity: Classifier Calibration for Federated Learning
with Non-IID Data", NeurIPS 2021.

Training is FedAvg's, bit for bit. After the last round, with the global model, once:
    client k, class c:  n_ck, μ_ck, S_ck   count, mean, unbiased covariance of its features z
    server:  μ_c = Σ_k n_ck μ_ck / n_c
             S_c = Σ_k (n_ck - 1)/(n_c - 1) S_ck + Σ_k n_ck/(n_c - 1) μ_ck μ_ckᵀ - n_c/(n_c - 1) μ_c μ_cᵀ
             M_c features drawn from N(μ_c, S_c) a class; the head alone is trained on them by cross-entropy
Evaluated is the global model with that head, after the last round; before it, the global model.

Answers: survey, report, reported, evaluate. Stacks with every method that leaves those to it and trains a model
with a linear head (`Model.head`), whose fixed scale s counts: it is trained on s z. With virtual_features=0 or
epochs=0 it is FedAvg in what it predicts and sends, too.
No official code. Left open: the steps of the head (the paper's are not known to us; default are those of a script that
compares on CIFAR-LT: 50 epochs, lr 0.01, batch 256; another library has 1 epoch, 0.1, 64), and whether it goes on from
the global head (`head_start=warm`, as all re-implementations do) or from a new one (`fresh`). Two of these feed
covariances over n into the formula above, which needs those over n - 1; others pool variances, or classes together.
Features of the paper pass ReLU and Tukey's power 1/2: `power=0.5` does that to the features that are reported and to
those that the head reads at the end; default is as they are, since not every backbone ends in a ReLU. Classes with
fewer samples than d have a singular covariance, which is drawn from as it is; `shrinkage` blends in a sphere of the
same trace. Features are taken in eval mode, not augmented. Classes that nobody owns get no features.
Cost: C (d + d (d + 1)/2) floats a client at most, 50 MiB for C=100, d=512, and one model down to each. Privacy: the
mean of a client's only sample of a class is that sample's feature.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

import fedbench.api as fb
from fedbench.api import hookimpl, hyper
from fedbench.models.heads import scaled_logits
from fedbench.toolkit.heads import fresh_head, largest_logit_with_kept_head, retrained
from fedbench.toolkit.prototypes import client_features
from fedbench_methods.shared.gaussians import class_report, drawn, pooled_by_class, shrunk


@dataclass(frozen=True, kw_only=True)
class CCVRParams:
    """Hyper-parameters of CCVR."""

    virtual_features: int = hyper(
        100,
        symbol="M_c",
        low=1,
        high=10000,
        log=True,
        neutral=0,
        search=(50, 2000),
        needs="epochs",
        source="a class; paper 100 on CIFAR-10, 500 on CIFAR-100; re-implementations 100 to 2000",
    )
    epochs: int = hyper(
        50, symbol="E_c", low=1, high=1000, log=True, neutral=0, search=(1, 50), source="RUCR's script; others 1, 10"
    )
    lr_head: float = hyper(
        0.01,
        symbol="η_c",
        low=1e-4,
        high=1.0,
        log=True,
        search=(1e-3, 1e-1),
        needs="epochs",
        source="RUCR's script; others 0.001, 0.1",
    )
    batch_size: int = hyper(256, symbol="b_c", low=1, high=10000, search=False, source="RUCR's script; another 64")
    head_start: Literal["warm", "fresh"] = hyper(
        "warm", symbol="φ̂", source="not given; warm, from the global head, in all code"
    )
    shrinkage: float = hyper(
        0.0, symbol="ρ", low=1e-3, high=1.0, log=True, off=0.0, needs="epochs", source="not in the paper; 0: S_c"
    )
    power: float = hyper(
        1.0, symbol="β", low=0.1, high=1.0, search=False, source="Tukey's; paper ReLU and 0.5; 1: features as they are"
    )


def tukey(features: Tensor, power: float) -> Tensor:
    """max(z, 0)^β entry by entry, (n, d); at β = 1 the features themselves, negative ones too."""
    return features if power == 1 else features.clamp(min=0) ** power


def with_powers(model: fb.Model, head: fb.LinearHead, power: float) -> fb.Model:
    """The model whose features, and what its head reads, are ``tukey`` of what they were; itself at power 1."""
    if power == 1:
        return model

    def forward(tensors: fb.Tensors, inputs: Tensor, training: bool) -> fb.Outputs:
        features = tukey(model.forward(tensors, inputs, training).features, power)
        return fb.Outputs(scaled_logits(features, tensors[head.weight], tensors[head.bias], head.scale), features)

    return replace(model, forward=forward)


def virtual_features(
    reports: Collection[fb.Tensors], count: int, shrinkage: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """The k classes (k,) int64 that clients report and ``count`` features of each one's N(μ_c, S_c), (k, m, d).

    S_c is shrunk first. Class by class, since all C covariances at once would be C d² float64.
    """
    classes, features = [], []
    for label, gaussian in pooled_by_class(reports):
        blended = replace(gaussian, covariance=shrunk(gaussian.covariance, shrinkage))
        classes.append(label)
        features.append(drawn(blended, count, generator).float())
    return torch.tensor(classes), torch.stack(features)


class CCVR(fb.Method[CCVRParams]):
    """Calibrates the classifier on virtual features, once at the end."""

    name = "ccvr"
    citation = "Luo et al., No Fear of Heterogeneity: Classifier Calibration, NeurIPS 2021"
    requires = ("labels", "linear_head", "sent_head")

    @hookimpl
    def survey(self, round: int, spec: fb.RunSpec, state: Mapping[str, fb.Tensors]) -> str:
        """Everyone, after the last round; nobody where the head is not calibrated."""
        calibrates = self.params.virtual_features > 0 and self.params.epochs > 0
        return "everyone" if calibrates and round > spec.training.rounds else "nobody"

    @hookimpl
    def report(self, task: fb.ClientTask) -> fb.Tensors:
        """Mean and unbiased covariance of each class the client owns, and its counts."""
        model = with_powers(task.model, task.model.linear_head, self.params.power)
        features = client_features(replace(task, model=model), task.received, task.buffers)
        return class_report(features, task.visible_labels, len(task.visible_counts))

    @hookimpl
    def reported(self, task: fb.ReportedTask) -> None:
        """Pool the reports, draw features of each class and train the head on them."""
        params, head = self.params, task.model.linear_head
        generator = task.generator("classifier-calibration")
        reports = list(task.reports.values())
        classes, features = virtual_features(reports, params.virtual_features, params.shrinkage, generator)
        weight, bias = task.weights[head.weight], task.weights[head.bias]
        if params.head_start == "fresh":
            # of the head W v + s b it is s b that starts in ±1/√d
            num_classes, width = weight.shape
            new_weight, new_bias = fresh_head(num_classes, width, generator)
            weight, bias = new_weight.to(weight.device), new_bias.to(bias.device) / head.scale
        weight, bias = retrained(
            head.scale * features,
            weight,
            bias,
            head.scale,
            params.epochs,
            params.lr_head,
            generator,
            classes=classes.to(weight.device),
            batch_size=params.batch_size,
        )
        task.state[self.name] = {"head.weight": weight, "head.bias": bias}

    @hookimpl
    def evaluate(self, task: fb.EvaluationTask) -> fb.Predictions:
        """The largest logit with the calibrated head, once there is one; a fine-tuned model keeps its own."""
        calibrated = self.name in task.state and task.client is None
        model = with_powers(task.model, task.model.linear_head, self.params.power) if calibrated else task.model
        return largest_logit_with_kept_head(replace(task, model=model), self.name)
