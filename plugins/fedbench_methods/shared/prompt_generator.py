"""A network that generates the context in front of class names from their features, by cross-attention."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear

from fedbench.api import Tensors, torch_generator
from fedbench.models.heads import linear_layer
from fedbench.models.prompts.context import random_context

HEADS = 4
WIDENING = 4
"""The inner width of FF as a multiple of the context's width; GEGLU halves the first layer's output."""


def initial_generator(length: int, width: int, dim: int, seed: int) -> Tensors:
    """Queries (M, w) and the layers behind them, from names ``dim`` (d) wide to a context ``width`` (w = d_t) wide."""
    generator = torch_generator(seed, "fedtpg generator")
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
    """Split rows (n, w) into heads, (heads, n, w / heads)."""
    return rows.reshape(len(rows), HEADS, -1).transpose(0, 1)


def normed(rows: Tensor, weights: Mapping[str, Tensor], layer: str) -> Tensor:
    """Layer norm of each row of (n, w)."""
    return layer_norm(rows, rows.shape[-1:], *layer_of(weights, layer))


def layer_of(weights: Mapping[str, Tensor], layer: str) -> tuple[Tensor, Tensor]:
    """Weight and bias of a layer of the generator."""
    return weights[f"generator.{layer}.weight"], weights[f"generator.{layer}.bias"]
