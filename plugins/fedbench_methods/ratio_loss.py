"""Ratio Loss - Wang, Xu, Wang, Zhu, "Addressing Class Imbalance in Federated Learning", AAAI 2021.

The server has a few labelled samples of every class. After a round it trains, for each class p, a copy of the model wᵗ
that the round began with on the samples of p alone, as a client trains; D_p (C, d) is what that changes in the output
layer's weight. How much class p stands out there says how little the federation has of it:
    S_p = {(i, j): D_p[i, j] is the largest of all classes', and no other reaches 80 % of it in absolute value}
    R_p = |Σ_{S_p} D_p| / |Σ_{S_p} mean_{q≠p} D_q|, at most `cap`, 10 where the denominator is 0
and the clients of the next round, sent the C numbers w_p = α + β R_p divided by their mean, minimise
    L = −(1/B) Σ_i w_{y_i} log p_{i, y_i}
In the first round all weights are 1: it is FedAvg's.

Answers: broadcast, local_loss, aggregate. Stacks with methods that answer none of these and keep no tensor private.
Requires server_labels, and a model with a linear head (`Model.head`). β = 0 and α = 1 is FedAvg, bit for bit
where clients train one after another.
`ratio=climb` is the form of CLIMB's authors, from one gradient at wᵗ,
    R_p = |mean_j (C − 1) D_p[p, j] / Σ_{q≠p} D_q[p, j]|, without the j where that sum is 0
Left open / contradicted, by the released code:
- It takes the first 63 training images of a class, which its clients train on too. Here the server's samples are no
  client's, unless scenario.server_source=shared.
- It averages clients without weights; here the run's `weighting` says.
- It takes log(softmax(o)), which is −∞ where the softmax underflows; here log_softmax.
- Its cap is 5000, which R_p reaches on CLIP features: a class weight of 501 makes training diverge. Here it is 50.
- It does not divide by the mean weight, which, often 2 to 4, then acts as a factor on the learning rate.
  `normalise=False` with `cap=5000` has the code's weights.
Copies are trained as many epochs (or steps) as the clients, by the run's optimiser. Left out: the monitor that
estimates the composition of the clients' data, which the loss does not use.
Cost: C trainings on one class's samples a round, on the server: 0.1 s of a core for convnet, 10 classes of 20 samples
at E = 5. C floats down to each client.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

import fedbench.api as fb
from fedbench.api import hookimpl, hyper
from fedbench.toolkit.fedavg import average, cross_entropy
from fedbench.toolkit.local_training import build_optimiser, round_table
from fedbench.toolkit.server_training import Course, granted, trained_copy
from fedbench_methods.shared.class_gradients import class_gradients

CLASS_WEIGHTS = "class_weights"
REACHED = 0.8
WITHOUT_OTHERS = 10.0
"""R_p where the other classes' change at p's positions sums to nothing."""


@dataclass(frozen=True, kw_only=True)
class RatioLossParams:
    """Hyper-parameters of Ratio Loss."""

    alpha: float = hyper(1.0, symbol="α", low=0.0, high=10.0, search=False, source="both released codes")
    beta: float = hyper(0.1, symbol="β", low=0.01, high=1.0, log=True, neutral=0.0, source="both released codes")
    ratio: Literal["released", "climb"] = hyper(
        "released", symbol="R", source="released: trained copies; climb: one gradient"
    )
    cap: float = hyper(
        50.0, symbol="R_max", low=1.0, high=1e6, log=True, search=False, needs="beta", source="released code 5000"
    )
    normalise: bool = hyper(
        True, symbol="w", source="whether the weights have mean 1; False with cap=5000: released code"
    )


def released_ratios(changes: Tensor, cap: float) -> Tensor:
    """R (C,) from the changes D (C, C, d) of the output layer, the first axis the class that was trained on."""
    # float64, since the others' sum is what is left of that over all classes
    classes, changes = len(changes), changes.double()
    largest = changes.argmax(dim=0)
    sizes = changes.abs()
    reach = (sizes >= REACHED * sizes.gather(0, largest[None])).sum(dim=0)
    # the largest reaches its own 80 %; a zero does as well, so nobody stands out where nothing changed
    stands_out = (largest == torch.arange(classes).to(largest)[:, None, None]) & (reach == 1)
    own = (changes * stands_out).sum(dim=(1, 2))
    others = (changes.sum(dim=0) - changes) / (classes - 1)
    return _quotient(own, (others * stands_out).sum(dim=(1, 2))).clamp(max=cap).float()


def climb_ratios(changes: Tensor, cap: float) -> Tensor:
    """R (C,) from the gradients D (C, C, d): row p of each, class p's over the sum of the others', mean over d."""
    classes, changes = torch.arange(len(changes)), changes.double()
    own = changes[classes, classes]
    others = changes.sum(dim=0) - own
    counted = others != 0
    quotients = torch.where(counted, (len(changes) - 1) * own / torch.where(counted, others, 1.0), 0.0)
    return _quotient(quotients.sum(dim=1), counted.sum(dim=1)).clamp(max=cap).float()


def _quotient(above: Tensor, below: Tensor) -> Tensor:
    """|above / below|, ``WITHOUT_OTHERS`` where ``below`` is 0."""
    return torch.where(below == 0, WITHOUT_OTHERS, (above / torch.where(below == 0, 1, below)).abs())


def weighted_cross_entropy(logits: Tensor, labels: Tensor, class_weights: Tensor) -> Tensor:
    """−(1/B) Σ_i w_{y_i} log p_{i, y_i} with weights w (C,): divided by the samples, not by their weights."""
    chosen = torch.log_softmax(logits, dim=1).gather(1, labels[:, None]).squeeze(1)
    return -(class_weights[labels] * chosen).mean()


class RatioLoss(fb.Method[RatioLossParams]):
    """Class weights from labelled samples at the server."""

    name = "ratio-loss"
    citation = "Wang et al., Addressing Class Imbalance in Federated Learning, AAAI 2021"
    requires = ("labels", "server_labels", "linear_head", "whole_model")

    @hookimpl
    def broadcast(self, task: fb.BroadcastTask) -> fb.Broadcast:
        """The global weights and, from round 2 on, the C class weights."""
        return fb.Broadcast(task.weights, dict(task.state.get(self.name, {})))

    @hookimpl
    def local_loss(self, step: fb.LocalStep) -> Tensor:
        """Cross-entropy weighted by class."""
        class_weights = step.task.payload.get(CLASS_WEIGHTS)
        if class_weights is None:
            return cross_entropy(step)
        return weighted_cross_entropy(step.outputs.logits, step.labels, class_weights)

    @hookimpl
    def aggregate(self, task: fb.AggregationTask) -> fb.Tensors:
        """FedAvg; and the class weights of the next round, from the model that this one began with."""
        server, params = granted(task), self.params
        assert server.labels is not None, "the harness grants what `requires` names"
        head = task.model.linear_head
        classes = range(len(task.weights[head.weight]))
        samples = [server.inputs.select(torch.nonzero(server.labels.cpu() == label).flatten()) for label in classes]
        if params.ratio == "climb":
            ratios = climb_ratios(self.gradients(task, head, samples), params.cap)
        else:
            ratios = released_ratios(self.trained_changes(task, head, samples), params.cap)
        weights = params.alpha + params.beta * ratios
        task.state[self.name] = {CLASS_WEIGHTS: weights / weights.mean() if params.normalise else weights}
        return average(task)

    def trained_changes(self, task: fb.AggregationTask, head: fb.LinearHead, samples: list[fb.InputSource]) -> Tensor:
        """D (C, C, d): what training on the samples of one class alone changes in the head's weight, class by class."""
        training, start = task.spec.training, fb.GlobalModel(task.weights, task.buffers)
        optimiser = partial(build_optimiser, training, round=task.round, lr_factors=task.model.lr_factors)
        changes = []
        for label, inputs in enumerate(samples):
            generator = task.generator("class-training", label)
            batches = round_table(len(inputs), training, generator)

            def gradient(logits: Tensor, index: Tensor, label: int = label) -> Tensor:
                residual = torch.softmax(logits, dim=1)
                residual[:, label] -= 1
                return residual / len(logits)

            found = trained_copy(task.model, start, inputs, gradient, Course(batches, optimiser))
            changes.append(found.weights[head.weight] - task.weights[head.weight])
        return torch.stack(changes)

    @torch.no_grad()
    def gradients(self, task: fb.AggregationTask, head: fb.LinearHead, samples: list[fb.InputSource]) -> Tensor:
        """D (C, C, d): the gradient of each class's cross-entropy with respect to the head's weight, at wᵗ."""
        tensors, found = {**task.weights, **task.buffers}, []
        for label, inputs in enumerate(samples):
            features = task.model.forward(tensors, inputs.read(torch.arange(len(inputs))), False).features
            of_class = torch.tensor([label], device=features.device)
            weight, bias = task.weights[head.weight], task.weights[head.bias]
            found.append(class_gradients(head.scale * features[None], of_class, weight, bias, head.scale).weight[0])
        return torch.stack(found)
