"""Pseudo-labels - the labels that a dual encoder gives without training, for every method that needs some; as in UPL:
Huang, Chu and Wei, "Unsupervised Prompt Learning for Vision-Language Models", arXiv 2204.03649.

Once, before round 1, every client labels its own samples that have none by the teacher's class texts t_k:
    p_j = softmax_k(s f_j·t_k),   y_j = argmax_k p_jk,   c_j = max_k p_jk
and keeps (`select`)
    all          every sample
    confident    those with c_j >= c                                   (a threshold)
    top_k        of every class it predicts the K with the largest c_j (UPL: K = 16)
All methods of the stack then learn from y_j: `pseudo-labels+promptfl` is UPL's CoOp, federated by FedAvg;
`pseudo-labels` alone is FedAvg. A client's own labels stay. The hidden ones reach nobody. Nothing is sent.

    refresh=round     the teacher is the model that the client receives in the round, p_j its softmax, selected anew
    labels=soft       y_j ~ p_j, drawn anew every round: the mean over draws of a loss that is linear in the one-hot
                      label, as cross-entropy is, is the loss on p_j itself; so every method learns from soft labels
    by=server         t_k is the mean unit feature of the server's labelled samples of class k

Answers: label, relabel. Stacks with every method that learns from labels.
The teacher is the run's (`backbone.teacher`), by default the backbone itself where it is a dual encoder. UPL chooses
among all samples, here each client among its own, since nobody sees those of others: a class that a client never
predicts has no sample there. UPL's ensemble over several teachers is left out. With refresh=round what clients report
before round 1 (class counts, say) is by the teacher's labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedbench.api import ClientTask, LabelTask, Method, hookimpl, hyper
from fedbench.models.heads import teacher_of

AT_ONCE = 4096
"""Samples whose probabilities are worked out together."""


@dataclass(frozen=True, kw_only=True)
class PseudoLabelParams:
    """Hyper-parameters of pseudo-labels."""

    select: Literal["all", "confident", "top_k"] = hyper("all", symbol="select", source="top_k: UPL, section 3.1")
    threshold: float = hyper(
        0.5, symbol="c", low=0.01, high=0.99, when={"select": ("confident",)}, source="not the paper's"
    )
    k: int = hyper(16, symbol="K", low=1, high=1000, log=True, when={"select": ("top_k",)}, source="UPL, section 4.1")
    labels: Literal["hard", "soft"] = hyper("hard", symbol="y", source="UPL, section 3.1; soft is not the paper's")
    refresh: Literal["fixed", "round"] = hyper(
        "fixed", symbol="teacher", source="UPL, section 3.1; round: the received model, not the paper's"
    )
    by: Literal["text", "server"] = hyper(
        "text", symbol="t", source="UPL, section 3.1; server: means of its labelled samples, not the paper's"
    )


def class_means(features: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Unit means (K, d) of the unit ``features`` (n, d) of each class; zero for a class without a sample."""
    sums = torch.zeros(classes, features.shape[1]).index_add_(0, labels, normalize(features, dim=-1))
    return normalize(sums, dim=-1)


def zero_shot(features: Tensor, texts: Tensor, scale: float) -> Tensor:
    """Probabilities p (n, K) of raw image ``features`` (n, d) by unit ``texts`` (K, d)."""
    return (scale * normalize(features, dim=-1) @ texts.T).softmax(dim=-1)


def top_of_each_class(confidence: Tensor, labels: Tensor, k: int) -> Tensor:
    """Whether a sample is among the ``k`` most confident of its label, (n,) bool; of equals the first counts."""
    order = confidence.argsort(descending=True, stable=True)
    kept = torch.zeros(len(labels), dtype=torch.bool)
    for label in set(labels.tolist()):
        kept[order[labels[order] == label][:k]] = True
    return kept


class PseudoLabels(Method[PseudoLabelParams]):
    """Zero-shot labels in place of those that the scenario hides."""

    name = "pseudo-labels"
    citation = "Huang et al., Unsupervised Prompt Learning for Vision-Language Models, arXiv 2022"
    provides = ("labels",)
    reads = ("teacher",)

    def __init__(self, params: PseudoLabelParams) -> None:
        super().__init__(params)
        draws = params.labels == "soft" and params.refresh == "fixed"  # from what it knows of each sample
        self.requires = (*(("server_labels",) if params.by == "server" else ()), *(("same_samples",) if draws else ()))
        self._of_clients: list[Tensor] = []
        """p (n_k, K) of the samples that client k keeps, where labels are drawn from them."""

    @hookimpl
    def label(self, task: LabelTask) -> Tensor:
        """Labels of what each client keeps, -1 of the rest; where they change by round, of all."""
        setup, teacher = task.setup, teacher_of(task.setup)
        encoder, scale = teacher.image_encoder(), teacher.logit_scale
        if task.server is None:
            texts = teacher.text_features(setup.classnames, setup.spec.templates)
        else:
            images = task.server.features(encoder)
            shown = images.read(torch.arange(len(images))).float()
            texts = class_means(shown.cpu(), task.server.labels, len(setup.classnames)).to(shown.device)
        inputs = task.features(encoder)
        rows = torch.split(torch.arange(task.num_samples), AT_ONCE)
        p = torch.cat([zero_shot(inputs.read(some).float(), texts, scale).cpu() for some in rows])
        confidence, labels = p.max(dim=-1)
        if self.params.refresh == "round":
            return labels
        labels = self._kept(confidence, labels, task.clients)
        if self.params.labels == "soft":
            self._of_clients = [p[own[labels[own] >= 0]] for own in task.clients]
        return labels

    @hookimpl
    def relabel(self, task: ClientTask) -> Tensor | None:
        """Labels by the received model, or drawn from probabilities; none where they are fixed."""
        if self.params.refresh == "fixed" and self.params.labels == "hard":
            return None
        if self.params.refresh == "round":
            tensors, rows = {**task.received, **task.buffers}, torch.split(torch.arange(len(task.inputs)), AT_ONCE)
            with torch.no_grad():
                outputs = [task.model.forward(tensors, task.inputs.read(some), False).logits for some in rows]
            p = torch.cat(outputs).softmax(dim=-1).cpu()
            confidence, labels = p.max(dim=-1)
            kept = self._kept(confidence, labels, [torch.arange(len(p))]) >= 0
        else:
            p = self._of_clients[task.client]
            kept = torch.ones(len(p), dtype=torch.bool)
        if self.params.labels == "soft":
            labels = torch.multinomial(p, 1, generator=task.generator("pseudo-labels"))[:, 0]
        return torch.where(kept, labels, -1)

    def _kept(self, confidence: Tensor, labels: Tensor, clients: Sequence[Tensor]) -> Tensor:
        if self.params.select == "all":
            return labels
        kept = confidence >= self.params.threshold
        if self.params.select == "top_k":
            kept = torch.zeros_like(kept)
            for own in clients:
                kept[own] = top_of_each_class(confidence[own], labels[own], self.params.k)
        return torch.where(kept, labels, -1)
