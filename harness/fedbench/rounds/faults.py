"""Damaged updates: the simulated damage on their way to the server, and the server's check."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedbench.core.method.answers import misfit, not_finite
from fedbench.core.randomness import torch_generator
from fedbench.core.types import Tensors, Update

KINDS = ("nan", "inf", "shape", "missing")
"""Kinds of damage: a NaN value, an infinite one, a tensor of another shape, a missing tensor."""


def damaged(update: Update, seed: int, round: int, exchange: int) -> Update:
    """A copy of ``update`` with damage of a random kind (`KINDS`) to a random tensor.

    The server cannot know names and shapes of the payload, so only its values are damaged. An update without a tensor
    to damage is returned unchanged.
    """
    generator = torch_generator(seed, "damage", round, update.client, exchange)
    kind = KINDS[int(torch.randint(len(KINDS), (), generator=generator))]
    model = {**update.weights, **update.buffers}
    values = [name for name, t in {**model, **update.payload}.items() if t.is_floating_point() and t.numel()]
    if kind in ("shape", "missing") and not model:
        kind = "nan"
    names = list(model) if kind in ("shape", "missing") else values
    if not names:
        return update
    name = names[int(torch.randint(len(names), (), generator=generator))]
    parts = (update.weights, update.buffers, update.payload)
    changed = {part: _changed(tensors, name, kind) for part, tensors in zip(_PARTS, parts, strict=True)}
    return replace(update, **changed)  # type: ignore[arg-type]


def reason_to_reject(update: Update, weights: Tensors, buffers: Tensors) -> str:
    """The reason why the server cannot use an update of the model that it sent; "" if it can."""
    wrong = misfit(weights, update.weights) or misfit(buffers, update.buffers)
    if wrong:
        return wrong
    name = not_finite(update.weights, update.buffers, update.payload)
    return f"{name!r} is not finite" if name else ""


_PARTS = ("weights", "buffers", "payload")


def _changed(tensors: Tensors, name: str, kind: str) -> Tensors:
    """``tensors`` with one of them damaged, if it is among them."""
    if name not in tensors:
        return tensors
    if kind == "missing":
        return {other: tensor for other, tensor in tensors.items() if other != name}
    return {**tensors, name: _broken(tensors[name], kind)}


def _broken(tensor: Tensor, kind: str) -> Tensor:
    if kind == "shape":
        return tensor.new_zeros(tensor.numel() + 1)
    broken = tensor.clone()
    broken[(0,) * broken.ndim] = float(kind)
    return broken
