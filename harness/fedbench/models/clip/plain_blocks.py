"""The blocks of transformers that can be written out, whichever library built them: pre-norm attention, then an MLP.

open_clip's blocks are taken as they are; those of transformers and timm are shown in its terms. Both forms of attention
that open_clip has had keep one packed matrix for queries, keys and values: torch's MultiheadAttention (up to 3.3) and a
module of its own (4.x). Blocks with anything else in them (normed queries and keys, scaled heads, cosine attention,
gates, rotations) are not plain, and are left to their library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

_MUST_BE_IDENTITY = ("ln_q", "ln_k", "ln_inner", "q_norm", "k_norm", "norm")
_MUST_BE_ABSENT = ("logit_scale", "head_scale", "bias_k", "bias_v", "gate")
_SEPARATE = ("CLIPEncoderLayer", "SiglipEncoderLayer", "Siglip2EncoderLayer")
"""Blocks of transformers with a matrix each for queries, keys and values, under one set of names."""


class Attention(Protocol):
    """What a block's attention is made of: heads and four projections."""

    num_heads: int
    out_proj: nn.Linear

    @property
    def in_proj_weight(self) -> Tensor:
        """(3 w, w): queries, keys and values."""

    @property
    def in_proj_bias(self) -> Tensor:
        """(3 w,)."""


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

    None where any of them is not plain, or activations are checkpointed, which is left to the library. The tensors are
    read from the modules whenever a block is applied.
    """
    found: Any = next((getattr(tower, n) for n in ("resblocks", "layers", "blocks") if hasattr(tower, n)), None)
    if found is None or getattr(tower, "grad_checkpointing", False):
        return None
    blocks = [_block(layer) for layer in found]
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
        found: Block = layer
        return found if is_packed and _is_plain(own) and not hasattr(layer, "ln_1_kv") else None
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
    """Attention of transformers, whose matrices are put together at each call."""

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
    """timm's attention."""

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
