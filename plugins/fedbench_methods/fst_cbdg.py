"""FST-CBDG, federated self-training with class-balanced data generation - Yan and Guo, "Lightweight Unsupervised
Federated Learning with Pretrained Vision Language Model", arXiv 2404.11046, 2024.

A linear classifier on frozen image features I_j, from W_0 = T (text features of the classes) and b_0 = 0, learns
without labels. In every local iteration, in this order (Alg. 1):
    f(z) = softmax(s (W z + b)),   q_j⁰ = softmax(s T I_j)             (Eqs. 1, 2; the paper has no s: s = 1)
    q_j ← β q_j + (1 - β) f(I_j)                                       (Eq. 4)
    L_iST = -E_j[q_j · log f(I_j)]                                     (Eq. 3)
    m_k = #{j on the client: argmax q_j = k},   n_k = (1 + γ) max_k' m_k' - m_k      (Eq. 7)
    L_tSamp = -Σ_k Σ_{j≤n_k} log f(z_kj)_k,   z_kj ~ N(T_k, σ² I)      (Eqs. 5, 6)
    minimise L_iST + λ L_tSamp                                         (Eq. 8)
The server takes the plain mean of the participants' W and b (Alg. 1). A client keeps q, which is of its own images
alone, also where its update was lost. T is known to every client (Alg. 1); its C d floats are not counted.

Answers: build_model, local_loss, aggregate. Never reads a label. Stacks with loss terms, and with
clip-linear-centralized: there the clients are pooled, still without labels.
Ablations: `text_weight=0`, `self_training=false` (with clip-linear-centralized Table 3's "centralized"),
`sampling=equal` gives every class round(mean_k n_k) instances (Table 4, at Eq. 7's budget).
Left open / contradicted, no code being released:
- σ, batch size, s and unit length are not given. Entropies in print, all close to log K, speak for unit length, s = 1.
  `unit_features=false` leaves T at its own length, so that round 0 ranks products, not cosines.
- γ is 0 in the experiments, positive in the text. Fractions of (1 + γ) max m are rounded to the nearest whole number.
- Only L_iST cannot move by these equations: f = q at W_0, the gradient is zero. The paper's moves; its code may differ
  by `detach=false`, `restart=received`, `q_update=all`, `scale`.
- The sum in Eq. 6 outweighs the mean of Eq. 3: W grows, f sharpens at s = 1."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import fedbench.api as fb
from fedbench.api import FedbenchError, hookimpl, hyper
from fedbench.models.clip.backbone import fill_templates
from fedbench.models.heads import clip_of, head_on_features, scaled_logits
from fedbench.toolkit.fedavg import average


@dataclass(frozen=True, kw_only=True)
class FstCbdgParams:
    """Hyper-parameters of FST-CBDG."""

    beta: float = hyper(0.9, symbol="β", low=0.0, high=0.99, source="Eq. 4, section 4.1")
    gamma: float = hyper(0.0, symbol="γ", low=0.0, high=1.0, needs="text_weight", source="section 4.1; Eq. 7: γ > 0")
    text_weight: float = hyper(1.0, symbol="λ", low=0.01, high=10.0, log=True, off=0.0, source="Eq. 8, section 4.1")
    sigma: float = hyper(0.01, symbol="σ", low=1e-4, high=0.1, log=True, off=0.0, needs="text_weight", source="Eq. 5")
    reduction: Literal["sum", "mean"] = hyper("sum", symbol="Σ", source="Eq. 6 is a sum")
    scale: float = hyper(1.0, symbol="s", low=1.0, high=100.0, log=True, source="Eqs. 1 and 2 have none; CLIP's is 100")
    unit_features: bool = hyper(True, symbol="|I| = |T| = 1", source="not given; fits the entropies of Fig. 2")
    self_training: bool = hyper(True, symbol="L_iST", source="Eq. 8; false: only L_tSamp")
    sampling: Literal["balanced", "equal"] = hyper("balanced", symbol="n_k", source="Eq. 7; equal as in Table 4")
    detach: bool = hyper(True, symbol="∂q = 0", source="not given; q is a target")
    q_update: Literal["batch", "all"] = hyper("batch", symbol="j in Eq. 4", source="Alg. 1; of which images is open")
    restart: Literal["keep", "received"] = hyper("keep", symbol="q⁰", source="Eq. 2; received: by each round's model")
    weighting: Literal["uniform", "samples"] = hyper("uniform", symbol="E_c", source="Alg. 1; samples: section 3.1")


def probabilities(logits: Tensor) -> Tensor:
    """f = softmax(logits), (n, C) (Eq. 1). Written so that ``self_training_loss`` cancels exactly at q = f."""
    return (logits - logits.logsumexp(dim=1, keepdim=True)).exp()


def moving_average(soft_labels: Tensor, predictions: Tensor, beta: float) -> Tensor:
    """β q + (1 - β) f, (n, C) (Eq. 4); q itself, to the last bit, where f = q."""
    return torch.lerp(soft_labels, predictions, 1 - beta)


def self_training_loss(logits: Tensor, soft_labels: Tensor) -> Tensor:
    """L_iST = -E[q · log f] (Eq. 3), with ``soft_labels`` q (batch, C) whose rows sum to one."""
    # -q . (o - lse) = lse - q . o; unlike log_softmax its gradient f - q is zero to the last bit where q = f
    return (logits.logsumexp(dim=1) - (soft_labels * logits).sum(dim=1)).mean()


def pseudo_class_counts(soft_labels: Tensor) -> Tensor:
    """m_k, how many rows of q (n, C) are largest at k: (C,) int64."""
    return torch.bincount(soft_labels.argmax(dim=1), minlength=soft_labels.shape[1])


def balanced_counts(counts: Tensor, gamma: float) -> Tensor:
    """n_k = (1 + γ) max m - m_k (Eq. 7), from ``counts`` m (C,); m_k + n_k is the same whole number for every k."""
    return ((1 + gamma) * counts.max().double()).round().long() - counts


def equal_counts(counts: Tensor, gamma: float) -> Tensor:
    """round(mean_k n_k) for every class, (C,): the sampling that Table 4 compares with, at Eq. 7's budget."""
    return balanced_counts(counts, gamma).double().mean().round().long().expand_as(counts)


def text_samples(text: Tensor, amounts: Tensor, sigma: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """n_k draws z ~ N(T_k, σ² I) a class (Eq. 5): (Σ n_k, d) and their classes (Σ n_k,), from ``text`` T (C, d)."""
    classes = torch.arange(len(text), device=text.device).repeat_interleave(amounts)
    noise = torch.randn(len(classes), text.shape[1], generator=generator)
    return text[classes] + sigma * noise.to(text.device), classes


def text_sampling_loss(logits: Tensor, classes: Tensor, reduction: str) -> Tensor:
    """L_tSamp = -Σ log f(z)_k (Eq. 6), or divided by the number of samples; zero without any. ``logits`` (n, C)."""
    return cross_entropy(logits, classes, reduction="sum") / (1 if reduction == "sum" else max(len(classes), 1))


class FSTCBDG(fb.Method[FstCbdgParams]):
    """Learns without labels: self-training and synthetic text features."""

    name = "fst-cbdg"
    citation = "Yan and Guo, Lightweight Unsupervised Federated Learning, arXiv 2404.11046, 2024"
    requires = ("clip", "same_samples")
    recipe = {"optimizer": "sgd", "lr": 0.01, "momentum": 0.9, "weight_decay": 1e-5}
    keeps_lost_training = True
    prevents: tuple[str, ...] = ("weighed_clients",)

    def __init__(self, params: FstCbdgParams) -> None:
        if not params.self_training and params.text_weight == 0:
            raise FedbenchError("fst-cbdg has no loss left; set self_training=true or text_weight above 0.")
        super().__init__(params)
        self.prevents = () if params.weighting == "samples" else self.prevents

    @hookimpl
    def build_model(self, setup: fb.ModelSetup) -> fb.Model:
        """f with W_0 = T, b_0 = 0 (section 3.1)."""
        clip, names, forms = clip_of(setup), setup.classnames, setup.spec.templates
        if self.params.unit_features:
            text = clip.text_features(names, forms)
        else:
            text = clip.encode_text(fill_templates(names, forms)).reshape(len(forms), len(names), -1).mean(dim=0)
        model = head_on_features(clip, text, self.params.scale, unit_features=self.params.unit_features)
        return replace(model, constants={"text": text})

    @hookimpl
    def local_loss(self, step: fb.LocalStep) -> Tensor:
        """L_iST + λ L_tSamp of one iteration (Eq. 8), after the soft labels were moved (Alg. 1)."""
        chosen, soft_labels = self.params, self._kept_labels(step)
        batch = step.batch.index.to(soft_labels.device)
        if chosen.q_update == "batch":
            moved = moving_average(soft_labels[batch], probabilities(step.outputs.logits), chosen.beta)
            moved = soft_labels.index_copy(0, batch, moved)
        else:
            moved = moving_average(soft_labels, probabilities(_all_logits(step, step.weights)), chosen.beta)
        step.task.state[self.name] = {"soft_labels": moved.detach()}
        targets = moved.detach() if chosen.detach else moved
        loss = self_training_loss(step.outputs.logits, targets[batch]) * float(chosen.self_training)
        if chosen.text_weight > 0:
            loss = loss + chosen.text_weight * self._text_loss(step, pseudo_class_counts(moved))
        return loss

    def _kept_labels(self, step: fb.LocalStep) -> Tensor:
        """q (n_k, C) before this iteration: the client's own, at first f(·; T, 0) (Eq. 2)."""
        if step.number == 0 and self.params.restart == "received":
            start = step.received
        elif self.name in step.task.state:
            return step.task.state[self.name]["soft_labels"]
        else:
            text = step.model.constants["text"]
            start = {"head.weight": text, "head.bias": torch.zeros(len(text), device=text.device)}
        with torch.no_grad():
            return probabilities(_all_logits(step, start))

    def _text_loss(self, step: fb.LocalStep, counts: Tensor) -> Tensor:
        """L_tSamp (Eq. 6) on new draws for the pseudo-class ``counts`` m (C,)."""
        chosen = self.params
        amounts = (balanced_counts if chosen.sampling == "balanced" else equal_counts)(counts, chosen.gamma)
        text, generator = step.model.constants["text"], step.generator("text-samples")
        features, classes = text_samples(text, amounts, chosen.sigma, generator)
        logits = scaled_logits(features, step.weights["head.weight"], step.weights["head.bias"], chosen.scale)
        return text_sampling_loss(logits, classes, chosen.reduction)

    @hookimpl
    def aggregate(self, task: fb.AggregationTask) -> fb.Tensors:
        """The plain mean over the participants (Alg. 1), or weighted by their samples."""
        return average(task, self.params.weighting)


def _all_logits(step: fb.LocalStep, weights: fb.Tensors) -> Tensor:
    """Logits of all the client's images, (n_k, C)."""
    inputs = step.task.inputs.read(torch.arange(len(step.task.inputs)))
    return step.model.forward(weights, inputs, True).logits
