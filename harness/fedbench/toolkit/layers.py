"""A model in two parts: its last layers and those before them, or the last and the first vectors of its one prompt."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedbench.core.errors import FedbenchError, Unworkable
from fedbench.core.types import Model, Outputs, Tensors

FIRST, LAST = "first.", "last."
"""Prefixes of the two parts of a prompt's vectors."""


def layer_of(name: str) -> str:
    """The layer of a weight or running statistic: its name without the last part, but with the digits at its end.

    So a kernel and its bias are of one layer, and ``adapter.W1`` and ``adapter.b1`` are of another than ``adapter.W2``.
    """
    stem, _, leaf = name.rpartition(".")
    return f"{stem}.{leaf[len(leaf.rstrip('0123456789')) :]}" if stem else name


def layers(model: Model) -> list[str]:
    """The layers that have weights, in the model's order; a linear head is the last, wherever it stands.

    A model beside it (`Model.own`) has none of them.
    """
    ordered = list(dict.fromkeys(layer_of(name) for name in model.weights if name not in model.own))
    if model.head is not None:
        head = {layer_of(name) for name in model.head.names}
        ordered = [layer for layer in ordered if layer not in head] + [layer for layer in ordered if layer in head]
    return ordered


def last_layers(model: Model, count: int) -> frozenset[str]:
    """The names of the weights and running statistics of the model's last ``count`` layers."""
    chosen = set(layers(model)[-count:])
    return frozenset(name for name in (*model.weights, *model.buffers) if layer_of(name) in chosen)


def two_parts(model: Model, count: int, method: str) -> tuple[frozenset[str], frozenset[str]]:
    """The names of everything before the last ``count`` layers, and of these. Raises Unworkable if nothing is before
    them."""
    last = last_layers(model, count)
    if last.issuperset(model.weights.keys() - model.own):
        known = len(layers(model))
        raise Unworkable(
            f"{method} needs a model of more layers than the last {count}, and this one has {known}; choose a backbone "
            "that is trained (a CNN, or tune=full), or a learner of several layers."
        )
    return frozenset([*model.weights, *model.buffers]) - last, last


def vectors_apart(model: Model, share: float, method: str) -> Model:
    """Split a model whose only weight is a prompt (..., M, d): the last round(share M) vectors become a second layer.

    Any other model is returned unchanged. Raises FedbenchError if one part would be empty.
    """
    if len(model.weights) != 1 or not next(iter(model.weights)).startswith("prompt"):
        return model
    [(name, prompt)] = model.weights.items()
    length = prompt.shape[-2]
    first = length - round(share * length)
    if not 0 < first < length:
        raise FedbenchError(
            f"{method} splits a prompt of {length} vectors in two, and a share of {share:g} puts all of them in one "
            "part; choose another private_share, or a longer prompt."
        )

    def forward(tensors: Tensors, inputs: Tensor, training: bool) -> Outputs:
        whole = torch.cat([tensors[FIRST + name], tensors[LAST + name]], dim=-2)
        return model.forward({**tensors, name: whole}, inputs, training)

    parts = {FIRST + name: prompt[..., :first, :].clone(), LAST + name: prompt[..., first:, :].clone()}
    factors = {part: model.lr_factors[name] for part in parts if name in model.lr_factors}
    return replace(model, weights=parts, forward=forward, lr_factors=factors)
