"""Learnable tokens in the image tower of CLIP: appended to the patch tokens, at the first layer (MaPLe, CVPR 2023)."""

from __future__ import annotations

import torch
from open_clip.transformer import VisionTransformer
from torch import Tensor

from fedbench.errors import FedbenchError
from fedbench.models.clip import ClipBackbone


def require_vision_transformer(backbone: ClipBackbone, method: str) -> VisionTransformer:
    """The backbone's image tower; FedbenchError where it has no places for tokens, or pools elsewhere than there."""
    visual = backbone.module.visual
    if not isinstance(visual, VisionTransformer) or visual.attn_pool is not None or visual.pool_type != "tok":
        raise FedbenchError(
            f"{method} appends tokens to the image tower, and backbone {backbone.name!r} is no vision transformer with "
            "a class token; use one, such as clip:embedded, or switch the visual tokens off."
        )
    return visual


def encode_with_tokens(visual: VisionTransformer, images: Tensor, tokens: Tensor) -> Tensor:
    """Image features (b, d), not normalised, of ``images`` (b, 3, S, S) with ``tokens`` behind their patches.

    ``tokens`` (M_v, d_v), shared by the batch, or (b, M_v, d_v). They get no position and are there from the first
    norm on; the feature is the class token's. Without tokens (M_v = 0) it equals ``visual(images)``.
    """
    patches = visual.conv1(images).flatten(2).permute(0, 2, 1)
    count = patches.shape[0]
    start = visual.class_embedding.expand(count, 1, -1)
    x = visual.patch_dropout(torch.cat([start, patches], dim=1) + visual.positional_embedding)
    x = torch.cat([x, tokens.expand(count, *tokens.shape[-2:])], dim=1)
    pooled, _ = visual._pool(visual.transformer(visual.ln_pre(x)))
    features: Tensor = pooled if visual.proj is None else pooled @ visual.proj
    return features
