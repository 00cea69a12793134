"""Both towers of a dual encoder as one trainable model."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import normalize

from fedbench.core.types import ForwardPass, Outputs, Tensors
from fedbench.models.clip.backbone import (
    ClipBackbone,
    class_vectors,
    cosine_scale,
    fill_templates,
    image_features,
    tower_tensors,
)
from fedbench.models.clip.text_encoders import text_encoder
from fedbench.models.per_thread import per_thread


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
