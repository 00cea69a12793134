"""Plain transformer blocks of any library in one form: pre-norm attention, then an MLP.

open_clip's blocks are used as they are; those of transformers and timm are adapted to their names. Both forms of
attention that open_clip has had keep one packed matrix for queries, keys and values: torch's MultiheadAttention (up to
3.3) and a module of its own (4.x). Blocks with anything else in them (normed queries and keys, scaled heads, cosine
attention, gates, rotations) are not plain; only their library runs them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

_MUST_BE_IDENTITY = ("ln_q", "ln_k", "ln_inner", "q_norm", "k_norm", "norm")
_MUST_BE_ABSENT = ("logit_scale", "head_scale", "bias_k", "bias_v", "gate")
_SEPARATE = ("CLIPEncoderLayer", "SiglipEncoderLayer", "Siglip2EncoderLayer")
"""Block classes of transformers with separate matrices for queries, keys and values, under the same names."""

Added = Callable[[str, Tensor], Tensor | None]
"""A function of a projection's name ("q", "k", "v" or "o") and the states (..., T, w). It returns what is added to the
projection, (..., T, w), or None for nothing."""


class Attention(Protocol):
    """The parts of a block's attention: heads and four projections."""

    num_heads: int
    out_proj: nn.Linear

    @property
    def in_proj_weight(self) -> Tensor:
        """Weights of queries, keys and values, (3 w, w)."""

    @property
    def in_proj_bias(self) -> Tensor:
        """Biases of queries, keys and values, (3 w,)."""


@dataclass(frozen=True, eq=False)
class Block:
    """x + ls_1(attn(ln_1(x))), then x + ls_2(mlp(ln_2(x))); open_clip's own block has these names."""

    attn: Attention
    ln_1: Callable[[Tensor], Tensor]
    mlp: Callable[[Tensor], Tensor]
    ln_2: Callable[[Tensor], Tensor]
    ls_1: Callable[[Tensor], Tensor] = nn.Identity()
    ls_2: Callable[[Tensor], Tensor] = nn.Identity()


def plain_blocks(tower: object) -> list[Block] | None:
    """The blocks of a transformer (open_clip's ``resblocks``, transformers' ``layers``, timm's ``blocks``) in one form.

    None if a block is not plain, or if activations are checkpointed, which is left to the library. Applying a block
    reads the tensors from the modules.
    """
    layers: Any = next((getattr(tower, n) for n in ("resblocks", "layers", "blocks") if hasattr(tower, n)), None)
    if layers is None or getattr(tower, "grad_checkpointing", False):
        return None
    blocks = [_block(layer) for layer in layers]
    return None if None in blocks else blocks  # type: ignore[return-value]


def _block(layer: Any) -> Block | None:
    library, kind = type(layer).__module__.split(".")[0], type(layer).__name__
    if library == "transformers" and kind in _SEPARATE:
        return Block(_Separate(layer.self_attn), layer.layer_norm1, layer.mlp, layer.layer_norm2)
    if library == "timm" and kind == "Block" and type(layer.attn).__name__ == "Attention":
        own = layer.attn
        is_plain = _is_plain(own) and own.qkv.bias is not None and own.proj.in_features == own.qkv.in_features
        packed = _Packed(own)
        return Block(packed, layer.norm1, layer.mlp, layer.norm2, layer.ls1, layer.ls2) if is_plain else None
    if library == "open_clip" and kind == "ResidualAttentionBlock":
        own = layer.attn
        is_packed = getattr(own, "in_proj_weight", None) is not None and own.in_proj_bias is not None
        block: Block = layer
        return block if is_packed and _is_plain(own) and not hasattr(layer, "ln_1_kv") else None
    return None


def _is_plain(attention: Any) -> bool:
    if getattr(attention, "add_zero_attn", False):
        return False
    if any(getattr(attention, name, None) is not None for name in _MUST_BE_ABSENT):
        return False
    if any(type(getattr(attention, name, None)) not in (nn.Identity, type(None)) for name in _MUST_BE_IDENTITY):
        return False
    drops = (getattr(attention, name, None) for name in ("dropout", "attn_drop", "out_drop", "proj_drop"))
    return all(drop in (None, 0.0) or getattr(drop, "p", 1.0) == 0.0 for drop in drops)


class _Separate:
    """Attention of transformers; the separate matrices are joined at each call."""

    def __init__(self, own: Any) -> None:
        self._parts = (own.q_proj, own.k_proj, own.v_proj)
        self.num_heads, self.out_proj = int(own.num_heads), own.out_proj

    @property
    def in_proj_weight(self) -> Tensor:
        return torch.cat([part.weight for part in self._parts])

    @property
    def in_proj_bias(self) -> Tensor:
        return torch.cat([part.bias for part in self._parts])


class _Packed:
    """timm's attention, whose matrix is packed."""

    def __init__(self, own: Any) -> None:
        self._qkv = own.qkv
        self.num_heads, self.out_proj = int(own.num_heads), own.proj

    @property
    def in_proj_weight(self) -> Tensor:
        weight: Tensor = self._qkv.weight
        return weight

    @property
    def in_proj_bias(self) -> Tensor:
        bias: Tensor = self._qkv.bias
        return bias


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
