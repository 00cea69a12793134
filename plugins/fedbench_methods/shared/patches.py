"""Features of image patches from CLIP's image tower, in the space shared with texts (FedOTP, PLOT)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, scaled_dot_product_attention

from fedbench.api import FedbenchError
from fedbench.models.clip.backbone import ClipBackbone, activation_of
from fedbench.models.clip.image_towers import ClassTokenTower, has_patches, image_tower

if TYPE_CHECKING:
    from open_clip.modified_resnet import AttentionPool2d


@dataclass(frozen=True, eq=False)
class ClipPatchEncoder:
    """A ``FrozenEncoder`` of an image's P patches: their unit features row by row, without the pooled feature.

    A vision transformer gives all tokens but the class token, behind its last norm and projection. CLIP's ResNet gives
    its attention pool with every position as a query. Features are float16; ViT-B/16 has 200 KB an image. Raises
    FedbenchError for an image tower of another kind.
    """

    backbone: ClipBackbone

    def __post_init__(self) -> None:
        if not has_patches(self.backbone.module):
            raise FedbenchError(
                f"the image tower of backbone {self.backbone.name!r} has no features of single patches in the space of "
                "its texts; use a vision transformer with a class token, such as clip:embedded, or CLIP's own ResNet, "
                "such as clip:RN50-quickgelu@openai."
            )

    @property
    def name(self) -> str:
        return f"{self.backbone.name} patches"

    @cached_property
    def key(self) -> str:
        """Digest of weights, transform and activation. It differs from that of the pooled features."""
        backbone = self.backbone
        kind = f"patches float16 {backbone.weights_hash} {backbone.transform} {activation_of(backbone.module)}"
        return hashlib.sha256(kind.encode()).hexdigest()

    @torch.no_grad()
    def __call__(self, pixels: Tensor) -> Tensor:
        images = self.backbone.transform(pixels.to(self.backbone.device))
        return normalize(all_tokens(self.backbone.module, images)[:, 1:], dim=-1).half()


def all_tokens(module: nn.Module, images: Tensor) -> Tensor:
    """Features (b, 1 + P, d), not normalised, of ``images`` (b, 3, S, S): the pooled one, then the patches' row by row.

    The pooled feature is the backbone's. The dual encoder must satisfy `has_patches`.
    """
    tower = image_tower(module)
    if isinstance(tower, ClassTokenTower):
        return tower.project(tower.states(images))
    visual: Any = module.visual
    x = visual.stem(images)
    for layer in (visual.layer1, visual.layer2, visual.layer3, visual.layer4):
        x = layer(x)
    return attend_everywhere(visual.attnpool, x)


def attend_everywhere(pool: AttentionPool2d, maps: Tensor) -> Tensor:
    """The attention pool's outputs (b, 1 + h w, d) on ``maps`` (b, c, h, w) with the mean and every position as query.

    open_clip's own forward pass keeps only the first, that of the mean.
    """
    positions = maps.flatten(2).transpose(1, 2)
    x = torch.cat([positions.mean(dim=1, keepdim=True), positions], dim=1) + pool.positional_embedding
    parts = (project(x).unflatten(-1, (pool.num_heads, -1)) for project in (pool.q_proj, pool.k_proj, pool.v_proj))
    attended = scaled_dot_product_attention(*(part.transpose(1, 2) for part in parts))
    features: Tensor = pool.c_proj(attended.transpose(1, 2).flatten(2))
    return features
