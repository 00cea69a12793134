"""FedConcat - Diao, Li, He, "Exploiting Label Skews in Federated Learning with Model Concatenation", AAAI 2024.

    clusters: k-means with M centres on the clients' label shares p_k = counts_k / n_k, sent up once
    stage 1, rounds 1 .. R₁:  w_m^{t+1} = Σ_k (n_k / Σ_j n_j) w_k  over the round's clients of cluster m
    stage 2:  features [enc_1(x), ..., enc_M(x)] (M d), encoders frozen; a wide head W (C, M d), b (C,) is trained by
              cross-entropy,  W^{t+1} = (1/m) Σ_k W_k,  b likewise: a plain mean
    warm start:  W = [W_1, ..., W_M],  b = Σ_m b_m,  so that the wide head's logits are the sum of the clusters'

Answers: build_model, start, broadcast, local_loss, aggregate, evaluate. Stacks with methods whose terms read weights
only (fedprox); one that reads the model's outputs is refused when stage 2 begins, where the model has none.
Left open / contradicted:
- The script runs 50 rounds of 1,050 as stage 1. Runs here are shorter, and clusters see few clients: half of them.
- The code warm-starts the wide head for CIFAR-100 and Tiny-ImageNet, here for all (`head_start=fresh`: a new one).
- In stage 2 its clients take three mini-batches a round, here E epochs. Its encoders stay in train mode, so that
  batch-norm statistics follow whichever client came last; here weights and statistics are frozen, in eval mode.
- Left out: noise on the label shares (eps), FedConcat-ID, k-means of capped size, a stage-1 weight decay of its own.
Evaluated is the concatenated model, in stage 1 with the warm-started head (a reporting rule). A client's own model is
its cluster's as stage 1 left it (with M = 1, FedAvg's). A cluster that never had participants keeps the initial model.
On frozen CLIP features all M parts are the same features: clusters then differ in stage 1 only.
Cost: label shares up once; in stage 2 the wide head both ways, and all encoders down once a client (again to one that
dropped out, of whom the server does not know); M forward passes without gradients a step, and a prediction.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

import fedbench.api as fb
from fedbench.api import FedbenchError, hookimpl, hyper
from fedbench.models.heads import default_model
from fedbench.toolkit.fedavg import average, cross_entropy, participant_shares, predicted_classes, weighted_mean
from fedbench.toolkit.heads import fresh_head
from fedbench_methods.shared.cluster_models import (
    BIAS,
    WEIGHT,
    averaged_in_clusters,
    concatenated,
    model_of,
    stacked_models,
)
from fedbench_methods.shared.clustering import class_shares, cluster_rows

CLUSTER, REACHED = "cluster", "reached"
"""Each client's cluster, (N,) int64, and whether it has the encoders, (N,) bool."""
ENCODERS, HEADS = "fedconcat encoders", "fedconcat heads"
"""The clusters' tensors in the server's state, (M, ...) by name."""


@dataclass(frozen=True, kw_only=True)
class FedConcatParams:
    """Hyper-parameters of FedConcat."""

    clusters: int = hyper(5, symbol="M", low=1, high=20, search=(2, 10), source="released script: 5")
    stage1: float = hyper(0.5, symbol="R₁/R", low=0.0, high=1.0, search=(0.1, 0.9), source="ours; script: 50 of 1,050")
    head_start: Literal["warm", "fresh"] = hyper("warm", symbol="W⁰", source="warm: code on CIFAR-100, Tiny-ImageNet")


def first_stage(training: fb.Training, share: float) -> int:
    """R₁, the rounds of stage 1: ``share`` of all, at least one."""
    return max(1, round(share * training.rounds))


def warm_start(weights: Tensor, biases: Tensor) -> tuple[Tensor, Tensor]:
    """W (C, M d) and b (C,) whose logits are the sum of those of the heads ``weights`` (M, C, d), ``biases`` (M, C)."""
    return weights.transpose(0, 1).flatten(1), biases.sum(dim=0)


def keep(state: MutableMapping[str, fb.Tensors], stacked: fb.Tensors, head: tuple[str, str]) -> None:
    """Write the clusters' models (M, ...) in ``state``, the ``head`` apart from the encoder."""
    state[ENCODERS] = {name: tensor for name, tensor in stacked.items() if name not in head}
    state[HEADS] = {name: stacked[name] for name in head}


class FedConcat(fb.Method[FedConcatParams]):
    """Clusters clients, concatenates the clusters' encoders."""

    name = "fedconcat"
    citation = "Diao, Li, He, Exploiting Label Skews with Model Concatenation, AAAI 2024"
    prevents = ("sent_start", "global_model")
    reads = ("tune", "head_scale")
    requires = ("labels", "linear_head", "whole_model")
    role = "personalisation"  # that of a client's cluster

    @hookimpl
    def build_model(self, setup: fb.ModelSetup) -> fb.Model:
        """The default model, which must end in a linear head, so that it can be separated from the encoder."""
        model = default_model(setup)

        def forward(tensors: fb.Tensors, inputs: Tensor, training: bool) -> fb.Outputs:
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
        task.state[self.name] = {CLUSTER: cluster, REACHED: torch.zeros(len(cluster), dtype=torch.bool)}
        models = stacked_models(task.model, int(cluster.max()) + 1, task.spec.device)
        keep(task.state, models, task.model.linear_head.names)
        return {"label_shares": shares}

    @hookimpl
    def broadcast(self, task: fb.BroadcastTask) -> fb.Broadcast:
        """Stage 1: the model of the client's cluster. Stage 2: the wide head, and once a client all encoders."""
        state = task.state[self.name]
        if WEIGHT in state:
            wide, encoders = {name: state[name] for name in (WEIGHT, BIAS)}, task.state[ENCODERS]
            if state[REACHED][task.client]:
                return fb.Broadcast(wide, buffers={}, held=encoders)
            return fb.Broadcast(wide, encoders, buffers={})
        own = model_of({**task.state[ENCODERS], **task.state[HEADS]}, int(state[CLUSTER][task.client]))
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
        models = averaged_in_clusters(task, task.state[ENCODERS] | task.state[HEADS], state[CLUSTER].tolist())
        keep(task.state, models, task.model.linear_head.names)
        rounds = first_stage(task.spec.training, self.params.stage1)
        is_over = task.round >= rounds and task.exchange + 1 == task.exchanges
        if is_over and rounds < task.spec.training.rounds:
            state[WEIGHT], state[BIAS] = self._first_wide_head(task)
        task.state[self.name] = state
        return average(task)

    @hookimpl
    def evaluate(self, task: fb.EvaluationTask) -> fb.Predictions:
        """The largest logit of the concatenated model, and of the cluster model of stage 1 of each requested client."""
        state = task.state[self.name]
        if task.client is not None and WEIGHT not in task.weights:
            # a cluster's model, fine-tuned by a client
            return fb.Predictions(predicted_classes(task, task.weights, task.buffers))
        wide = task.weights if task.client is not None else state
        if WEIGHT not in wide:
            heads = [task.state[HEADS][name] for name in task.model.linear_head.names]
            wide = dict(zip((WEIGHT, BIAS), warm_start(*heads), strict=True))
        whole = replace(task, model=concatenated(task.model, task.state[ENCODERS]))
        labels = predicted_classes(whole, {name: wide[name] for name in (WEIGHT, BIAS)}, {})
        clusters = {client: int(state[CLUSTER][client]) for client in task.clients}
        models = task.state[ENCODERS] | task.state[HEADS]
        own = {m: predicted_classes(task, model_of(models, m), {}) for m in set(clusters.values())}
        return fb.Predictions(labels, {client: own[m] for client, m in clusters.items()})

    def _first_wide_head(self, task: fb.AggregationTask) -> tuple[Tensor, Tensor]:
        """What stage 2 starts from, (C, M d) and (C,)."""
        weight, bias = warm_start(*(task.state[HEADS][name] for name in task.model.linear_head.names))
        if self.params.head_start == "warm":
            return weight, bias
        new_weight, new_bias = fresh_head(len(bias), weight.shape[1], fb.torch_generator(task.spec.seed, "wide head"))
        # under a scale s it is the features s z that a new layer sees, and s b that starts in ±1/√(M d)
        return new_weight.to(weight), (new_bias / task.model.linear_head.scale).to(bias)
