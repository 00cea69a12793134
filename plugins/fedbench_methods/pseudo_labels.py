"""Pseudo-labels - the labels that a dual encoder gives without training, for every method that needs some; as in UPL:
Huang, Chu and Wei, "Unsupervised Prompt Learning for Vision-Language Models", arXiv 2204.03649.

Once, before round 1, every client labels its own samples by the teacher's class texts t_k:
    p_j = softmax_k(s f_j·t_k),   y_j = argmax_k p_jk,   c_j = max_k p_jk
and keeps (`select`)
    all          every sample
    confident    those with c_j >= c                                   (a threshold)
    top_k        of every class it predicts the K with the largest c_j (UPL: K = 16)
All methods of the stack then learn from y_j: `pseudo-labels+promptfl` is UPL's CoOp, federated by FedAvg;
`pseudo-labels` alone is FedAvg. The hidden labels reach nobody. Nothing is sent.

Answers: label. Stacks with every method that learns from labels.
The teacher is the run's (`backbone.teacher`), by default the backbone itself where it is a dual encoder. UPL chooses
among all samples, here each client among its own, since nobody sees those of others: a class that a client never
predicts has no sample there. UPL's ensemble over several teachers, and soft labels, are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedbench.api import LabelTask, Method, hookimpl, hyper
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


def zero_shot(features: Tensor, texts: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Confidence c (n,) and label y (n,) of raw image ``features`` (n, d) by unit ``texts`` (K, d)."""
    found = (scale * normalize(features, dim=-1) @ texts.T).softmax(dim=-1).max(dim=-1)
    return found.values, found.indices


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

    @hookimpl
    def label(self, task: LabelTask) -> Tensor:
        """Labels of what each client keeps, -1 of the rest."""
        setup, teacher = task.setup, teacher_of(task.setup)
        texts = teacher.text_features(setup.classnames, setup.spec.templates)
        inputs, scale = task.features(teacher.image_encoder()), teacher.logit_scale
        rows = torch.split(torch.arange(task.num_samples), AT_ONCE)
        parts = [zero_shot(inputs.read(some).float(), texts, scale) for some in rows]
        confidence, labels = (torch.cat(each).cpu() for each in zip(*parts, strict=True))
        return self._kept(confidence, labels, task.clients)

    def _kept(self, confidence: Tensor, labels: Tensor, clients: Sequence[Tensor]) -> Tensor:
        if self.params.select == "all":
            return labels
        kept = confidence >= self.params.threshold
        if self.params.select == "top_k":
            kept = torch.zeros_like(kept)
            for own in clients:
                kept[own] = top_of_each_class(confidence[own], labels[own], self.params.k)
        return torch.where(kept, labels, -1)
