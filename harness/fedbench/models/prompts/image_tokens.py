"""Learnable tokens in an image tower, behind the patch tokens (MaPLe, CVPR 2023), and additions to its layers.

The last block computes only what the feature is read from: the class token, if a tower has one. Embedded CLIP, 32
images with 4 tokens, one thread, forward and backward (`tests/bench/bench_image_tower.py`, medians of 40 pairs):
open_clip's own blocks take 1.34 times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fedbench.core.errors import FedbenchError
from fedbench.models.clip.backbone import ClipBackbone
from fedbench.models.clip.blocks import Added, apply_block
from fedbench.models.clip.image_towers import ClassTokenTower, ImageTower, image_tower


def require_vision_transformer(backbone: ClipBackbone, what: str, instead: str = "") -> ImageTower:
    """The backbone's image tower; FedbenchError if it is no vision transformer of plain blocks.

    For the error, ``what`` says what a method does there, and ``instead`` names an alternative to another backbone.
    """
    tower = image_tower(backbone.module)
    if tower is None or tower.blocks is None:
        raise FedbenchError(
            f"{what}, and the image tower of backbone {backbone.name!r} is no vision transformer of plain blocks "
            f"(image_layers); use one, such as clip:embedded{instead and f', or {instead}'}."
        )
    return tower


def encode_with_tokens(
    tower: ImageTower,
    images: Tensor,
    tokens: Tensor | None = None,
    deep: Sequence[Tensor] = (),
    added: Callable[[int], Added | None] = lambda number: None,
) -> Tensor:
    """Image features (b, d), not normalised, of ``images`` (b, 3, S, S) with ``tokens`` behind their patches.

    ``tokens`` are (M_v, d_v), shared by the batch, or (b, M_v, d_v). They get no position and are added in front of the
    first norm. ``deep``: tokens of the same shape that replace them behind the first layer, the second, and so on.
    ``added``: what is added to the projections of layer ``number``. The feature is the class token's, or what the tower
    pools from its own tokens, without the further ones. Without tokens and additions it equals the backbone's. The
    tower must have ``blocks``.
    """
    x, blocks = tower.embed(images), tower.blocks
    assert blocks is not None
    own = x.shape[1]
    if tokens is not None:
        x = torch.cat([x, tokens.expand(len(x), *tokens.shape[-2:])], dim=1)
    x = tower.first_norm(x)
    *layers, last = blocks
    for number, layer in enumerate(layers):
        x = apply_block(layer, x, layer.ln_1(x), added=added(number))
        if number < len(deep):
            further = deep[number]
            x = torch.cat([x[:, :own], further.expand(len(x), *further.shape[-2:])], dim=1)
    needed = 1 if isinstance(tower, ClassTokenTower) else own
    x = apply_block(last, x[:, :needed], last.ln_1(x), is_all=False, added=added(len(layers)))
    return tower.pool(x)


def in_chunks(function: Callable[[Tensor], Tensor], rows: Tensor, size: int) -> Tensor:
    """Apply ``function``, which treats each row by itself, to ``rows`` (b, ...), at most ``size`` at once.

    With more than one chunk only the result is kept for the gradient, and the backward pass computes the rest again.
    """
    if len(rows) <= size:
        return function(rows)
    chunks = torch.split(rows, size)
    if not torch.is_grad_enabled():
        return torch.cat([function(chunk) for chunk in chunks])
    again = [checkpoint(function, chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    return torch.cat(again)
