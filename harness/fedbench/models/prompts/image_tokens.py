"""Learnable tokens in the image tower of CLIP, behind the patch tokens (MaPLe, CVPR 2023), and what layers get besides.

Of the last block only the class token is computed, since the feature is read there. Embedded CLIP, 32 images with 4
tokens, one thread, forward and backward (`tests/bench/bench_image_tower.py`, medians of 40 pairs): open_clip's own
blocks take 1.34 times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedbench.core.errors import FedbenchError
from fedbench.models.clip.backbone import ClipBackbone
from fedbench.models.clip.transformer_blocks import Added, apply_block, is_plain

if TYPE_CHECKING:
    from open_clip.transformer import VisionTransformer


def has_class_token(visual: object) -> bool:
    """Whether an image tower is a vision transformer whose feature is its class token's."""
    from open_clip.transformer import VisionTransformer

    return isinstance(visual, VisionTransformer) and visual.attn_pool is None and visual.pool_type == "tok"


def require_vision_transformer(backbone: ClipBackbone, what: str, instead: str = "") -> VisionTransformer:
    """The backbone's image tower; FedbenchError where it has no class token to read, or blocks of another kind.

    ``what`` a method does there, and what to choose ``instead`` of another backbone.
    """
    visual: Any = getattr(backbone.module, "visual", None)
    if not (has_class_token(visual) and is_plain(visual.transformer)):
        raise FedbenchError(
            f"{what}, and the image tower of backbone {backbone.name!r} is no vision transformer of open_clip's plain "
            f"blocks with a class token (image_layers); use one, such as clip:embedded{instead and f', or {instead}'}."
        )
    tower: VisionTransformer = visual
    return tower


def encode_with_tokens(
    visual: VisionTransformer,
    images: Tensor,
    tokens: Tensor | None = None,
    deep: Sequence[Tensor] = (),
    added: Callable[[int], Added | None] = lambda number: None,
) -> Tensor:
    """Image features (b, d), not normalised, of ``images`` (b, 3, S, S) with ``tokens`` behind their patches.

    ``tokens`` (M_v, d_v), shared by the batch, or (b, M_v, d_v). They get no position and are there from the first
    norm on; ``deep``: others of their shape, which take their places behind the first layer, the second, and so on.
    ``added``: what layer ``number`` gets besides. The feature is the class token's. Without tokens and additions it is
    that of ``visual(images)``.
    """
    patches = visual.conv1(images).flatten(2).permute(0, 2, 1)
    count = patches.shape[0]
    start = visual.class_embedding.expand(count, 1, -1)
    x = visual.patch_dropout(torch.cat([start, patches], dim=1) + visual.positional_embedding)
    own = x.shape[1]
    if tokens is not None:
        x = torch.cat([x, tokens.expand(count, *tokens.shape[-2:])], dim=1)
    x = visual.ln_pre(x)
    *layers, last = visual.transformer.resblocks
    for number, layer in enumerate(layers):
        x = apply_block(layer, x, layer.ln_1(x), added=added(number))
        if number < len(deep):
            further = deep[number]
            x = torch.cat([x[:, :own], further.expand(count, *further.shape[-2:])], dim=1)
    x = apply_block(last, x[:, :1], last.ln_1(x), is_all=False, added=added(len(layers)))
    pooled = visual.ln_post(x[:, 0])
    features: Tensor = pooled if visual.proj is None else pooled @ visual.proj
    return features
