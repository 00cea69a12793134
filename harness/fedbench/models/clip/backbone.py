"""A pretrained dual encoder as a backbone: frozen encoders of images and texts, or both towers to be trained."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import normalize

from fedbench.core.errors import FedbenchError
from fedbench.core.types import ForwardPass, Outputs, Tensors
from fedbench.models.clip.text_towers import ClipTextEncoder, text_encoder
from fedbench.models.inputs import PixelTransform
from fedbench.models.per_thread import per_thread

TEXT_BATCH = 256
"""The number of prompts encoded at once: a thousand classes by several templates would not fit."""
TEXTS_KEPT = 4
"""The number of prompt lists whose features a backbone keeps."""


def fill_templates(classnames: Sequence[str], templates: Sequence[str]) -> list[str]:
    """The prompts of all classes, template after template: len(templates) * len(classnames) texts."""
    for template in templates:
        if template.count("{}") != 1:
            raise FedbenchError(f"prompt template {template!r} must contain {{}} once, for the class name.")
    if not templates or not classnames:
        raise FedbenchError("class prompts need at least one class name and one template.")
    return [template.replace("{}", name) for template in templates for name in classnames]


def class_vectors(features: Tensor, num_classes: int) -> Tensor:
    """The mean of unit features: raw text features of ``fill_templates`` (T*C, d) to one unit vector a class (C, d)."""
    by_template = normalize(features, dim=-1).reshape(-1, num_classes, features.shape[-1])
    return normalize(by_template.mean(dim=0), dim=-1)


def digest_of_weights(module: nn.Module) -> str:
    """sha256 over all weights as they are now, by name, shape and value."""
    return digest_of(module.state_dict())


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over tensors by name, shape and value."""
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().flatten().numpy().data)
    return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class ClipBackbone:
    """A pretrained dual encoder of open_clip or transformers: in eval mode, float32, without gradients.

    ``transform`` takes uint8 (b, 3, h, w) to the float (b, 3, S, S) that the image tower was trained on. Encoders
    work on the device of ``module``; ``module.to(device)`` moves them.
    """

    name: str
    module: nn.Module
    tokenizer: Callable[[list[str]], Tensor]
    transform: PixelTransform
    embed_dim: int
    """d, the width that images and texts share."""
    is_pretrained: bool = True

    @property
    def feature_dim(self) -> int:
        return self.embed_dim

    @property
    def image_size(self) -> int:
        """S, the side of the square images that the image tower takes."""
        assert self.transform.size is not None
        return self.transform.size

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @cached_property
    def logit_scale(self) -> float:
        """The learned scale of the cosines, read back from the device once."""
        return float(cosine_scale(self.module).detach())

    @cached_property
    def context_length(self) -> int:
        """The number of tokens of a text, including start, end and padding."""
        return int(self.tokenizer(["a"]).shape[1])

    @property
    def text(self) -> ClipTextEncoder:
        return text_encoder(self.module)

    @cached_property
    def weights_hash(self) -> str:
        """sha256 over all weights, by name, shape and value; computed on first use."""
        return digest_of_weights(self.module)

    @torch.no_grad()
    def encode_images(self, pixels: Tensor) -> Tensor:
        """Pooled features (b, d) float32, not normalised, of images (b, 3, h, w) uint8."""
        return image_features(self.module, self.transform(pixels.to(self.device)))

    @torch.no_grad()
    def encode_text(self, texts: list[str]) -> Tensor:
        """Text features, not normalised, (len(texts), d).

        Features of the last ``TEXTS_KEPT`` lists are kept, since runs that share a backbone ask for the same lists.
        """
        words = (self.device, tuple(texts))
        if words not in self._encoded:
            tokens = self.tokenizer(texts).to(self.device)
            parts = [self.text.encode(part) for part in torch.split(tokens, TEXT_BATCH)]
            self._encoded[words] = torch.cat(parts)
            for oldest in list(self._encoded)[:-TEXTS_KEPT]:
                del self._encoded[oldest]
        return self._encoded[words].clone()

    @cached_property
    def _encoded(self) -> dict[tuple[torch.device, tuple[str, ...]], Tensor]:
        return {}

    def text_features(self, classnames: Sequence[str], templates: Sequence[str]) -> Tensor:
        """One unit vector a class, (K, d): the mean over templates of unit features, renormalised."""
        return class_vectors(self.encode_text(fill_templates(classnames, templates)), len(classnames))

    def image_encoder(self) -> ClipImageEncoder:
        """The frozen image tower, for the feature cache."""
        return ClipImageEncoder(self)


@dataclass(frozen=True, eq=False)
class ClipImageEncoder:
    """A ``FrozenEncoder``: pooled image features, not normalised."""

    backbone: ClipBackbone

    @cached_property
    def key(self) -> str:
        """Digest of weights, transform and activation; the backbone's name has no influence."""
        kind = f"pooled {self.backbone.weights_hash} {self.backbone.transform} {activation_of(self.backbone.module)}"
        return hashlib.sha256(kind.encode()).hexdigest()

    def __call__(self, pixels: Tensor) -> Tensor:
        return self.backbone.encode_images(pixels)


def activation_of(module: nn.Module) -> str:
    """The part of the computation that weights don't determine: the activation's class of a CLIP (GELU or QuickGELU).

    For other models it is a digest of all modules as they print themselves.
    """
    blocks: Any = getattr(getattr(module, "transformer", None), "resblocks", None)
    if blocks is not None:
        return type(blocks[0].mlp.gelu).__name__
    return hashlib.sha256(repr(module).encode()).hexdigest()


def image_features(module: nn.Module, images: Tensor) -> Tensor:
    """Pooled features (b, d), not normalised, of ``images`` (b, 3, S, S), by either library's dual encoder."""
    towers: Any = module
    if not hasattr(towers, "get_image_features"):
        features: Tensor = towers.encode_image(images, normalize=False)
        return features
    if towers.config.model_type == "siglip2":
        output = towers.get_image_features(**as_patches(images, towers.config.vision_config.patch_size))
    else:
        output = towers.get_image_features(pixel_values=images)
    pooled: Tensor = output if isinstance(output, Tensor) else output.pooler_output
    return pooled


def as_patches(images: Tensor, side: int) -> dict[str, Tensor]:
    """SigLIP 2's input for images of one size (b, 3, h, w): rows of patches of ``side`` pixels."""
    count, _, height, width = images.shape
    rows, columns = height // side, width // side
    patches = images.reshape(count, 3, rows, side, columns, side).permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
    shapes = torch.tensor([[rows, columns]] * count, device=images.device)
    mask = torch.ones(patches.shape[:2], dtype=torch.long, device=images.device)
    return {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": shapes}


def cosine_scale(module: nn.Module) -> Tensor:
    """The scale of cosines, a scalar: the exponential of the model's parameter, or ALIGN's inverse temperature."""
    towers: Any = module
    if hasattr(towers, "logit_scale"):
        return towers.logit_scale.exp().reshape(())  # type: ignore[no-any-return]
    return 1 / towers.temperature.reshape(())  # type: ignore[no-any-return]


def tower_tensors(module: nn.Module) -> tuple[Tensors, Tensors]:
    """Copies of weights and of buffers by name, as far as cosines between images and texts depend on them.

    A text decoder and the bias of a sigmoid loss are left out.
    """
    parameters = dict(module.named_parameters())
    compared = [name for name in parameters if not name.startswith(("text_decoder.", "logit_bias"))]
    values, own = module.state_dict(), dict(module.named_buffers())
    kept = [name for name in values if name in own and not name.startswith("text_decoder.")]
    return {n: parameters[n].detach().clone() for n in compared}, {n: values[n].clone() for n in kept}


class _PromptedClip(nn.Module):
    def __init__(self, clip: nn.Module, tokens: Tensor, num_classes: int) -> None:
        super().__init__()
        self.clip = clip
        self.tokens = tokens
        self.num_classes = num_classes

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        self.tokens = self.tokens.to(pixels.device)
        text = class_vectors(text_encoder(self.clip).encode_truncated(self.tokens), self.num_classes)
        features = normalize(image_features(self.clip, pixels), dim=-1)
        return cosine_scale(self.clip) * features @ text.T, features


def full_clip_model(
    backbone: ClipBackbone, classnames: Sequence[str], templates: Sequence[str]
) -> tuple[Tensors, Tensors, ForwardPass]:
    """All weights of both towers and the scale, the buffers, and the forward pass: scaled cosines to class prompts.

    ``forward`` takes the float batch (b, 3, S, S); ``features`` (b, d) are unit. It runs the text tower at every
    call, since that is trained too. Buffers are empty unless the image tower has batch-norm (RN50).
    """
    tokens = backbone.text.truncated(backbone.tokenizer(fill_templates(classnames, templates)))
    net = _PromptedClip(backbone.module, tokens, len(classnames))
    weights, buffers = tower_tensors(backbone.module)
    names, own_net = (*weights, *buffers), per_thread(net)

    def forward(tensors: Tensors, inputs: Tensor, training: bool) -> Outputs:
        inside = {f"clip.{name}": tensors[name] for name in names}
        own = own_net()
        # The module is shared with the frozen encoders, which rely on eval mode.
        own.train(training)
        try:
            logits, features = functional_call(own, inside, (inputs,))
        finally:
            own.eval()
        return Outputs(logits, features)

    return weights, buffers, forward


class Towers(nn.Module):
    """CLIP as a module of images: gives their raw features (b, d), those of the prompts ``tokens`` (m, d), and the
    scale s."""

    def __init__(self, clip: nn.Module, tokens: Tensor) -> None:
        super().__init__()
        self.clip = clip
        self.tokens = tokens

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        prompts = text_encoder(self.clip).encode_truncated(self.tokens.to(pixels.device))
        return image_features(self.clip, pixels), prompts, cosine_scale(self.clip)
