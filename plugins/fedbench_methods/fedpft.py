"""FedPFT - Beitollahi, Bie, Hemati, Brunswic, Li, Chen, Zhang, "Parametric Feature Transfer: One-shot Federated
Learning with Foundation Models", arXiv 2402.01862, 2024.

Once, before round 1, every client reports a mixture of Gaussians of the frozen features of each class it has:
    G_kc = Σ_j π_kcj N(μ_kcj, Σ_kcj), fitted by expectation-maximisation, and n_kc, the number of its samples
The server draws n_kc features from each G_kc and trains the linear head on all of them by cross-entropy. No client
computes a gradient. `then=stop`: that is all, in every round clients send the head back as it is (rounds=0 saves even
that). `then=train`: round 1 begins from that head and training goes on as the rest of the stack does it.

Answers: survey, report, reported. Wraps: broadcast, local_train, evaluate. Stacks with methods that leave the head a
linear one on frozen features, shared by all; what they change of training matters with then=train alone.
Left open / contradicted: a re-implementation by the first author, whose settings are the defaults (one component,
spherical, float16, AdamW 1e-4, 50 epochs of batches of 32), reports only classes with more than K samples: in long
tails whole classes vanish (`rare=drop`). Here such a class has as many components as samples. Every variance has 1e-6
added, as in its library; so float16, which rounds below 6e-8 to zero, keeps it. Features are those that the model's
head reads, unit vectors with CLIP; drawn ones are not brought back to unit length. Components start from clusters by
k-means. The head starts anew as there (`head_start`).
Privacy: the mean of a client's only sample of a class is that sample's feature.
Cost: a component has 1 + d numbers and 1, d or d (d + 1)/2 of its covariance; the model goes down to all clients once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

import fedbench.api as fb
from fedbench.api import hyper
from fedbench.toolkit.heads import fresh_head
from fedbench.toolkit.local_training import trained
from fedbench.toolkit.prototypes import client_features
from fedbench.toolkit.wrapping import Evaluate, Send, Train
from fedbench_methods.shared.mixtures import Kind, class_mixtures, drawn_classes


@dataclass(frozen=True, kw_only=True)
class FedPFTParams:
    """Hyper-parameters of FedPFT."""

    components: int = hyper(1, symbol="K", low=1, high=100, search=(1, 10), source="re-implementation: 1")
    covariance: Kind = hyper("spherical", symbol="Σ", source="re-implementation: spherical")
    rare: Literal["keep", "drop"] = hyper("keep", symbol="n_kc ≤ K", source="keep: ours; drop: re-implementation")
    precision: Literal["float16", "float32"] = hyper("float16", symbol="bits", source="re-implementation: float16")
    epochs: int = hyper(50, symbol="E", low=1, high=1000, search=(10, 100), source="re-implementation: 50")
    lr_head: float = hyper(1e-4, symbol="η", low=1e-5, high=0.1, log=True, search=(1e-4, 1e-2), source="the same")
    batch_size: int = hyper(32, symbol="b", low=1, high=10000, search=False, source="the same")
    head_start: Literal["fresh", "warm"] = hyper("fresh", symbol="W⁰", source="the same; warm: the model's own head")
    then: Literal["stop", "train"] = hyper("stop", symbol="T", source="one-shot; train: ours")


@torch.enable_grad()
def trained_head(
    features: Tensor,
    labels: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    epochs: int,
    lr: float,
    batch_size: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Weight (C, d) and bias (C,) after epochs of AdamW on the mean cross-entropy of ``features`` (n, d)."""
    weight, bias = weight.detach().clone().requires_grad_(), bias.detach().clone().requires_grad_()
    optimiser = torch.optim.AdamW([weight, bias], lr=lr)
    for _ in range(epochs):
        order = torch.randperm(len(features), generator=generator).to(features.device)
        for index in torch.split(order, batch_size):
            logits = torch.nn.functional.linear(features[index], weight, bias)
            loss = torch.nn.functional.cross_entropy(logits, labels[index])
            weight.grad, bias.grad = torch.autograd.grad(loss, (weight, bias))
            optimiser.step()
    return weight.detach(), bias.detach()


class FedPFT(fb.Method[FedPFTParams]):
    """Trains the head at the server on features drawn from the clients' mixtures."""

    name = "fedpft"
    citation = "Beitollahi et al., Parametric Feature Transfer: One-shot FL with Foundation Models, 2024"
    role = "aggregation"
    requires = ("labels", "linear_head", "pretrained", "whole_model")
    prevents: tuple[str, ...] = ("sent_steps", "plain_steps", "sent_weights")

    def __init__(self, params: FedPFTParams) -> None:
        super().__init__(params)
        self.prevents = () if params.then == "train" else self.prevents

    @fb.hookimpl
    def survey(self, round: int, spec: fb.RunSpec, state: Mapping[str, fb.Tensors]) -> str:
        """Everyone, once."""
        return "everyone" if round == 1 else "nobody"

    @fb.hookimpl
    def report(self, task: fb.ClientTask) -> fb.Tensors:
        """The mixtures of the client's classes."""
        params, features = self.params, client_features(task, task.received, task.buffers)
        least = params.components + 1 if params.rare == "drop" else 1
        sent = class_mixtures(
            features, task.visible_labels, len(task.visible_counts), params.components, params.covariance, least,
            task.generator("mixtures"),
        )  # fmt: skip
        dtype = torch.float16 if params.precision == "float16" else torch.float32
        return {name: value.to(dtype) if value.is_floating_point() else value for name, value in sent.items()}

    @fb.hookimpl
    def reported(self, task: fb.ReportedTask) -> None:
        """Draw features of all clients and classes, and train the head on them."""
        params, head, generator = self.params, task.model.linear_head, task.generator("feature transfer")
        weight, bias = task.weights[head.weight], task.weights[head.bias]
        features, labels = drawn_classes(list(task.reports.values()), params.covariance, generator)
        if not len(labels):
            return
        if params.head_start == "fresh":
            drawn, offsets = fresh_head(weight.shape[0], weight.shape[1], generator)
            # of the head W v + s b, v = s z, it is s b that is trained
            weight, bias = drawn.to(weight), offsets.to(bias) / head.scale
        weight, bias = trained_head(
            head.scale * features.to(weight), labels.to(weight.device), weight, head.scale * bias,
            epochs=params.epochs, lr=params.lr_head, batch_size=params.batch_size, generator=generator,
        )  # fmt: skip
        task.state[self.name] = {head.weight: weight, head.bias: bias / head.scale}

    @fb.wrapper
    def broadcast(self, task: fb.BroadcastTask, rest: Send) -> fb.Broadcast:
        """The stack's, in round 1 with the head trained at the server."""
        is_first = (task.round, task.exchange) == (1, 0)
        head = task.state.get(self.name, {}) if is_first or self.params.then == "stop" else {}
        sent = rest(task)
        return replace(sent, weights={**sent.weights, **head})

    @fb.wrapper
    def local_train(self, task: fb.ClientTask, rest: Train) -> fb.Update:
        """Nothing, or what the stack does."""
        if self.params.then == "train":
            return rest(task)
        return trained(task, dict(task.received), dict(task.buffers), 0.0)

    @fb.wrapper
    def evaluate(self, task: fb.EvaluationTask, rest: Evaluate) -> fb.Predictions:
        """The stack's, by the head trained at the server where nothing else is trained; a fine-tuned one is kept."""
        if self.params.then == "train" or task.client is not None or task.is_unseen:
            return rest(task)
        return rest(replace(task, weights={**task.weights, **task.state.get(self.name, {})}))
