"""Vision transformers of dual encoders behind one interface, whichever library built them: their tokens can be reached.

A tower holds no tensors of its own: it reads those of its module when it is called.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fedbench.models.clip.backbone import as_patches
from fedbench.models.clip.plain_blocks import Block, plain_blocks


class ImageTower(ABC):
    """A vision transformer: tokens with positions, layers, and a feature pooled from the last layer's tokens."""

    def __init__(self, module: nn.Module) -> None:
        """The image tower of the dual encoder ``module``."""
        self.module: Any = module

    @cached_property
    def blocks(self) -> list[Block] | None:
        """The layers, where they are plain; else None, and only their library can run them."""
        return plain_blocks(self._layers)

    @property
    def depth(self) -> int:
        """How many layers can be reached."""
        return len(self.blocks or ())

    @property
    @abstractmethod
    def _layers(self) -> object:
        """What holds the layers."""

    @property
    @abstractmethod
    def width(self) -> int:
        """d_v, of a token."""

    @abstractmethod
    def embed(self, images: Tensor) -> Tensor:
        """Tokens (b, T, d_v) of ``images`` (b, 3, S, S) with their positions, the class token first if there is one."""

    @abstractmethod
    def first_norm(self, tokens: Tensor) -> Tensor:
        """What tokens (b, T, d_v) pass before the first layer."""

    @abstractmethod
    def pool(self, states: Tensor) -> Tensor:
        """Features (b, d), not normalised, of states (b, T, d_v) behind the last layer."""


class ClassTokenTower(ImageTower):
    """A tower whose feature is that of the first token, so that every token has one in the space shared with texts."""

    @abstractmethod
    def states(self, images: Tensor) -> Tensor:
        """The tokens (b, T, d_v) of ``images`` behind the last layer, as the library computes them."""

    @abstractmethod
    def project(self, states: Tensor) -> Tensor:
        """States (..., d_v) behind the last layer in the space shared with texts, (..., d)."""

    def pool(self, states: Tensor) -> Tensor:
        """As in the base; of the first token alone, others may be missing."""
        return self.project(states[:, 0])


class OpenClipTower(ClassTokenTower):
    """open_clip's VisionTransformer that pools at its class token."""

    @property
    def _visual(self) -> Any:
        return self.module.visual

    @property
    def _layers(self) -> object:
        return self._visual.transformer

    @property
    def width(self) -> int:
        """d_v."""
        return int(self._visual.conv1.out_channels)

    def embed(self, images: Tensor) -> Tensor:
        """As in the base."""
        visual = self._visual
        patches = visual.conv1(images).flatten(2).permute(0, 2, 1)
        start = visual.class_embedding.expand(patches.shape[0], 1, -1)
        tokens: Tensor = visual.patch_dropout(torch.cat([start, patches], dim=1) + visual.positional_embedding)
        return tokens

    def first_norm(self, tokens: Tensor) -> Tensor:
        """As in the base."""
        normed: Tensor = self._visual.ln_pre(tokens)
        return normed

    def states(self, images: Tensor) -> Tensor:
        """As in the base."""
        states: Tensor = self._visual.transformer(self._visual._embeds(images))
        return states

    def project(self, states: Tensor) -> Tensor:
        """As in the base; the last norm is each token's own, so it may also stand behind the pooling."""
        normed: Tensor = self._visual.ln_post(states)
        return normed if self._visual.proj is None else normed @ self._visual.proj


class TransformersTower(ClassTokenTower):
    """CLIP's vision model of transformers, in its own dual encoder or joined to any text model."""

    @property
    def _vision(self) -> Any:
        return self.module.vision_model

    @property
    def _layers(self) -> object:
        return self._vision.encoder

    @property
    def width(self) -> int:
        """d_v."""
        return int(self._vision.config.hidden_size)

    def embed(self, images: Tensor) -> Tensor:
        """As in the base."""
        tokens: Tensor = self._vision.embeddings(images)
        return tokens

    def first_norm(self, tokens: Tensor) -> Tensor:
        """As in the base."""
        normed: Tensor = self._vision.pre_layrnorm(tokens)
        return normed

    def states(self, images: Tensor) -> Tensor:
        """As in the base."""
        states: Tensor = self._vision(pixel_values=images).last_hidden_state
        return states

    def project(self, states: Tensor) -> Tensor:
        """As in the base."""
        features: Tensor = self.module.visual_projection(self._vision.post_layernorm(states))
        return features


class SiglipTower(ImageTower):
    """The vision model of SigLIP and SigLIP 2 in transformers: a learned query gathers its feature from all tokens."""

    @property
    def _vision(self) -> Any:
        return self.module.vision_model

    @property
    def _layers(self) -> object:
        return self._vision.encoder

    @property
    def width(self) -> int:
        """d_v."""
        return int(self._vision.config.hidden_size)

    def embed(self, images: Tensor) -> Tensor:
        """As in the base."""
        config = self.module.config
        if config.model_type == "siglip2":
            patches = as_patches(images, config.vision_config.patch_size)
            tokens: Tensor = self._vision.embeddings(patches["pixel_values"], patches["spatial_shapes"])
        else:
            tokens = self._vision.embeddings(images)
        return tokens

    def first_norm(self, tokens: Tensor) -> Tensor:
        """There is none."""
        return tokens

    def pool(self, states: Tensor) -> Tensor:
        """As in the base."""
        features: Tensor = self._vision.head(self._vision.post_layernorm(states))
        return features


class TimmTower(ImageTower):
    """timm's VisionTransformer inside open_clip's adapter, with whatever pooling it has."""

    @property
    def _trunk(self) -> Any:
        return self.module.visual.trunk

    @property
    def _layers(self) -> object:
        return self._trunk

    @property
    def width(self) -> int:
        """d_v."""
        return int(self._trunk.embed_dim)

    def embed(self, images: Tensor) -> Tensor:
        """As in the base."""
        tokens: Tensor = self._trunk.patch_drop(self._trunk._pos_embed(self._trunk.patch_embed(images)))
        return tokens

    def first_norm(self, tokens: Tensor) -> Tensor:
        """As in the base."""
        normed: Tensor = self._trunk.norm_pre(tokens)
        return normed

    def pool(self, states: Tensor) -> Tensor:
        """As in the base."""
        features: Tensor = self.module.visual.head(self._trunk.forward_head(self._trunk.norm(states)))
        return features


def image_tower(module: nn.Module) -> ImageTower | None:
    """The image tower of a dual encoder, or None where it is no vision transformer known here."""
    from open_clip.transformer import VisionTransformer

    visual, vision = getattr(module, "visual", None), getattr(module, "vision_model", None)
    if isinstance(visual, VisionTransformer):
        return OpenClipTower(module) if visual.attn_pool is None and visual.pool_type == "tok" else None
    if type(getattr(visual, "trunk", None)).__name__ == "VisionTransformer":
        return TimmTower(module)
    if hasattr(vision, "pre_layrnorm"):
        return TransformersTower(module)
    return SiglipTower(module) if type(vision).__name__.startswith("Siglip") and hasattr(vision, "head") else None
