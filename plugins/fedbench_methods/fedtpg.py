"""FedTPG - Qiu, Li, Mummadi, Ganesh, Li, Peng, Lin, "Federated Text-driven Prompt Generation for Vision-Language
Models", ICLR 2024; arXiv 2310.06123.

A generator, the same for all clients, turns the names of the classes into the context before them; CLIP is frozen:
    T (K, d): unit text features of the bare class names, no template;   Q (M, d_t): learned queries
    H = MHA(LN_q(Q), LN_c(T), LN_c(T)), 4 heads, with no residual from Q
    v = H + FF(H),   FF = LN, Linear(d_t, 8 d_t), GEGLU, Linear(4 d_t, d_t)
    t_k = g([v; name_k]) / |·|,   L = CE(s f_x·t_k, y);   generator ← Σ_i (n_i / Σ_j n_j) generator_i
Trained and sent: Q and the generator, 14 d_t² + 2 d d_t + 17 d_t + 2 d + M d_t floats, that is 16 d² + 19 d + M d where
d = d_t: 4,206,080 for ViT-B/16, M = 4. None of their shapes depends on K: other class names, of classes never trained
on too, go through the same weights. The order of the names does not change v.

Answers: build_model, local_loss. Stacks with methods that add loss terms or aggregate otherwise; with `context=present`
terms that compare with the received model's logits (fedntd) compare two sets of names.
Paper against what runs here: the paper deals disjoint label sets, and a client generates from, and classifies among,
its own names. Here clients share labels, and by default everybody reads all K names (`context=all`), which makes v the
same for all who have the same weights. `context=present` leaves the names of classes that a client has no sample of out
of attention and loss in its local training; the test set is met with all names. The released code averages clients
uniformly (`weighting=uniform` of the run) and lets each keep its momentum and cosine schedule from round to round; here
the run's weighting holds and the optimiser is new in every round, as for all methods. Recipe: the code's SGD 3e-3,
momentum 0.9, decay 1e-5. Keys and values are projections from d to d_t: the paper's towers have d = d_t. Initial
values: Q is N(0, 0.02²), the rest as in torch.nn.MultiheadAttention with kdim and vdim (uniform Xavier for each
projection, zero biases), LayerNorm and Linear, so round 0 is not zero-shot. No self-attention, as in the code's runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear

import fedbench.api as fb
from fedbench.api import hookimpl, hyper
from fedbench.models.heads import clip_of, linear_layer, text_classifier
from fedbench.models.prompts.context import prompt_tower, random_context
from fedbench.toolkit.fedavg import cross_entropy

HEADS = 4
WIDENING = 4
"""The inner width of FF, by that of the context; GEGLU halves what the first layer gives."""
ABSENT = "fedtpg.absent"
"""The tensor (K,) by which local training tells the forward pass which names to leave out."""


@dataclass(frozen=True, kw_only=True)
class FedTpgParams:
    """Hyper-parameters of FedTPG."""

    context_length: int = hyper(4, symbol="M", low=1, high=32, search=(2, 8), source="released code: 4")
    context: Literal["all", "present"] = hyper(
        "all", symbol="T", source="names read in training; present: the paper's clients"
    )


def initial_generator(length: int, width: int, dim: int, seed: int) -> fb.Tensors:
    """Queries (M, w) and the layers behind them, from names ``dim`` (d) wide to a context ``width`` (w = d_t) wide."""
    generator = fb.torch_generator(seed, "fedtpg generator")
    weights = {"generator.queries": random_context(seed, "fedtpg queries", length, width)}
    for layer, size in (("norm_q", width), ("norm_c", dim), ("norm_h", width)):
        weights |= {f"generator.{layer}.weight": torch.ones(size), f"generator.{layer}.bias": torch.zeros(size)}
    for layer, columns in (("query", width), ("key", dim), ("value", dim)):
        bound = (6 / (width + columns)) ** 0.5
        drawn = (2 * torch.rand(width, columns, generator=generator) - 1) * bound
        weights |= {f"generator.{layer}.weight": drawn, f"generator.{layer}.bias": torch.zeros(width)}
    weights |= linear_layer("generator.out", width, width, generator) | {"generator.out.bias": torch.zeros(width)}
    weights |= linear_layer("generator.widen", 2 * WIDENING * width, width, generator)
    return weights | linear_layer("generator.narrow", width, WIDENING * width, generator)


def generated_context(weights: Mapping[str, Tensor], names: Tensor, absent: Tensor | None = None) -> Tensor:
    """v = H + FF(H), (M, w), from the features of class ``names`` T (K, d); ``absent`` (K,) as in `attention`."""
    queries = normed(weights["generator.queries"], weights, "norm_q")
    gathered = attention(queries, normed(names, weights, "norm_c"), weights, absent)
    values, gates = linear(normed(gathered, weights, "norm_h"), *layer_of(weights, "widen")).chunk(2, dim=-1)
    return gathered + linear(values * gelu(gates), *layer_of(weights, "narrow"))


def attention(queries: Tensor, names: Tensor, weights: Mapping[str, Tensor], absent: Tensor | None = None) -> Tensor:
    """MHA(queries, names, names), (M, w), of ``queries`` (M, w) and ``names`` (K, d), both normed.

    ``absent`` (K,) is added to the scores: minus infinity for names that are not to be seen, else 0.
    """
    query = in_heads(linear(queries, *layer_of(weights, "query")))
    key, value = (in_heads(linear(names, *layer_of(weights, layer))) for layer in ("key", "value"))
    scores = query @ key.mT * query.shape[-1] ** -0.5
    shares = (scores if absent is None else scores + absent).softmax(dim=-1)
    return linear((shares @ value).transpose(0, 1).flatten(1), *layer_of(weights, "out"))


def in_heads(rows: Tensor) -> Tensor:
    """(n, w) to (heads, n, w / heads)."""
    return rows.reshape(len(rows), HEADS, -1).transpose(0, 1)


def normed(rows: Tensor, weights: Mapping[str, Tensor], layer: str) -> Tensor:
    """LN of ``rows`` (n, w), each by itself."""
    return layer_norm(rows, rows.shape[-1:], *layer_of(weights, layer))


def layer_of(weights: Mapping[str, Tensor], layer: str) -> tuple[Tensor, Tensor]:
    """Weight and bias of a layer."""
    return weights[f"generator.{layer}.weight"], weights[f"generator.{layer}.bias"]


class FedTPG(fb.Method[FedTpgParams]):
    """Generates the context from the class names."""

    name = "fedtpg"
    citation = "Qiu et al., Federated Text-driven Prompt Generation for Vision-Language Models, ICLR 2024"
    Params = FedTpgParams
    recipe = {"optimizer": "sgd", "lr": 3e-3, "momentum": 0.9, "weight_decay": 1e-5}
    requires = ("labels", "clip")

    @hookimpl
    def build_model(self, setup: fb.ModelSetup) -> fb.Model:
        """The generator; logits are scaled cosines of the frozen image features to the texts of its context."""
        clip, length = clip_of(setup), self.params.context_length
        tower = prompt_tower(clip, setup.classnames, length)
        names = clip.text_features([name.replace("_", " ") for name in setup.classnames], ("{}",))

        def texts(tensors: Mapping[str, Tensor]) -> Tensor:
            return tower.encode(generated_context(tensors, names, tensors.get(ABSENT)))

        weights = initial_generator(length, tower.width, clip.embed_dim, setup.spec.seed)
        return fb.Model(weights, text_classifier(texts, clip.logit_scale), encoder=clip.image_encoder())

    @hookimpl
    def local_loss(self, step: fb.LocalStep) -> Tensor:
        """Cross-entropy; with `context=present` among the client's own classes, of a context from their names alone."""
        if self.params.context == "all":
            return cross_entropy(step)
        absent = torch.where(step.task.visible_counts > 0, 0.0, -torch.inf)
        logits = step.outputs_with({ABSENT: absent}).logits + absent
        return torch.nn.functional.cross_entropy(logits, step.labels)
