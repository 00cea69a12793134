"""FPL - Huang, Ye, Shi, Li, Du, "Rethinking Federated Learning with Domain Shift: A Prototype View", CVPR 2023.

Clients send the means of their features by class. The server clusters those of each class (FINCH: a mean and its
nearest other one, by cosine, are in one cluster; again over the clusters' means while their number falls and stays
above one), so that large domains do not outweigh small ones:
    C_c = {means of the clusters of class c},   u_c = the mean of C_c
    L = CE + (1/B) Σ_i [−log (Σ_{p∈C_y} e^{cos(z_i,p)/τ} / Σ_p e^{cos(z_i,p)/τ}) + (1/d) ‖z_i − u_y‖²]
p in the denominator over the cluster means of all classes; from round 2 on.

Answers: loss_terms, after_training. Wraps: broadcast, aggregate. Stacks with any method that trains features (a CNN,
tune=full, a projector) and with other terms; frozen features (CLIP with tune=head) are refused: no term would move
them.
Left open / contradicted: the released code takes class means while the weights still move, over the last epoch; here
they are those of the trained model, in eval mode. Only clients of the last round have a part in C, and a class that
none of them has keeps its prototypes here, while the code forgets it. A sample without a prototype of its class has no
term, but counts in B. The square is a mean over coordinates, small beside the contrast. Of a class with one mean or two
there is one cluster. `lam` = 0 is FedAvg in its weights.
Cost: k d floats and C mask bytes up for the k classes a client has; down all cluster means, u, and their classes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

import fedbench.api as fb
from fedbench.api import hyper
from fedbench.models.text.classifier import unit
from fedbench.toolkit.prototypes import client_features, sent_means, spread
from fedbench.toolkit.wrapping import Aggregate, Aggregated, Send
from fedbench_methods.shared.clustering import first_neighbour_clusters

CLUSTERS, CLASSES, UNBIASED, KNOWN = "fpl.clusters", "fpl.classes", "fpl.unbiased", "fpl.known"


@dataclass(frozen=True, kw_only=True)
class FPLParams:
    """Hyper-parameters of FPL."""

    tau: float = hyper(0.02, symbol="τ", low=0.005, high=1.0, log=True, needs="lam", source="released code: 0.02")
    lam: float = hyper(1.0, symbol="λ", low=0.01, high=10.0, log=True, off=0.0, source="of both terms; the paper: 1")


def cluster_contrast(features: Tensor, labels: Tensor, clusters: Tensor, classes: Tensor, tau: float) -> Tensor:
    """The contrast by sample, (b,), of ``features`` (b, d) with the means ``clusters`` (P, d) of ``classes`` (P,)."""
    similar = unit(features) @ unit(clusters).T / tau
    # finite, for a sample whose class has no cluster
    own = torch.where(classes == labels[:, None], similar, -1e9)
    return similar.logsumexp(1) - own.logsumexp(1)


def cluster_means(means: Tensor) -> Tensor:
    """C_c (P_c, d) from the clients' ``means`` (m, d) of a class."""
    which = first_neighbour_clusters(means)
    return torch.stack([means[which == cluster].mean(0) for cluster in range(int(which.max()) + 1)])


class FPL(fb.Method[FPLParams]):
    """Contrasts features with cluster prototypes and holds them near unbiased ones."""

    name = "fpl"
    citation = "Huang et al., Rethinking Federated Learning with Domain Shift: A Prototype View, CVPR 2023"
    role = "local objective"
    requires = ("labels", "trained_features")

    @fb.wrapper
    def broadcast(self, task: fb.BroadcastTask, rest: Send) -> fb.Broadcast:
        """The stack's, and the prototypes; none before the first are made."""
        sent = rest(task)
        return replace(sent, payload={**sent.payload, **task.state.get(self.name, {})})

    @fb.hookimpl
    def loss_terms(self, step: fb.LocalStep) -> Tensor | None:
        """Both terms; none in round 1."""
        sent = step.task.payload
        if CLUSTERS not in sent or not self.params.lam:
            return None
        features, labels = step.outputs.features, step.labels
        contrast = cluster_contrast(features, labels, sent[CLUSTERS], sent[CLASSES], self.params.tau)
        near = (features - sent[UNBIASED][labels]).square().mean(1)
        return self.params.lam * torch.where(sent[KNOWN][labels], contrast + near, 0.0).mean()

    @fb.hookimpl
    def after_training(self, task: fb.ClientTask, update: fb.Update) -> fb.Tensors:
        """The means by class of the client's features under the trained model."""
        sent = sent_means(task, client_features(task, update.weights, update.buffers), self.name)
        return {f"fpl.{name}": value for name, value in sent.items()}

    @fb.wrapper
    def aggregate(self, task: fb.AggregationTask, rest: Aggregate) -> Aggregated:
        """The stack's; cluster prototypes and unbiased ones are kept for the next round."""
        sent = [update.payload for update in task.updates]
        means = torch.stack([spread(each["fpl.means"], each["fpl.holds"]) for each in sent])
        holds = torch.stack([each["fpl.holds"] for each in sent])
        before = task.state.get(self.name)
        unbiased = torch.zeros_like(means[0]) if before is None else before[UNBIASED].clone()
        clusters, classes = [], []
        for label in range(holds.shape[1]):
            owners = holds[:, label]
            if owners.any():
                found = cluster_means(means[owners, label])
                unbiased[label] = found.mean(0)
            elif before is not None and before[KNOWN][label]:
                found = before[CLUSTERS][before[CLASSES] == label]
            else:
                continue
            clusters.append(found)
            classes += [label] * len(found)
        numbers = torch.tensor(classes, device=means.device)
        known = torch.bincount(numbers, minlength=holds.shape[1]) > 0
        kept = {CLUSTERS: torch.cat(clusters), CLASSES: numbers, UNBIASED: unbiased, KNOWN: known}
        task.state[self.name] = kept
        return rest(task)
