"""CLIP as a backbone: frozen encoders for images and text, or both towers as one trainable model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import normalize

from fedbench.core.errors import FedbenchError
from fedbench.core.types import ForwardPass, Outputs, Tensors
from fedbench.models.per_thread import per_thread
from fedbench.models.transform import PixelTransform

if TYPE_CHECKING:
    from open_clip.model import CLIP

TEXT_BATCH = 256
"""Prompts encoded at once: a thousand classes by several templates would not fit."""
TEXTS_KEPT = 4
"""Lists of prompts whose features a backbone keeps."""


def fill_templates(classnames: Sequence[str], templates: Sequence[str]) -> list[str]:
    """The prompts of all classes, template after template: len(templates) * len(classnames) texts."""
    for template in templates:
        if template.count("{}") != 1:
            raise FedbenchError(f"prompt template {template!r} must contain {{}} once, for the class name.")
    if not templates or not classnames:
        raise FedbenchError("class prompts need at least one class name and one template.")
    return [template.replace("{}", name) for template in templates for name in classnames]


def class_vectors(features: Tensor, num_classes: int) -> Tensor:
    """Raw text features of ``fill_templates`` (T*C, d) to one unit vector a class (C, d): the mean of unit features."""
    by_template = normalize(features, dim=-1).reshape(-1, num_classes, features.shape[-1])
    return normalize(by_template.mean(dim=0), dim=-1)


def digest_of_weights(module: nn.Module) -> str:
    """sha256 over all weights as they are now, by name, shape and value."""
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().flatten().numpy().data)
    return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class ClipBackbone:
    """A pretrained open_clip model: in eval mode, float32, without gradients.

    ``transform`` takes uint8 (b, 3, h, w) to the float (b, 3, S, S) that the image tower was trained on. Encoders
    work on the device of ``module``; ``module.to(device)`` moves them.
    """

    name: str
    module: CLIP
    tokenizer: Callable[[list[str]], Tensor]
    transform: PixelTransform
    embed_dim: int
    """d, the width that images and texts share."""
    is_pretrained: bool = True

    @property
    def feature_dim(self) -> int:
        """The width of the space that images and texts share."""
        return self.embed_dim

    @property
    def image_size(self) -> int:
        """S, the side of the square images that the image tower takes."""
        assert self.transform.size is not None
        return self.transform.size

    @property
    def mean(self) -> tuple[float, float, float]:
        """Mean by channel, of pixels in [0, 1]."""
        return self.transform.mean

    @property
    def std(self) -> tuple[float, float, float]:
        """Standard deviation by channel, of pixels in [0, 1]."""
        return self.transform.std

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        scale: Tensor = self.module.logit_scale
        return scale.device

    @cached_property
    def logit_scale(self) -> float:
        """The learned scale of the cosines (the exponential of the parameter), read back from the device once."""
        return float(self.module.logit_scale.detach().exp())

    @cached_property
    def weights_hash(self) -> str:
        """sha256 over all weights, by name, shape and value; computed on first use."""
        return digest_of_weights(self.module)

    @torch.no_grad()
    def encode_images(self, pixels: Tensor) -> Tensor:
        """Pooled features, not normalised: uint8 (b, 3, h, w) to float32 (b, d)."""
        features: Tensor = self.module.encode_image(self.transform(pixels.to(self.device)))
        return features

    @torch.no_grad()
    def encode_text(self, texts: list[str]) -> Tensor:
        """Text features, not normalised, (len(texts), d).

        Those of the last ``TEXTS_KEPT`` lists are kept, since the runs that share a backbone ask for the same again.
        """
        words = (self.device, tuple(texts))
        if words not in self._encoded:
            tokens = self.tokenizer(texts).to(self.device)
            parts = [self.module.encode_text(part) for part in torch.split(tokens, TEXT_BATCH)]
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

    @property
    def name(self) -> str:
        """The backbone's, for people; two with one name may differ."""
        return self.backbone.name

    @cached_property
    def key(self) -> str:
        """Digest of weights, transform and activation; what stands in ``name`` doesn't matter."""
        kind = f"pooled {self.backbone.weights_hash} {self.backbone.transform} {activation_of(self.backbone.module)}"
        return hashlib.sha256(kind.encode()).hexdigest()

    def __call__(self, pixels: Tensor) -> Tensor:
        """uint8 (b, 3, h, w) to float32 (b, d)."""
        return self.backbone.encode_images(pixels)


def activation_of(module: CLIP) -> str:
    """The class of the text tower's activation: GELU or QuickGELU. Not part of the weights, but of what they mean."""
    return type(module.transformer.resblocks[0].mlp.gelu).__name__


def truncated(tokens: Tensor, clip: CLIP) -> Tensor:
    """The token table (n, L) cut after the longest text's end token, where that changes no text feature.

    Under a causal mask nothing behind the end token reaches it; other text towers keep all L positions.
    """
    if clip.attn_mask is None or clip.text_pool_type not in ("argmax", "eos"):
        return tokens
    return tokens[:, : int(text_ends(tokens, clip).max()) + 1]


def text_ends(tokens: Tensor, clip: CLIP) -> Tensor:
    """The position of each text's end token, (n,) int64, for towers that pool there (``argmax`` and ``eos``)."""
    ends = tokens if clip.text_pool_type == "argmax" else (tokens == clip.text_eos_id).int()
    return ends.argmax(dim=-1)


def encode_tokens(clip: CLIP, tokens: Tensor) -> Tensor:
    """``clip.encode_text`` for a table (n, l) that may be shorter than the context: (n, d), not normalised."""
    return encode_embedded(clip, clip.token_embedding(tokens), tokens)


def encode_embedded(clip: CLIP, embedded: Tensor, tokens: Tensor) -> Tensor:
    """Text features (n, d), not normalised, of embedded tokens (n, l, d_t), which may differ from those in the table.

    Positions are added here, once. The table ``tokens`` (n, l) only says where a text ends.
    """
    from open_clip.transformer import text_global_pool

    length = tokens.shape[1]
    mask = None if clip.attn_mask is None else clip.attn_mask[:length, :length].to(tokens.device)
    x = embedded + clip.positional_embedding[:length]
    x = clip.ln_final(clip.transformer(x, attn_mask=mask))
    return project_text(clip, text_global_pool(x, tokens, clip.text_pool_type, eos_token_id=clip.text_eos_id))


def project_text(clip: CLIP, pooled: Tensor) -> Tensor:
    """Pooled states of the text tower (..., d_t), behind its last norm, in the space shared with images (..., d)."""
    projection: nn.Linear | Tensor | None = clip.text_projection
    if projection is None:
        return pooled
    return projection(pooled) if isinstance(projection, nn.Linear) else pooled @ projection


class _PromptedClip(nn.Module):
    def __init__(self, clip: CLIP, tokens: Tensor, num_classes: int) -> None:
        super().__init__()
        self.clip = clip
        self.tokens = tokens
        self.num_classes = num_classes

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        self.tokens = self.tokens.to(pixels.device)
        text = class_vectors(encode_tokens(self.clip, self.tokens), self.num_classes)
        features = self.clip.encode_image(pixels, normalize=True)
        return self.clip.logit_scale.exp() * features @ text.T, features


def full_clip_model(
    backbone: ClipBackbone, classnames: Sequence[str], templates: Sequence[str]
) -> tuple[Tensors, Tensors, ForwardPass]:
    """All weights of both towers and the scale, the buffers, and the forward pass: scaled cosines to class prompts.

    ``forward`` takes the float batch (b, 3, S, S); ``features`` (b, d) are unit. It runs the text tower at every
    call, since that is trained too. Buffers are empty unless the image tower has batch-norm (RN50).
    """
    clip = backbone.module
    tokens = truncated(backbone.tokenizer(fill_templates(classnames, templates)), clip)
    net = _PromptedClip(clip, tokens, len(classnames))
    weights = {name: value.detach().clone() for name, value in clip.named_parameters()}
    buffers = {name: value.clone() for name, value in clip.state_dict().items() if name not in weights}
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
    """CLIP as a module of images alone: raw features of images (b, d) and of all prompts ``tokens`` (m, d), and s."""

    def __init__(self, clip: CLIP, tokens: Tensor) -> None:
        super().__init__()
        self.clip = clip
        self.tokens = tokens

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of ``pixels`` (b, 3, height, width)."""
        prompts = encode_tokens(self.clip, self.tokens.to(pixels.device))
        return self.clip.encode_image(pixels), prompts, self.clip.logit_scale.exp()
