"""BalanceFL - Shuai, Shen, Jiang, Zhao, Yan, Xing, "BalanceFL: Addressing Class Imbalance in Long-Tail Federated
Learning", IPSN 2022.

Clients train as if their classes were balanced, and keep what the received model knows of classes that they lack. With
P the classes present and the others, N, absent, o the logits, o^g the received model's:
    L = CE(softmax_P(o), y) + λ H(softmax_N(o^g / T), softmax_N(o / T)) − μ Σ_i H(softmax_P(o_i))
Classes are sampled alike often, and a sample of a class with few is moved in feature space, with probability
1 − n_y / max_c n_c: the head reads z + e in the first term, e ~ N(0, Σ), Σ the mean of the classes' covariances of
received features, weighted by n_c.

Answers: local_loss, after_training (forgets the features of the round). Stacks with methods that change the model, add
terms or aggregate otherwise. Needs a linear head, unless `augment=false`.
Left open / contradicted: absent are, by the paper's idea, classes that the client lacks (`absent=client`); the released
loss takes those that the batch lacks (`absent=batch`), so that with 32 samples of 100 classes most of what a client has
is distilled as well. There is no factor T² in it (H is a cross-entropy), nor here. Its entropy is a sum over the batch,
so that μ acts B times as much as on a mean; kept. Balanced sampling is by weights n / (C_k n_y) of the samples here,
C_k the number of its classes, the same in expectation, which leaves the order of samples to the run. Its teacher is in
train mode; here in eval mode. Of its 500 noise vectors, drawn once a round and used in turn, every step draws its own
here. Its second stage (the classifier once more) is off in its configuration. The paper's λ is not known to us: 1.
Clients train one after another (the loss draws), unless `augment=false`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

import fedbench.api as fb
from fedbench.api import hyper
from fedbench.models.heads import scaled_logits
from fedbench.toolkit.prototypes import client_features

OUT = -1e9
"""The logit of a class that a softmax leaves out; finite, so that one without any class has a gradient of zero."""


@dataclass(frozen=True, kw_only=True)
class BalanceFLParams:
    """Hyper-parameters of BalanceFL."""

    lam: float = hyper(1.0, symbol="λ", low=0.01, high=100.0, log=True, off=0.0, search=(0.1, 10.0), source="ours")
    temperature: float = hyper(2.0, symbol="T", low=0.5, high=10.0, needs="lam", source="released code: e.g. 2")
    entropy: float = hyper(0.002, symbol="μ", low=1e-4, high=0.1, log=True, off=0.0, source="released code: 0.002")
    absent: Literal["client", "batch"] = hyper("client", symbol="N", source="client: the paper; batch: released code")
    balanced: bool = hyper(True, symbol="n/(C_k n_y)", source="a sampler in the released code")
    augment: bool = hyper(True, symbol="Σ", source="released code")


def inherited(logits: Tensor, received: Tensor, absent: Tensor, temperature: float) -> Tensor:
    """H over the ``absent`` classes (C,) bool by sample, (b,), of ``logits`` and ``received``, (b, C); 0 for none."""
    ours, theirs = (torch.where(absent, each / temperature, OUT) for each in (logits, received))
    return -(torch.softmax(theirs, 1) * torch.log_softmax(ours, 1) * absent).sum(1)


def log_shares(logits: Tensor, present: Tensor) -> Tensor:
    """log softmax over the ``present`` classes (C,) bool of ``logits`` (b, C)."""
    return torch.log_softmax(torch.where(present, logits, OUT), 1)


def sample_weights(labels: Tensor, counts: Tensor) -> Tensor:
    """n / (C_k n_y) of ``labels`` (b,), by the client's ``counts`` (C,): each of its C_k classes weighs the same."""
    return (counts.sum() / ((counts > 0).sum() * counts.clamp(min=1)))[labels]


def deviations(features: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
    """Rows (n, d) of which Σ_i ε_i row_i, ε ~ N(0, 1), has covariance Σ_c (n_c / n) cov_c of ``features`` (n, d)."""
    sums = features.new_zeros(len(counts), features.shape[1]).index_add(0, labels, features)
    apart = features - (sums / counts.clamp(min=1)[:, None])[labels]
    owned = counts[labels].to(features)
    # a class's covariance is over n_c - 1; a single sample is its class's mean
    return apart * (owned / (owned - 1).clamp(min=1) / len(features)).sqrt()[:, None]


class BalanceFL(fb.Method[BalanceFLParams]):
    """Balances the classes a client has and inherits what it lacks."""

    name = "balancefl"
    citation = "Shuai et al., BalanceFL: Addressing Class Imbalance in Long-Tail Federated Learning, IPSN 2022"
    requires: tuple[str, ...] = ("labels", "linear_head")

    def __init__(self, params: BalanceFLParams) -> None:
        super().__init__(params)
        if not params.augment:
            self.requires = ("labels",)

    @fb.hookimpl
    def local_loss(self, step: fb.LocalStep) -> Tensor:
        """All three terms, means over the batch but for the last."""
        params, labels, logits, counts = self.params, step.labels, step.outputs.logits, step.task.visible_counts
        owned = counts > 0
        if params.absent == "batch":
            owned = torch.nn.functional.one_hot(labels, len(counts)).amax(0) > 0
        weights = sample_weights(labels, counts) if params.balanced else torch.ones_like(logits[:, 0])
        moved = self._augmented(step) if params.augment else logits
        losses = -log_shares(moved, owned).gather(1, labels[:, None])[:, 0]
        if params.lam:
            received = step.received_outputs.logits
            losses = losses + params.lam * inherited(logits, received, ~owned, params.temperature)
        loss = (weights * losses).mean()
        if params.entropy:
            shares = log_shares(logits, owned)
            loss = loss + params.entropy * (weights[:, None] * shares.exp() * shares).sum()
        return loss

    @fb.hookimpl
    def after_training(self, task: fb.ClientTask, update: fb.Update) -> None:
        """The next round has other features."""
        task.state.pop(self.name, None)

    def _augmented(self, step: fb.LocalStep) -> Tensor:
        """Logits (b, C) of features to some of which noise is added."""
        task, features, labels, counts = step.task, step.outputs.features, step.labels, step.task.visible_counts
        if self.name not in task.state:
            rows = client_features(task, task.received, task.buffers)
            task.state[self.name] = {"deviations": deviations(rows, task.visible_labels, counts)}
        rows = task.state[self.name]["deviations"]
        generator = step.generator("feature augmentation")
        noise = torch.randn(len(labels), len(rows), generator=generator).to(rows) @ rows
        chance = torch.rand(len(labels), generator=generator).to(features)
        chosen = chance < (1 - counts / counts.max())[labels]
        head = step.model.linear_head
        weight, bias = step.weights[head.weight], step.weights[head.bias]
        return scaled_logits(features + noise * chosen[:, None], weight, bias, head.scale)
