"""FedConcat - Diao, Li, He, "Exploiting Label Skews in Federated Learning with Model Concatenation", AAAI 2024.

    clusters: k-means with M centres on the clients' label shares p_k = counts_k / n_k, sent up once
    stage 1, rounds 1 .. R₁:  w_m^{t+1} = Σ_k (n_k / Σ_j n_j) w_k  over the round's clients of cluster m
    stage 2:  features [enc_1(x), ..., enc_M(x)] (M d), encoders frozen; a wide head W (C, M d), b (C,) is trained by
              cross-entropy,  W^{t+1} = (1/m) Σ_k W_k,  b likewise: a plain mean
    warm start:  W = [W_1, ..., W_M],  b = Σ_m b_m,  so that the wide head's logits are the sum of the clusters'

Answers: build_model, start, broadcast, local_loss, aggregate, evaluate. Stacks with methods whose terms read weights
only (fedprox); one that reads the model's outputs is refused when stage 2 begins, where the model has none.
The script runs 50 rounds of 1,050 as stage 1. Runs here are shorter, and clusters see few clients a round: half of the
rounds, so that all methods have the same number (`stage1` is a share). The code warm-starts the wide head for CIFAR-100
and Tiny-ImageNet: the default for all; otherwise it starts a new one (`head_start=fresh`). In stage 2 its clients take
three mini-batches a round; here E epochs like every method. Its encoders stay in train mode in stage 2, so that
batch-norm statistics follow whichever client came last; here weights and statistics are frozen, and features are those
of eval mode. Left out: Laplace noise on the label shares (eps); FedConcat-ID, which infers them; the code's k-means of
capped cluster size and its own stage-1 weight decay for CIFAR-100 and Tiny-ImageNet.
Evaluated is the concatenated model: in stage 1 with the warm-started head (a reporting rule, nothing depends on it), in
stage 2 with the trained one. What each client is scored on as its own is its cluster's model as stage 1 left it (with
M = 1, FedAvg's). A cluster without participants keeps its model; one that never had any keeps the initial model, and
adds it to the sum.
On frozen CLIP features an encoder has no weights: all M parts are the same features, and a wide head is no more than a
linear head whose weight, but not its bias, has M times the learning rate; clusters then differ in stage 1 only.
Cost: label shares up once; in stage 2 the wide head both ways, and all encoders down once a client (again to one that
dropped out, of whom the server does not know); M forward passes without gradients a step, and a prediction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

import fedbench.api as fb
from fedbench.api import FedbenchError, hookimpl, hyper
from fedbench.models.heads import default_model, scaled_logits
from fedbench.toolkit.clustering import class_shares, cluster_rows
from fedbench.toolkit.fedavg import (
    average,
    average_buffers,
    cross_entropy,
    participant_shares,
    predicted_classes,
    weighted_mean,
)
from fedbench.toolkit.heads import fresh_head

WEIGHT, BIAS = "wide.weight", "wide.bias"
ENCODER, HEAD = "encoder/", "head/"
"""Before the names of the clusters' tensors in the server's state, each (M, ...)."""
CLUSTER, REACHED = "cluster", "reached"
"""Each client's cluster, (N,) int64, and whether it has the encoders, (N,) bool."""


@dataclass(frozen=True, kw_only=True)
class FedConcatParams:
    """Hyper-parameters of FedConcat."""

    clusters: int = hyper(5, symbol="M", low=1, high=20, search=(2, 10), source="released script: 5")
    stage1: float = hyper(
        0.5, symbol="R₁/R", low=0.0, high=1.0, search=(0.1, 0.9), source="ours; the script: 50 of 1,050 rounds"
    )
    head_start: Literal["warm", "fresh"] = hyper(
        "warm", symbol="W⁰", source="warm: released code on CIFAR-100 and Tiny-ImageNet; fresh: on the others"
    )


def first_stage(training: fb.Training, share: float) -> int:
    """R₁, the rounds of stage 1: ``share`` of all, at least one."""
    return max(1, round(share * training.rounds))


def warm_start(weights: Tensor, biases: Tensor) -> tuple[Tensor, Tensor]:
    """W (C, M d) and b (C,) whose logits are the sum of those of the heads ``weights`` (M, C, d), ``biases`` (M, C)."""
    return weights.transpose(0, 1).flatten(1), biases.sum(dim=0)


def concatenated(model: fb.Model, encoders: fb.Tensors) -> fb.Model:
    """``model`` on the features of all encoders side by side, (b, M d), under a wide head WEIGHT (C, M d), BIAS (C,).

    ``encoders`` are weights and running statistics by name, (M, ...). They are read in eval mode, without gradients.
    """
    head = model.linear_head
    width = model.weights[head.weight].shape[1]

    def forward(tensors: Mapping[str, Tensor], inputs: Tensor, training: bool) -> fb.Outputs:
        weight, bias = tensors[WEIGHT], tensors[BIAS]
        parts = []
        with torch.no_grad():
            for m in range(weight.shape[1] // width):
                own = {name: tensor[m] for name, tensor in encoders.items()}
                # the model wants a head to run; the logits of this one go unread
                own |= {head.weight: weight[:, :width], head.bias: bias}
                parts.append(model.forward(own, inputs, False).features)
        features = torch.cat(parts, dim=1)
        return fb.Outputs(scaled_logits(features, weight, bias, head.scale), features)

    return replace(model, forward=forward)


def named(state: fb.Tensors, prefix: str) -> fb.Tensors:
    """The tensors of ``state`` whose names begin with ``prefix``, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def cluster_model(state: fb.Tensors, cluster: int) -> fb.Tensors:
    """Weights and running statistics of one cluster, by name."""
    return {name: tensor[cluster] for name, tensor in {**named(state, ENCODER), **named(state, HEAD)}.items()}


class FedConcat(fb.Method[FedConcatParams]):
    """Clusters clients, concatenates the clusters' encoders."""

    name = "fedconcat"
    citation = "Diao, Li, He, Exploiting Label Skews with Model Concatenation, AAAI 2024"
    Params = FedConcatParams
    reads = ("tune", "head_scale")
    requires = ("labels", "linear_head", "whole_model")

    @hookimpl
    def build_model(self, setup: fb.ModelSetup) -> fb.Model:
        """The default model, which must end in a linear head, so that it can be separated from the encoder."""
        model = default_model(setup)

        def forward(tensors: Mapping[str, Tensor], inputs: Tensor, training: bool) -> fb.Outputs:
            if WEIGHT in tensors:
                raise FedbenchError(
                    "fedconcat trains a wide head on frozen encoders in stage 2, where the model has no outputs of its "
                    "own; stack it only with methods whose terms read weights, such as fedprox."
                )
            return model.forward(tensors, inputs, training)

        return replace(model, forward=forward)

    @hookimpl
    def start(self, task: fb.StartTask) -> fb.Tensors:
        """Label shares go up once; clients are clustered by them, and every cluster starts from the model's tensors."""
        shares = class_shares(task.class_counts).float()
        cluster = cluster_rows(shares, self.params.clusters, "kmeans", task.spec.seed)
        head = task.model.linear_head
        state = {CLUSTER: cluster, REACHED: torch.zeros(len(cluster), dtype=torch.bool)}
        for name, tensor in {**task.model.weights, **task.model.buffers}.items():
            prefix = HEAD if name in (head.weight, head.bias) else ENCODER
            # copies: what one cluster learns must not show in another
            state[prefix + name] = torch.stack([tensor] * (int(cluster.max()) + 1)).to(task.spec.device)
        task.state[self.name] = state
        return {"label_shares": shares}

    @hookimpl
    def broadcast(self, task: fb.BroadcastTask) -> fb.Broadcast:
        """Stage 1: the model of the client's cluster. Stage 2: the wide head, and once a client all encoders."""
        state = task.state[self.name]
        if WEIGHT in state:
            wide, encoders = {name: state[name] for name in (WEIGHT, BIAS)}, named(state, ENCODER)
            if state[REACHED][task.client]:
                return fb.Broadcast(wide, buffers={}, held=encoders)
            return fb.Broadcast(wide, encoders, buffers={})
        own = cluster_model(state, int(state[CLUSTER][task.client]))
        weights = {name: own.pop(name) for name in task.weights}
        return fb.Broadcast(weights, buffers=own)

    @hookimpl
    def local_loss(self, step: fb.LocalStep) -> Tensor:
        """Cross-entropy: of the cluster's model, or in stage 2 of the wide head."""
        if WEIGHT not in step.weights:
            return cross_entropy(step)
        model = concatenated(step.model, step.task.payload)
        return cross_entropy(replace(step, task=replace(step.task, model=model)))

    @hookimpl
    def aggregate(self, task: fb.AggregationTask) -> fb.Tensors:
        """Means inside clusters, or the plain mean of the wide heads. The global weights, which no client is sent, are
        the mean over all participants in stage 1 and then stay."""
        state = dict(task.state[self.name])
        if WEIGHT in state:
            shares = participant_shares(task.updates, "uniform")
            state |= {n: weighted_mean([u.weights[n] for u in task.updates], shares) for n in (WEIGHT, BIAS)}
            state[REACHED] = state[REACHED].clone()
            state[REACHED][[update.client for update in task.updates]] = True
            task.state[self.name] = state
            return task.weights
        self._average_in_clusters(task, state)
        rounds = first_stage(task.spec.training, self.params.stage1)
        is_over = task.round >= rounds and task.exchange + 1 == task.exchanges
        if is_over and rounds < task.spec.training.rounds:
            state[WEIGHT], state[BIAS] = self._first_wide_head(task, state)
        task.state[self.name] = state
        return average(task)

    @hookimpl
    def evaluate(self, task: fb.EvaluationTask) -> fb.Predictions:
        """The largest logit of the concatenated model, and of the cluster model of stage 1 of each requested client."""
        state = task.state[self.name]
        if task.client is not None and WEIGHT not in task.weights:
            # a cluster's model, fine-tuned by a client
            return fb.Predictions(predicted_classes(task, task.weights, task.buffers))
        if task.client is not None:
            wide = task.weights
        elif WEIGHT in state:
            wide = {name: state[name] for name in (WEIGHT, BIAS)}
        else:
            wide = dict(zip((WEIGHT, BIAS), self._warm_head(task.model, state), strict=True))
        whole = replace(task, model=concatenated(task.model, named(state, ENCODER)))
        labels = predicted_classes(whole, wide, {})
        clusters = {client: int(state[CLUSTER][client]) for client in task.clients}
        own = {m: predicted_classes(task, cluster_model(state, m), {}) for m in set(clusters.values())}
        return fb.Predictions(labels, {client: own[m] for client, m in clusters.items()})

    def _average_in_clusters(self, task: fb.AggregationTask, state: fb.Tensors) -> None:
        """FedAvg inside each cluster that has participants, written in ``state``; the others keep their model."""
        for name, tensor in state.items():
            state[name] = tensor.clone() if name.startswith((ENCODER, HEAD)) else tensor
        stacked = {**named(state, ENCODER), **named(state, HEAD)}
        of_client = state[CLUSTER].tolist()
        for cluster in range(max(of_client) + 1):
            members = tuple(update for update in task.updates if of_client[update.client] == cluster)
            if members:
                means = average(replace(task, updates=members))
                means |= average_buffers(members, task.spec.training.weighting, task.buffers)
                for name, mean in means.items():
                    stacked[name][cluster] = mean

    def _warm_head(self, model: fb.Model, state: fb.Tensors) -> tuple[Tensor, Tensor]:
        head = model.linear_head
        return warm_start(state[HEAD + head.weight], state[HEAD + head.bias])

    def _first_wide_head(self, task: fb.AggregationTask, state: fb.Tensors) -> tuple[Tensor, Tensor]:
        """What stage 2 starts from, (C, M d) and (C,)."""
        weight, bias = self._warm_head(task.model, state)
        if self.params.head_start == "warm":
            return weight, bias
        new_weight, new_bias = fresh_head(len(bias), weight.shape[1], fb.torch_generator(task.spec.seed, "wide head"))
        # under a scale s it is the features s z that a new layer sees, and s b that starts in ±1/√(M d)
        return new_weight.to(weight), (new_bias / task.model.linear_head.scale).to(bias)
