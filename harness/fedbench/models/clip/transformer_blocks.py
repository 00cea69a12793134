"""A plain transformer block written out, so that methods can use fewer queries or add to projections."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from fedbench.models.clip.plain_blocks import Attention, Block

Added = Callable[[str, Tensor], Tensor | None]
"""A function of a projection's name ("q", "k", "v" or "o") and the states (..., T, w). It returns what is added to the
projection, (..., T, w), or None for nothing."""


def apply_block(
    layer: Block,
    x: Tensor,
    seen: Tensor,
    mask: Tensor | None = None,
    *,
    is_all: bool = True,
    added: Added | None = None,
) -> Tensor:
    """Apply the block to states ``x`` (..., q, w), which attend to the normed states ``seen`` (..., T, w): (..., q, w).

    ``is_all``: ``seen`` are the norms of ``x``. ``mask`` (..., q, T) is added to the scores; ``added`` gives what is
    added to the projections.
    """
    attention = layer.attn
    heads, width = attention.num_heads, x.shape[-1]
    if is_all:
        query, key, value = _heads(_projected(attention, "qkv", seen, added), 3 * heads).chunk(3, dim=-3)
    else:
        query = _heads(_projected(attention, "q", layer.ln_1(x), added), heads)
        key, value = _heads(_projected(attention, "kv", seen, added), 2 * heads).chunk(2, dim=-3)
    if mask is None:
        gathered = scaled_dot_product_attention(query, key, value)
    else:
        # written out, since scaled_dot_product_attention has no batching rule for vmap on the CPU
        scores = query @ key.mT * (width // heads) ** -0.5 + mask
        gathered = scores.softmax(-1) @ value
    gathered = gathered.transpose(-2, -3).flatten(-2)
    attended = linear(gathered, attention.out_proj.weight, attention.out_proj.bias)
    x = x + layer.ls_1(_with(attended, added, "o", gathered))
    result: Tensor = x + layer.ls_2(layer.mlp(layer.ln_2(x)))
    return result


def _projected(attention: Attention, names: str, x: Tensor, added: Added | None) -> Tensor:
    """The projections ``names`` (consecutive letters of "qkv") of ``x`` (..., T, w), side by side."""
    width, start = x.shape[-1], "qkv".index(names)
    rows = slice(start * width, (start + len(names)) * width)
    projected = linear(x, attention.in_proj_weight[rows], attention.in_proj_bias[rows])
    if added is None:
        return projected
    parts = [_with(part, added, name, x) for name, part in zip(names, torch.split(projected, width, -1), strict=True)]
    return torch.cat(parts, dim=-1)


def _with(projected: Tensor, added: Added | None, name: str, x: Tensor) -> Tensor:
    more = None if added is None else added(name, x)
    return projected if more is None else projected + more


def _heads(projected: Tensor, count: int) -> Tensor:
    """Reshape (..., T, heads * w) to (..., heads, T, w)."""
    return projected.reshape(*projected.shape[:-1], count, -1).transpose(-2, -3)
