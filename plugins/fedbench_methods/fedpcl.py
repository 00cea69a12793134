"""FedPCL - Tan, Long, Ma, Liu, Zhou, Jiang, "Federated Learning from Pre-trained Models: A Contrastive Learning
Approach", NeurIPS 2022; arXiv 2209.10083.

On frozen pretrained features r(x) ∈ R^D every client trains a projector of its own, and only prototypes travel:
    z(x) = a / ‖a‖,  a = ReLU(W r(x) + b) ∈ R^256
    C_j^k = mean of z over the samples of class j of client k;   P_j = mean of C_j^k over the clients k that hold j
    released code: L = Σ_k L_k, where the anchor of a sample i is C_y^k (P_y where client k lacks y), and
        L_k = mean_i −(1/|S_i|) Σ_{s ∈ S_i} log [exp(C_{y_i}^k · z_s/τ) / Σ_{a ≠ i} exp(C_{y_i}^k · z_a/τ)]
        over both views of the batch, S_i being the others of the class of i
    paper: L = L_g + L_p, with  L_g = mean_i −log [exp(z_i · P_{y_i}/τ) / Σ_j exp(z_i · P_j/τ)]  and L_p the mean over
        clients of the same with C^k in the place of P
Client k predicts by the nearest of its own C_j^k (in squared error): the columns `personal_...`.

Answers: build_model, private, broadcast, local_loss, after_training, aggregate, evaluate. Stacks with methods that add
loss terms on weights or features. There is no global model, hence no global columns. Needs a pretrained
backbone, whose image features are r, frozen also where other methods train it on (`weights=`); the paper joins several.
Left open / contradicted:
- The code's loss is the default, the paper's an option (`loss=paper`; the positive is in its denominators, and global
  prototypes stand for classes that a client lacks, as in the code). The code's unused cross-entropy head is left out.
- Two views of an image that is not augmented are the same, as of the code on Office; here features are computed once.
- In round 1 there are no prototypes: no gradient, no step, nor weight decay (the code's Adam decays), unless a method
  stacked on it adds a term.
- Prototypes are computed after training, in eval mode, and not brought to length one.
- Under partial participation the server keeps the last set of each client. P is the mean over these, and only clients
  with a set are summed over. A sample whose class nobody has sent yet adds zero.
- Where an update is lost, projector and prototypes are those before. A client that never took part predicts with its
  initial projector by the nearest P_j.
Cost: k 256 floats up for the k classes a client has; (N + 1) C 256 floats and masks down, N all clients.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

import fedbench.api as fb
from fedbench.api import FedbenchError, hookimpl, hyper
from fedbench.models.cnn.backbone import as_function, default_generator_from
from fedbench.models.heads import frozen_of
from fedbench.models.text.classifier import UnitLength
from fedbench.toolkit.fedavg import average, predict_own
from fedbench.toolkit.prototypes import client_features, mean_over_holders, nearest_class, sent_means, spread


@dataclass(frozen=True, kw_only=True)
class FedPclParams:
    """Hyper-parameters of FedPCL."""

    temperature: float = hyper(0.07, symbol="τ", low=0.03, high=0.5, log=True, source="released code")
    dim: int = hyper(256, symbol="d", low=2, high=4096, search=False, source="released code")
    loss: Literal["released", "paper"] = hyper("released", symbol="L", source="released: Σ L_k; paper: L_g + L_p")


def filled_sets(sets: Tensor, present: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
    """Every client's prototypes (N, C, d) with the global ones ``shared`` (C, d) where it has none of a class.

    ``sets`` (N, C, d), ``present`` (N, C) bool. Also which can be used (N, C) bool: none of a client without a set.
    """
    filled = torch.where(present[..., None], sets, shared)
    return filled, (present | present.any(0)) & present.any(1, keepdim=True)


def contrast_to_batch(similarity: Tensor, labels: Tensor) -> Tensor:
    """−(1/|S_i|) Σ_{s ∈ S_i} log softmax_{a ≠ i}(similarity_ia)_s, (..., b), from ``similarity`` (..., b, b) over τ.

    Row i is of the anchor of sample i; ``labels`` (b,). The batch counts twice, and an anchor omits its sample once.
    """
    views = 2 - torch.eye(len(labels), device=similarity.device)
    others = (similarity + views.log()).logsumexp(dim=-1)
    positives = views * (labels[:, None] == labels)
    return others - (positives * similarity).sum(-1) / positives.sum(-1)


def contrast_to_classes(similarity: Tensor, labels: Tensor, usable: Tensor) -> Tensor:
    """−log softmax_j(similarity_ij)_{y_i} over the ``usable`` (..., C) classes, (..., b), from (..., b, C) over τ."""
    lowest = torch.finfo(similarity.dtype).min
    everywhere = similarity.masked_fill(~usable[..., None, :], lowest).logsumexp(dim=-1)
    own = similarity.gather(-1, labels[:, None].expand(*similarity.shape[:-1], 1))[..., 0]
    return everywhere - own


def released_loss(z: Tensor, labels: Tensor, sent: fb.Tensors, temperature: float) -> Tensor:
    """Σ_k L_k, a scalar, from embeddings ``z`` (b, d), ``labels`` (b,) and the prototypes ``sent``."""
    filled, usable = filled_sets(sent["sets"], sent["present"], sent["shared"])
    similarity = (filled @ z.T)[:, labels] / temperature
    losses = contrast_to_batch(similarity, labels) * usable[:, labels]
    return losses.mean(dim=1).sum()


def paper_loss(z: Tensor, labels: Tensor, sent: fb.Tensors, temperature: float) -> Tensor:
    """L_g + L_p, a scalar; arguments as of ``released_loss``."""
    filled, usable = filled_sets(sent["sets"], sent["present"], sent["shared"])
    known = sent["present"].any(0)
    to_shared = contrast_to_classes(z @ sent["shared"].T / temperature, labels, known) * known[labels]
    to_clients = contrast_to_classes(z @ filled.transpose(1, 2) / temperature, labels, usable) * usable[:, labels]
    return to_shared.mean() + to_clients.mean(dim=1).sum() / sent["present"].any(1).sum()


class FedPCL(fb.Method[FedPclParams]):
    """Contrasts projected features with all clients' prototypes."""

    name = "fedpcl"
    citation = "Tan et al., FL from Pre-trained Models: A Contrastive Learning Approach, NeurIPS 2022"
    recipe = {"optimizer": "adam", "lr": 1e-3, "weight_decay": 1e-4}
    requires = ("labels", "pretrained")

    @hookimpl
    def build_model(self, setup: fb.ModelSetup) -> fb.Model:
        """The projector FC D->256, ReLU, unit length on frozen image features; no logits."""
        backbone = frozen_of(setup)
        with default_generator_from(setup.spec.seed, "projector"):
            layers = OrderedDict(fc=nn.Linear(backbone.feature_dim, self.params.dim), relu=nn.ReLU(), unit=UnitLength())
        weights, buffers, embed = as_function(nn.Sequential(OrderedDict(projector=nn.Sequential(layers))))

        def forward(tensors: fb.Tensors, inputs: Tensor, training: bool) -> fb.Outputs:
            z = embed(tensors, inputs, training)
            return fb.Outputs(z.new_zeros(len(z), 0), z)

        return fb.Model(weights=weights, buffers=buffers, forward=forward, encoder=backbone.image_encoder())

    @hookimpl
    def private(self, model: fb.Model, spec: fb.RunSpec) -> Collection[str]:
        """The projector."""
        return tuple(model.weights)

    @hookimpl
    def broadcast(self, task: fb.BroadcastTask) -> fb.Broadcast:
        """P (C, d) and every client's set (N, C, d) with its mask; nothing before the first are made."""
        return fb.Broadcast(task.weights, dict(task.state.get(self.name, {})))

    @hookimpl
    def local_loss(self, step: fb.LocalStep) -> Tensor:
        """Σ_k L_k, or L_g + L_p; nothing to learn in round 1. FedbenchError without labels."""
        z, sent = step.outputs.features, step.task.payload
        if "sets" not in sent:
            # of no weight: one without any gradient is left alone by an optimiser, a zero one lets it decay
            return torch.zeros((), device=z.device, requires_grad=True)
        loss = released_loss if self.params.loss == "released" else paper_loss
        return loss(z, step.labels, sent, self.params.temperature)

    @hookimpl
    def after_training(self, task: fb.ClientTask, update: fb.Update) -> fb.Tensors:
        """The client's prototypes under its trained projector; it keeps them to predict by."""
        sent = sent_means(task, client_features(task, update.weights, update.buffers), self.name)
        task.state[self.name] = {"means": spread(sent["means"], sent["holds"]), "holds": sent["holds"]}
        return sent

    @hookimpl
    def aggregate(self, task: fb.AggregationTask) -> fb.Tensors:
        """The last set of every client (N, C, d), and P, their mean over the holders of a class."""
        arrived = {u.client: spread(u.payload["means"], u.payload["holds"]) for u in task.updates}
        first = next(iter(arrived.values()))
        before = task.state.get(self.name, {})
        sets = before.get("sets", first.new_zeros(task.num_clients, *first.shape)).clone()
        present = before.get("present", sets.new_zeros(sets.shape[:2], dtype=torch.bool)).clone()
        for update in task.updates:
            sets[update.client], present[update.client] = arrived[update.client], update.payload["holds"]
        task.state[self.name] = {"sets": sets, "present": present, "shared": mean_over_holders(sets, present)}
        return average(task)

    @hookimpl
    def evaluate(self, task: fb.EvaluationTask) -> fb.Predictions:
        """Each client by its own projector and prototypes; there is no global model."""
        return predict_own(task, partial(self._predicted, task))

    def _predicted(self, task: fb.EvaluationTask, client: int, weights: fb.Tensors, buffers: fb.Tensors) -> Tensor:
        """Classes (n,) by the nearest of the client's own prototypes, or of the global ones where it has none."""
        if self.name not in task.state:
            raise FedbenchError("fedpcl has no prototypes before an update has arrived; set rounds to 1 or more.")
        server, own = task.state[self.name], task.client_state.get(client, {}).get(self.name)
        means, holds = (server["shared"], server["present"].any(0)) if own is None else (own["means"], own["holds"])
        return nearest_class(client_features(task, weights, buffers), means, holds).cpu()
