"""A block of open_clip's transformers written out, so that methods reach inside: fewer queries, further projections.

Both forms of attention that open_clip has had keep one packed matrix for queries, keys and values: torch's
MultiheadAttention (up to 3.3) and a module of its own (4.x). Blocks with anything else in them (normed queries and
keys, scaled heads, cosine attention) are not plain, and are left to open_clip itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

if TYPE_CHECKING:
    from open_clip.transformer import ResidualAttentionBlock

Added = Callable[[str, Tensor], Tensor | None]
"""What a projection of states gets besides: its name ("q", "k", "v" or "o") and the states (..., T, w) to (..., T, w),
or None for nothing."""

_MUST_BE_IDENTITY = ("ln_q", "ln_k", "ln_inner")
_MUST_BE_ABSENT = ("logit_scale", "head_scale", "bias_k", "bias_v")


def is_plain(tower: nn.Module) -> bool:
    """Whether all blocks of a transformer can be written out; checkpointed activations are left to open_clip."""
    from open_clip.transformer import ResidualAttentionBlock, Transformer

    if type(tower) is not Transformer or tower.grad_checkpointing:
        return False
    layers: Any = tower.resblocks
    return all(type(layer) is ResidualAttentionBlock and _is_plain(layer) for layer in layers)


def _is_plain(layer: Any) -> bool:
    attention = layer.attn
    if hasattr(layer, "ln_1_kv") or getattr(attention, "add_zero_attn", False):
        return False
    if getattr(attention, "in_proj_weight", None) is None or attention.in_proj_bias is None:
        return False
    if any(getattr(attention, name, None) is not None for name in _MUST_BE_ABSENT):
        return False
    if any(type(getattr(attention, name, None)) not in (nn.Identity, type(None)) for name in _MUST_BE_IDENTITY):
        return False
    drops = (getattr(attention, "dropout", 0.0), *(getattr(attention, n, None) for n in ("attn_drop", "out_drop")))
    return all(drop in (None, 0.0) or getattr(drop, "p", 1.0) == 0.0 for drop in drops)


def apply_block(
    layer: ResidualAttentionBlock,
    x: Tensor,
    seen: Tensor,
    mask: Tensor | None = None,
    *,
    is_all: bool = True,
    added: Added | None = None,
) -> Tensor:
    """The block at the states ``x`` (..., q, w), which look at the normed states ``seen`` (..., T, w): (..., q, w).

    ``is_all``: ``x`` are the states that ``seen`` are the norms of. ``mask`` (..., q, T) is added to the scores;
    ``added`` to the projections.
    """
    attention: Any = layer.attn
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


def _projected(attention: Any, names: str, x: Tensor, added: Added | None) -> Tensor:
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
    """(..., T, heads * w) to (..., heads, T, w)."""
    return projected.reshape(*projected.shape[:-1], count, -1).transpose(-2, -3)
