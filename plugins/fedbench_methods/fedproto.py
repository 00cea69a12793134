"""FedProto - Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, "FedProto: Federated Prototype Learning across Heterogeneous
Clients", AAAI 2022; arXiv 2105.00243.

Only class prototypes travel, no weights. h(x) ∈ R^d are the features of a sample, N_j the clients that hold class j:
    C_j^k = mean of h(x) over the samples of class j of client k              (client prototype)
    P_j = (1/|N_j|) Σ_{k ∈ N_j} C_j^k                                         (global prototype)
    L = CE + λ L_R,   L_R = mean over batch and coordinates of (h(x) − P_y)²
Client k predicts by the nearest P_j among its own classes, or by its own classifier: the columns `personal_...`.

Answers: private, broadcast, loss_terms, after_training, aggregate, evaluate. Stacks with methods that change the model
or the loss. There is no global model, hence no global columns, unless `aggregate_weights`: then the weights are
averaged as well, and the global model is evaluated by its classifier, as the comparisons of the FedGLCL paper need it;
with λ = 0 that is FedAvg. Without, λ = 0 is training alone. Features must be trained: frozen ones (CLIP with tune=head)
are refused, as their prototypes never change.
Paper against released code, and what was left open: the paper's mean has 1/|N_j| and the shares n_kj / N_j, which
together shrink P_j by |N_j|; the code takes the plain mean (default), `mean=samples` the one weighted by n_kj. The code
adds up prototypes during the last epoch, from weights that still move and batch statistics (`prototypes=running`); the
definition is the mean under the trained model, in eval mode (default). Its accuracies are running averages, since the
counters are not set to zero between clients: here each client is scored alone. In round 1 there are no prototypes, and
no L_R; a sample whose class has none adds zero. All clients of the paper take part in every round; where some do not,
a class that nobody of the round holds keeps its P_j. A client that never took part predicts with its initial model
among all classes that have a prototype. The code's momentum .5 and batches of 4 are of its comparison: no recipe. Its
λ is 1 on MNIST and FEMNIST, 0.1 on CIFAR-10; L_R is a mean over coordinates, so that a sum would have λ/d.
Cost: k d floats and C mask bytes up for the k classes a client has, C d floats and the mask down; each client's whole
model is kept and saved with the run, also where its update was lost; one pass over its data for its prototypes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

import fedbench.api as fb
from fedbench.api import FedbenchError, hookimpl, hyper
from fedbench.toolkit.fedavg import average, largest_logit, predict_own, predicted_classes
from fedbench.toolkit.prototypes import client_features, mean_over_holders, nearest_class, sent_means, spread


@dataclass(frozen=True, kw_only=True)
class FedProtoParams:
    """Hyper-parameters of FedProto."""

    lam: float = hyper(
        1.0, symbol="λ", low=0.01, high=10.0, log=True, neutral=0.0, source="released code: 1, on CIFAR-10 0.1"
    )
    mean: Literal["clients", "samples"] = hyper(
        "clients", symbol="P_j", source="clients: released code; samples: n_kj / N_j"
    )
    prototypes: Literal["recomputed", "running"] = hyper(
        "recomputed",
        symbol="C_j^k",
        source="recomputed: its definition, after training; running: released code, during the last epoch",
    )
    evaluation: Literal["prototype", "classifier"] = hyper(
        "prototype",
        symbol="ŷ",
        when={"aggregate_weights": (False,)},
        source="both in the released code, of the client's own model",
    )
    aggregate_weights: bool = hyper(False, symbol="w", neutral=True, source="True: comparisons in the FedGLCL paper")


def prototype_distance(features: Tensor, labels: Tensor, prototypes: Tensor, known: Tensor) -> Tensor:
    """L_R: mean of (h − P_y)² over the batch and its coordinates, a scalar; zero for a class that is not known.

    ``features`` (b, d), ``labels`` (b,), ``prototypes`` (C, d), ``known`` (C,) bool.
    """
    away = (features - prototypes[labels]) * known[labels][:, None]
    return away.square().mean()


def _seen_only(task: fb.ClientTask, seen: Tensor) -> fb.ClientTask:
    """``task`` with the labels and counts of the samples ``seen`` (n_k,): a straggler may not get to all of them."""
    if task.labels is None or task.class_counts is None:
        return task
    labels = task.labels[seen.to(task.labels.device)]
    return replace(task, labels=labels, class_counts=torch.bincount(labels, minlength=len(task.class_counts)))


class FedProto(fb.Method[FedProtoParams]):
    """Shares class prototypes, models stay with the clients."""

    name = "fedproto"
    citation = "Tan et al., FedProto: Federated Prototype Learning, AAAI 2022"
    keeps_lost_training = True
    requires: tuple[str, ...] = ("labels", "trained_features")

    def __init__(self, params: FedProtoParams) -> None:
        super().__init__(params)
        if not params.lam:
            self.requires = ("labels",)

    @hookimpl
    def private(self, model: fb.Model, spec: fb.RunSpec) -> Collection[str]:
        """The whole model, unless weights are averaged too."""
        return () if self.params.aggregate_weights else (*model.weights, *model.buffers)

    @hookimpl
    def broadcast(self, task: fb.BroadcastTask) -> fb.Broadcast:
        """The global prototypes P (C, d) and which classes have one; nothing before the first are made."""
        return fb.Broadcast(task.weights, dict(task.state.get(self.name, {})))

    @hookimpl
    def loss_terms(self, step: fb.LocalStep) -> Tensor | None:
        """λ L_R; nothing in round 1."""
        if self.params.prototypes == "running":
            self._keep_features(step)
        if not self.params.lam:
            return None
        sent = step.task.payload
        if "prototypes" not in sent:
            return None
        distance = prototype_distance(step.outputs.features, step.labels, sent["prototypes"], sent["known"])
        return self.params.lam * distance

    def _keep_features(self, step: fb.LocalStep) -> None:
        """Note the batch's features (b, d) by sample: every epoch overwrites all, so that the last epoch's are left."""
        kept, found = step.task.state.setdefault(self.name, {}), step.outputs.features.detach()
        if "features" not in kept:
            kept["features"] = found.new_zeros(len(step.task.inputs), found.shape[1])
            kept["seen"] = torch.zeros(len(step.task.inputs), dtype=torch.bool, device=found.device)
        index = step.batch.index.to(found.device)
        kept["features"][index], kept["seen"][index] = found, True

    @hookimpl
    def after_training(self, task: fb.ClientTask, update: fb.Update) -> fb.Tensors:
        """The client's prototypes C^k, of which it remembers the classes; counts too where P is weighted by them."""
        if self.params.prototypes == "running":
            kept = task.state[self.name]
            features, task = kept["features"][kept["seen"]], _seen_only(task, kept["seen"])
        else:
            features = client_features(task, update.weights, update.buffers)
        sent = sent_means(task, features, self.name)
        task.state[self.name] = {"holds": sent["holds"]}
        if self.params.mean == "samples" and task.class_counts is not None:
            sent["counts"] = task.class_counts
        return sent

    @hookimpl
    def aggregate(self, task: fb.AggregationTask) -> fb.Tensors:
        """P (C, d), the mean over the round's clients that hold a class; the mean of the weights that are sent."""
        sent = [update.payload for update in task.updates]
        weights = torch.stack([each["counts" if self.params.mean == "samples" else "holds"] for each in sent])
        prototypes = mean_over_holders(torch.stack([spread(each["means"], each["holds"]) for each in sent]), weights)
        known = (weights > 0).any(0)
        before = task.state.get(self.name)
        if before is not None:
            prototypes = torch.where(known[:, None], prototypes, before["prototypes"])
            known = known | before["known"]
        task.state[self.name] = {"prototypes": prototypes, "known": known}
        return average(task)

    @hookimpl
    def evaluate(self, task: fb.EvaluationTask) -> fb.Predictions:
        """Each client by its own model; no global model unless weights are averaged."""
        if self.params.aggregate_weights:
            return largest_logit(task)
        return predict_own(task, partial(self._predicted, task))

    def _predicted(self, task: fb.EvaluationTask, client: int, weights: fb.Tensors, buffers: fb.Tensors) -> Tensor:
        """Classes (n,) by a client's model: the nearest P_j of its own classes, or the classifier's."""
        if self.params.evaluation == "classifier":
            return predicted_classes(task, weights, buffers)
        if self.name not in task.state:
            raise FedbenchError(
                "fedproto has no prototypes to predict by before an update has arrived; set rounds to 1 or more."
            )
        held = task.state[self.name]
        own = task.client_state.get(client, {}).get(self.name, {}).get("holds", held["known"])
        features = client_features(task, weights, buffers)
        return nearest_class(features, held["prototypes"], own).cpu()
