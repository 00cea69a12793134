"""Text encoders as trainable functions: the encoder's weights in, one unit vector a class out.

The frozen side of the same encoders is `fedbench.models.text.vectors`. Dropout is off: a local step is a pure function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedbench.core.errors import FedbenchError
from fedbench.core.types import Tensors
from fedbench.models import load_backbone
from fedbench.models.clip.backbone import ClipBackbone, class_vectors, fill_templates
from fedbench.models.clip.text_encoders import text_encoder
from fedbench.models.names import is_dual_encoder
from fedbench.models.per_thread import per_thread
from fedbench.models.text.glove import is_glove
from fedbench.models.text.vectors import DRAWN, chosen_text_encoder, sentence_features, tokenised, transformers_encoder

if TYPE_CHECKING:
    from fedbench.core.method.tasks import ModelSetup

_INSIDE = "encoder."


@dataclass(frozen=True, eq=False)
class TextTower:
    """Class vectors that depend on weights to be trained."""

    weights: Tensors
    """The pretrained values, named ``text.*``, of the encoder's parameters that its text features depend on."""
    vectors: Callable[[Mapping[str, Tensor]], Tensor]
    """Unit vectors (K, V) from a mapping that holds such weights; all prompts are encoded at every call."""
    dim: int
    """The width V of a vector."""


def text_tower(setup: ModelSetup, templates: Sequence[str]) -> TextTower:
    """The run's text encoder with its classes' prompts; FedbenchError for drawn vectors and vectors of words.

    At the pretrained weights ``vectors`` gives the same as ``fedbench.models.text.vectors.class_text``.
    """
    name = chosen_text_encoder(setup)
    if name in DRAWN:
        raise FedbenchError(
            f"text encoder {name!r} is a draw without weights, so there is nothing to train; write "
            "backbone.text=clip:embedded or another encoder, or keep the text fixed."
        )
    if is_glove(name):
        raise FedbenchError(
            f"text encoder {name!r} is a table of words, not a network, so there is nothing to train; write "
            "backbone.text=clip:embedded or another encoder, or keep the text fixed."
        )
    texts = fill_templates(setup.classnames, templates)
    net = _clip_texts(setup, name, texts) if is_dual_encoder(name) else _transformers_texts(setup, name, texts)
    start = {name: value.detach().clone().requires_grad_() for name, value in net.named_parameters()}
    # A model may hold more than its text tower (an image tower, a pooler nobody reads): autograd knows what counts.
    features = functional_call(net, start, ())
    gradients = torch.autograd.grad(features.sum(), list(start.values()), allow_unused=True)
    used = {name: start[name] for name, gradient in zip(start, gradients, strict=True) if gradient is not None}
    outside = {inside: "text." + inside.removeprefix(_INSIDE) for inside in used}

    own_net = per_thread(net)

    def vectors(tensors: Mapping[str, Tensor]) -> Tensor:
        own = {inside: tensors[name] for inside, name in outside.items()}
        return class_vectors(functional_call(own_net(), own, ()), len(setup.classnames))

    return TextTower({outside[name]: value.detach() for name, value in used.items()}, vectors, features.shape[1])


class _ClipTexts(nn.Module):
    def __init__(self, clip: nn.Module, tokens: Tensor) -> None:
        super().__init__()
        self.encoder = clip
        self.tokens = tokens

    def forward(self) -> Tensor:
        return text_encoder(self.encoder).encode_truncated(self.tokens)


class _TransformersTexts(nn.Module):
    def __init__(self, model: Any, tokens: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.encoder = model
        self.tokens = tokens

    def forward(self) -> Tensor:
        return sentence_features(self.encoder, self.tokens)


def _clip_texts(setup: ModelSetup, name: str, texts: list[str]) -> nn.Module:
    if isinstance(setup.backbone, ClipBackbone) and name == setup.spec.backbone:
        clip = setup.backbone
    else:
        loaded = load_backbone(name, data_dir=setup.data_dir, seed=setup.spec.seed)
        assert isinstance(loaded, ClipBackbone)
        clip = loaded
        clip.module.to(setup.spec.device)
    return _ClipTexts(clip.module, clip.text.truncated(clip.tokenizer(texts)).to(clip.device))


def _transformers_texts(setup: ModelSetup, name: str, texts: list[str]) -> nn.Module:
    tokenizer, model = transformers_encoder(name)
    tokens = tokenised(tokenizer, model, texts)
    device = setup.spec.device
    return _TransformersTexts(model.to(device), {key: value.to(device) for key, value in tokens.items()})
