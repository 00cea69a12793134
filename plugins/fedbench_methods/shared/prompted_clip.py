"""Frozen CLIP with trained prompts: learnable context in front of class names, and image tokens coupled to it.

An instance is a model's forward pass. Its parts are methods, so that a loss may use several prompts on one image pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import linear, normalize

from fedbench.api import FedbenchError, Outputs, Tensors, torch_generator
from fedbench.models.clip.backbone import ClipBackbone
from fedbench.models.clip.image_towers import ImageTower
from fedbench.models.heads import linear_layer, scaled_logits
from fedbench.models.prompts.context import PromptTower, prompt_tower
from fedbench.models.prompts.image_tokens import encode_with_tokens


def coupling(text_width: int, image_width: int, seed: int) -> Tensors:
    """A linear map from context to image tokens, W (d_v, d_t) and b (d_v,): uniform in +-1/sqrt(d_t)."""
    return linear_layer("coupling", image_width, text_width, torch_generator(seed, "prompt coupling"))


@dataclass(frozen=True, eq=False)
class PromptedClip:
    """Scaled cosines between images and class texts, as functions of the trained tensors."""

    towers: Mapping[str, PromptTower]
    """The text towers by kind of text."""
    blocks: Mapping[str, tuple[str, ...]]
    """Names of the tensors that form the context of each kind of text, in order."""
    answers: str
    """The kind of text that classifies."""
    scale: float
    """s, the scale of the cosines."""
    visual: ImageTower | None = None
    """If set, inputs are images and ``coupled`` gives them tokens; else inputs are cached features."""
    coupled: str = "prompt.general"
    """The tensor (M, d_t) that `coupling` turns into image tokens."""

    def texts(self, kind: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """Unit text features (K, d) of one kind."""
        return self.towers[kind].encode(*(tensors[name] for name in self.blocks[kind]))

    def images(self, tensors: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """Unit image features (b, d) of images (b, 3, S, S), or of raw features (b, d) where there are no tokens."""
        if self.visual is None:
            return normalize(inputs, dim=-1)
        tokens = linear(tensors[self.coupled], tensors["coupling.weight"], tensors["coupling.bias"])
        return normalize(encode_with_tokens(self.visual, inputs, tokens), dim=-1)

    def __call__(self, tensors: Mapping[str, Tensor], inputs: Tensor, training: bool) -> Outputs:
        """Logits (b, K) and unit image features (b, d)."""
        features = self.images(tensors, inputs)
        return Outputs(scaled_logits(features, self.texts(self.answers, tensors), None, self.scale), features)


def prompted(forward: object, method: str) -> PromptedClip:
    """The forward pass of ``method``, whose loss calls its parts. FedbenchError where the stack has another by now."""
    if not isinstance(forward, PromptedClip):
        raise FedbenchError(
            f"the loss of {method} reads texts and images of its own forward pass, which another method of the stack "
            "has changed; run the two as separate rows."
        )
    return forward


def prompted_clip(
    backbone: ClipBackbone,
    classnames: Sequence[str],
    blocks: Mapping[str, tuple[str, ...]],
    contexts: Tensors,
    answers: str,
    visual: ImageTower | None = None,
) -> PromptedClip:
    """The forward pass around initial ``contexts`` (..., m, d_t) by name, with a tower for each kind of text.

    Kinds in ``blocks`` that read a tensor which ``contexts`` lacks are left out.
    """
    lengths = {
        kind: sum(contexts[name].shape[-2] for name in names)
        for kind, names in blocks.items()
        if all(name in contexts for name in names)
    }
    towers = {kind: prompt_tower(backbone, classnames, length) for kind, length in lengths.items()}
    return PromptedClip(towers, blocks, answers, backbone.logit_scale, visual)
