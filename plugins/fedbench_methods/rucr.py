"""RUCR - Huang, Liu, Ye, Chen, Du, "Federated Learning with Long-Tailed Data via Representation Unification and
Classifier Rectification", IEEE TIFS 2024.

Before a round the cohort reports n_ck and the mean feature μ_ck of each class under the received model:
    P_c = Σ_k n_ck μ_ck / Σ_k n_ck,   π_c = Σ_k n_ck / Σ_k n_k   over the cohort
    s_c = cos(z, P_c) / t, 0 for a class that the client does not own;   s_y ← s_y + a log π_y, for the label only
    L = CE(o, y) + λ CE(s, y),   o the model's logits
The server averages as FedAvg does. In the last `rectify_rounds` + 1 rounds every client reports, and
    P̂_c = Σ_k n_ck μ_ck/|μ_ck| / Σ_k n_ck over all clients, not brought to unit length
    v = l P̂_c + (1 - l) z̃/|z̃|, l ~ U(left, right) to 2 decimals, z̃ a feature of the client's own, of any class
each client of the cohort trains its updated head on m such v of every class c, labelled c; the heads are averaged by
n_k. The global model with this head is what is evaluated from then on; clients train from FedAvg's weights.

Answers: survey, report, reported, broadcast, loss_terms, after_training, aggregate, evaluate. Stacks with methods that
change the local loss only. With loss_weight=0 and rectify_rounds=0 it is FedAvg bit for bit. On frozen features it
moves nothing and is refused: set loss_weight=0. Fine-tuning is by the base loss. A run of `rectify_rounds` + 1 rounds
or fewer surveys everyone in each.
The published equations were not at hand: this follows the released code, which exists twice.
- The original scripts have a cosine head of scale 30 and left = 0.1, the cleaned code a plain linear one, whose `left`
  is the default. Here the head is the model's own, its fixed scale s included.
- Virtual features have at most unit length, as what a head on CLIP reads has; features of a CNN are longer.
- Both codes take means and z̃ on batch statistics, which depend on how samples are batched. Here it is eval mode.
- z̃ are drawn without replacement, and with fewer than m samples over again, where the code fails.
Cost: two passes of all samples at most; C d + C numbers each way, at last from all clients. Privacy: class counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

import fedbench.api as fb
from fedbench.api import FedbenchError, hookimpl, hyper
from fedbench.models.text.classifier import unit
from fedbench.toolkit.fedavg import average, participant_shares, weighted_mean
from fedbench.toolkit.heads import largest_logit_with_kept_head, retrained
from fedbench.toolkit.losses import mean_cross_entropy
from fedbench.toolkit.prototypes import class_means, client_features, merged

SENT_DOWN = ("prototypes", "prior", "directions")  # of a survey, until the round ends
HEAD, RECTIFY = ("head.weight", "head.bias"), "rectify_rounds"


@dataclass(frozen=True, kw_only=True)
class RUCRParams:
    """Hyper-parameters of RUCR; defaults are those of CIFAR-10 at an imbalance of 100."""

    loss_weight: float = hyper(0.15, symbol="λ", low=0.01, high=2.0, log=True, neutral=0.0, source="code, C10 IF100")
    temperature: float = hyper(0.9, symbol="t", low=0.05, high=1.0, log=True, needs="loss_weight", source="code 0.9")
    prior_weight: float = hyper(1.0, symbol="a", low=0.0, high=10.0, search=False, needs="loss_weight", source="code")
    rectify_rounds: int = hyper(20, symbol="crt_ep", low=1, high=1000, neutral=0, search=False, source="code; 0: none")
    virtual_features: int = hyper(
        100, symbol="m", low=1, high=1000, log=True, search=False, needs=RECTIFY, source="a class; code 100"
    )
    left: float = hyper(0.35, symbol="left", low=0.0, high=1.0, search=(0.0, 0.6), needs=RECTIFY, source="code, linear")
    right: float = hyper(0.95, symbol="right", low=0.0, high=1.0, search=(0.8, 1.0), needs=RECTIFY, source="code")
    rectify_epochs: int = hyper(50, symbol="local_bal_ep", low=1, high=1000, search=False, needs=RECTIFY, source="code")
    lr_head: float = hyper(0.01, symbol="lr_cls", low=1e-3, high=0.1, log=True, needs=RECTIFY, source="code 0.01")
    batch_size: int = hyper(256, symbol="crt_batch_size", low=1, high=10000, search=False, needs=RECTIFY, source="code")


def unification_loss(
    features: Tensor, labels: Tensor, prototypes: Tensor, log_prior: Tensor, owned: Tensor, temperature: float
) -> Tensor:
    """CE(s, y), a scalar, of z (b, d), ``labels`` (b,), ``prototypes`` P (C, d), a log π (C,), ``owned`` (C,) bool."""
    similarity = (unit(features) @ unit(prototypes).T) / temperature * owned
    is_label = labels[:, None] == torch.arange(len(prototypes), device=labels.device)
    return mean_cross_entropy(similarity + is_label * log_prior, labels)


def scaled_log(prior: Tensor, weight: float) -> Tensor:
    """a log π (C,); 0 where π is 0, which no label of the cohort has."""
    return weight * torch.where(prior > 0, prior, torch.ones_like(prior)).log()


def virtual_features(
    directions: Tensor, features: Tensor, count: int, left: float, right: float, generator: torch.Generator
) -> Tensor:
    """v = l P̂_c + (1 - l) z̃/|z̃|, (k, m, d), for ``directions`` P̂ (k, d) and the client's ``features`` (n, d)."""
    kinds, device = len(directions), features.device
    # without replacement, and over again where a client has fewer than m samples
    turns = torch.arange(count) % len(features)
    picks = torch.stack([torch.randperm(len(features), generator=generator)[turns] for _ in range(kinds)])
    drawn = left + (right - left) * torch.rand(kinds, count, 1, generator=generator, dtype=torch.float64)
    shares = torch.round(drawn, decimals=2).float().to(device)
    return shares * directions[:, None, :] + (1 - shares) * unit(features)[picks.to(device)]


class RUCR(fb.Method[RUCRParams]):
    """Unifies representations by prototypes, rectifies the classifier by mixed features."""

    name = "rucr"
    citation = "Huang et al., Representation Unification and Classifier Rectification, IEEE TIFS 2024"
    requires: tuple[str, ...] = ("labels", "linear_head", "sent_head", "trained_features")

    def __init__(self, params: RUCRParams) -> None:
        super().__init__(params)
        if params.left > params.right:
            raise FedbenchError(f"rucr.left={params.left:g} is above rucr.right={params.right:g}; lower left.")
        needs = {"trained_features": params.loss_weight, "linear_head": (r := params.rectify_rounds), "sent_head": r}
        self.requires = tuple(name for name in self.requires if needs.get(name, True))

    def _rectifies(self, round: int, spec: fb.RunSpec) -> bool:
        tail, last = self.params.rectify_rounds, spec.training.rounds
        return tail > 0 and last - tail <= round <= last

    @hookimpl
    def survey(self, round: int, spec: fb.RunSpec, state: Mapping[str, fb.Tensors]) -> str:
        """The cohort before every round, everyone in the last ones."""
        if self._rectifies(round, spec):
            return "everyone"
        return "cohort" if self.params.loss_weight and round <= spec.training.rounds else "nobody"

    @hookimpl
    def report(self, task: fb.ClientTask) -> fb.Tensors:
        """Mean feature of each class the client owns, and its counts."""
        features = client_features(task, task.received, task.buffers)
        return {"means": class_means(features, task.visible_labels).means, "counts": task.visible_counts}

    @hookimpl
    def reported(self, task: fb.ReportedTask) -> None:
        """P and π over the cohort, P̂ over everyone."""
        # the rectified head outlives a round from which no update arrives
        made = {name: tensor for name, tensor in task.state.get(self.name, {}).items() if name in HEAD}
        cohort = [task.reports[client] for client in task.cohort]
        if self.params.loss_weight and cohort:
            counts = torch.stack([report["counts"] for report in cohort]).sum(dim=0)
            made |= {"prototypes": merged(cohort), "prior": counts / counts.sum()}
        if self._rectifies(task.round, task.spec):
            made["directions"] = merged(task.reports.values(), unit_length=True)
        task.state[self.name] = made

    @hookimpl
    def broadcast(self, task: fb.BroadcastTask) -> fb.Broadcast:
        """The global weights and what the survey of this round gave."""
        kept = task.state.get(self.name, {})
        return fb.Broadcast(task.weights, {name: kept[name] for name in SENT_DOWN if name in kept})

    @hookimpl
    def loss_terms(self, step: fb.LocalStep) -> Tensor | None:
        """λ CE(s, y)."""
        params, sent = self.params, step.task.payload
        if not params.loss_weight or "prototypes" not in sent:
            return None
        what = (sent["prototypes"], scaled_log(sent["prior"], params.prior_weight), step.task.visible_counts > 0)
        return params.loss_weight * unification_loss(step.outputs.features, step.labels, *what, params.temperature)

    @hookimpl
    def after_training(self, task: fb.ClientTask, update: fb.Update) -> fb.Tensors | None:
        """In the last rounds the updated head, trained on virtual features of every class."""
        if "directions" not in task.payload:
            return None
        params, head, directions = self.params, task.model.linear_head, task.payload["directions"]
        generator = task.generator("virtual-features")
        features = client_features(task, task.received, task.buffers)
        [classes] = torch.nonzero(directions.any(dim=1), as_tuple=True)
        mixed = (params.virtual_features, params.left, params.right, generator)
        made = head.scale * virtual_features(directions[classes], features, *mixed)
        start, how = (update.weights[head.weight], update.weights[head.bias]), (params.rectify_epochs, params.lr_head)
        trained = retrained(made, *start, head.scale, *how, generator, classes=classes, batch_size=params.batch_size)
        return dict(zip(HEAD, trained, strict=True))

    @hookimpl
    def aggregate(self, task: fb.AggregationTask) -> fb.Tensors:
        """FedAvg's mean; rectified heads are averaged by n_k as well, beside it."""
        kept = dict(task.state.get(self.name, {}))
        if all(name in update.payload for update in task.updates for name in HEAD):
            shares = participant_shares(task.updates, task.spec.training.weighting)
            kept |= {name: weighted_mean([u.payload[name] for u in task.updates], shares) for name in HEAD}
        is_over = task.exchange == task.exchanges - 1  # what is of this round's model is not sent with the next survey
        task.state[self.name] = {name: kept[name] for name in kept if not (is_over and name in SENT_DOWN)}
        return average(task)

    @hookimpl
    def evaluate(self, task: fb.EvaluationTask) -> fb.Predictions:
        """The largest logit with the rectified head, once there is one; a fine-tuned model keeps its own."""
        return largest_logit_with_kept_head(task, self.name)
