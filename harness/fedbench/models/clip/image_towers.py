"""The image towers of dual encoders: vision transformers in one interface, and what a dual encoder lacks.

A tower holds no tensors of its own: it reads those of its module when it is called.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fedbench.models.clip.backbone import as_patches
from fedbench.models.clip.blocks import Block, plain_blocks
from fedbench.models.clip.text_towers import ClipTextEncoder, OpenClipText, text_encoder
from fedbench.models.prompts.causal_text import can_pack

CAPABILITIES = ("context", "text_layers", "image_layers", "patches")


class ImageTower(ABC):
    """A vision transformer: tokens with positions, layers, and a feature pooled from the last layer's tokens."""

    def __init__(self, module: nn.Module, part: Any, layers: object, width: int) -> None:
        """``part`` is the tower inside the dual encoder ``module``; ``width`` is that of a token, d_v."""
        self.module: Any = module
        self.part = part
        self.width = width
        self._layers = layers

    @cached_property
    def blocks(self) -> list[Block] | None:
        """The layers if they are plain blocks; else None, and only their library can run them."""
        return plain_blocks(self._layers)

    @property
    def depth(self) -> int:
        """The number of plain layers; 0 if only their library can run them."""
        return len(self.blocks or ())

    @abstractmethod
    def embed(self, images: Tensor) -> Tensor:
        """Tokens (b, T, d_v) of ``images`` (b, 3, S, S) with their positions, the class token first if there is one."""

    @abstractmethod
    def first_norm(self, tokens: Tensor) -> Tensor:
        """The norm in front of the first layer, applied to tokens (b, T, d_v)."""

    @abstractmethod
    def pool(self, states: Tensor) -> Tensor:
        """Features (b, d), not normalised, of states (b, T, d_v) behind the last layer."""


class ClassTokenTower(ImageTower):
    """A tower that pools at its first token, so that every token has a feature in the space shared with texts."""

    @abstractmethod
    def states(self, images: Tensor) -> Tensor:
        """The tokens (b, T, d_v) of ``images`` behind the last layer, as the library computes them."""

    @abstractmethod
    def project(self, states: Tensor) -> Tensor:
        """Project states (..., d_v) behind the last layer into the space shared with texts, (..., d)."""

    def pool(self, states: Tensor) -> Tensor:
        """Only the first token is read; the others may be missing."""
        return self.project(states[:, 0])


class OpenClipTower(ClassTokenTower):
    """open_clip's VisionTransformer that pools at its class token."""

    def embed(self, images: Tensor) -> Tensor:
        visual = self.part
        patches = visual.conv1(images).flatten(2).permute(0, 2, 1)
        start = visual.class_embedding.expand(patches.shape[0], 1, -1)
        tokens: Tensor = visual.patch_dropout(torch.cat([start, patches], dim=1) + visual.positional_embedding)
        return tokens

    def first_norm(self, tokens: Tensor) -> Tensor:
        normed: Tensor = self.part.ln_pre(tokens)
        return normed

    def states(self, images: Tensor) -> Tensor:
        states: Tensor = self.part.transformer(self.part._embeds(images))
        return states

    def project(self, states: Tensor) -> Tensor:
        """The last norm treats each token by itself, so it may also follow the pooling."""
        normed: Tensor = self.part.ln_post(states)
        return normed if self.part.proj is None else normed @ self.part.proj


class TransformersTower(ClassTokenTower):
    """CLIP's vision model of transformers, in its own dual encoder or joined to any text model."""

    def embed(self, images: Tensor) -> Tensor:
        tokens: Tensor = self.part.embeddings(images)
        return tokens

    def first_norm(self, tokens: Tensor) -> Tensor:
        normed: Tensor = self.part.pre_layrnorm(tokens)
        return normed

    def states(self, images: Tensor) -> Tensor:
        states: Tensor = self.part(pixel_values=images).last_hidden_state
        return states

    def project(self, states: Tensor) -> Tensor:
        features: Tensor = self.module.visual_projection(self.part.post_layernorm(states))
        return features


class SiglipTower(ImageTower):
    """The vision model of SigLIP and SigLIP 2 in transformers: a learned query gathers its feature from all tokens."""

    def embed(self, images: Tensor) -> Tensor:
        config = self.module.config
        if config.model_type == "siglip2":
            patches = as_patches(images, config.vision_config.patch_size)
            tokens: Tensor = self.part.embeddings(patches["pixel_values"], patches["spatial_shapes"])
        else:
            tokens = self.part.embeddings(images)
        return tokens

    def first_norm(self, tokens: Tensor) -> Tensor:
        return tokens

    def pool(self, states: Tensor) -> Tensor:
        features: Tensor = self.part.head(self.part.post_layernorm(states))
        return features


class TimmTower(ImageTower):
    """timm's VisionTransformer inside open_clip's adapter, with whatever pooling it has."""

    def embed(self, images: Tensor) -> Tensor:
        tokens: Tensor = self.part.patch_drop(self.part._pos_embed(self.part.patch_embed(images)))
        return tokens

    def first_norm(self, tokens: Tensor) -> Tensor:
        normed: Tensor = self.part.norm_pre(tokens)
        return normed

    def pool(self, states: Tensor) -> Tensor:
        features: Tensor = self.module.visual.head(self.part.forward_head(self.part.norm(states)))
        return features


def image_tower(module: nn.Module) -> ImageTower | None:
    """The image tower of a dual encoder, or None where it is no vision transformer known here."""
    from open_clip.transformer import VisionTransformer

    visual: Any = getattr(module, "visual", None)
    vision: Any = getattr(module, "vision_model", None)
    if isinstance(visual, VisionTransformer):
        is_plain = visual.attn_pool is None and visual.pool_type == "tok"
        width = visual.conv1.out_channels
        return OpenClipTower(module, visual, visual.transformer, width) if is_plain else None
    trunk: Any = getattr(visual, "trunk", None)
    if type(trunk).__name__ == "VisionTransformer":
        return TimmTower(module, trunk, trunk, trunk.embed_dim)
    if hasattr(vision, "pre_layrnorm"):
        return TransformersTower(module, vision, vision.encoder, vision.config.hidden_size)
    is_siglip = type(vision).__name__.startswith("Siglip") and hasattr(vision, "head")
    return SiglipTower(module, vision, vision.encoder, vision.config.hidden_size) if is_siglip else None


def has_patches(module: nn.Module) -> bool:
    """Whether a dual encoder's image tower reads its feature off a class token, or is CLIP's ResNet."""
    from open_clip.modified_resnet import ModifiedResNet

    is_resnet = isinstance(getattr(module, "visual", None), ModifiedResNet)
    return is_resnet or isinstance(image_tower(module), ClassTokenTower)


def lacking(module: nn.Module) -> dict[str, str]:
    """The capabilities that a dual encoder lacks, with the reason for each.

    ``context``: learned vectors among a text's tokens; ``text_layers``, ``image_layers``: tokens and additions inside
    the layers; ``patches``: features of an image's parts in the space of the texts. Every dual encoder has features of
    whole images and texts.
    """
    text, tower = text_encoder(module), image_tower(module)
    lacks = {"context": text.lacks} if text.lacks else {}
    if not can_pack(text):
        lacks["text_layers"] = f"its text tower is {_text_kind(text)}, not a causal transformer of plain blocks"
    visual = _tower_kind(getattr(module, "visual", None) or getattr(module, "vision_model", None))
    if tower is None or tower.blocks is None:
        lacks["image_layers"] = f"its image tower is {visual}, not a vision transformer of plain blocks"
    if not has_patches(module):
        lacks["patches"] = (
            f"its image tower is {visual}, neither a vision transformer with a class token nor CLIP's ResNet"
        )
    return lacks


def _text_kind(text: ClipTextEncoder) -> str:
    if not isinstance(text, OpenClipText):
        return "of another kind"
    return f"{'causal' if text.is_causal else 'bidirectional'}, pooling at {text.pool_type!r}"


def _tower_kind(tower: object) -> str:
    trunk = getattr(tower, "trunk", None)
    if trunk is not None:
        return f"timm's {type(trunk).__name__}"
    pools = getattr(tower, "pool_type", None)
    return type(tower).__name__ + (f" that pools at {pools!r}" if pools else "")
