"""A model that compares image embeddings with text vectors of the classes, which may be trained as well."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import normalize

from fedbench.core.errors import FedbenchError
from fedbench.core.types import Model, Outputs, Tensors
from fedbench.models import load_backbone
from fedbench.models.clip.backbone import ClipBackbone, class_vectors, fill_templates
from fedbench.models.clip.text_towers import text_encoder
from fedbench.models.cnn.backbone import as_function, batch_norm_names, default_generator_from
from fedbench.models.names import is_dual_encoder
from fedbench.models.per_thread import per_thread
from fedbench.models.text.vectors import (
    DRAWN,
    chosen_text_encoder,
    is_glove,
    sentence_features,
    tokenised,
    transformers_encoder,
)

if TYPE_CHECKING:
    from fedbench.core.method.tasks import ModelSetup

_INSIDE = "encoder."

EPS = 1e-8
"""The smallest divisor of a length. An embedding can be all zero after a ReLU; its cosines are then 0."""


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


@dataclass(frozen=True, kw_only=True)
class ProjectorShape:
    """The layers between a body's features (b, d) and the embedding (b, V).

    ``linear`` is FC d->V, norm, ReLU; ``mlp`` is FC d->d, ReLU, norm, FC d->V, ReLU, norm. The last ReLU is there
    with ``final_relu`` only. ``l2`` divides each row by its length, ``bn`` is batch-norm.
    """

    kind: Literal["linear", "mlp"] = "linear"
    norm: Literal["l2", "bn"] = "l2"
    final_relu: bool = False


class UnitLength(nn.Module):
    """Divides each row by its length, or by EPS where that is larger."""

    def forward(self, rows: Tensor) -> Tensor:
        return unit(rows)


def unit(rows: Tensor) -> Tensor:
    """Scale rows (b, d) to length one; a row of zeros stays zero."""
    return normalize(rows, dim=-1, eps=EPS)


def build_projector(width: int, dim: int, shape: ProjectorShape) -> nn.Sequential:
    """The projector from ``width`` d to ``dim`` V, initialised from torch's default generator."""
    last_relu = [("relu2", nn.ReLU())] if shape.final_relu else []
    layers: list[tuple[str, nn.Module]]
    if shape.kind == "linear":
        layers = [("fc", nn.Linear(width, dim)), ("norm", _norm(dim, shape)), *last_relu]
    else:
        layers = [("fc1", nn.Linear(width, width)), ("relu1", nn.ReLU()), ("norm1", _norm(width, shape))]
        layers += [("fc2", nn.Linear(width, dim)), *last_relu, ("norm2", _norm(dim, shape))]
    return nn.Sequential(OrderedDict(layers))


def _norm(width: int, shape: ProjectorShape) -> nn.Module:
    return nn.BatchNorm1d(width) if shape.norm == "bn" else UnitLength()


def embedding_model(setup: ModelSetup, text: Tensor | TextTower, scale: float, shape: ProjectorShape) -> Model:
    """Logits ``scale * cos(I, T)`` from the embedding I = projector(body(image)) and class vectors T (C, V).

    ``features`` are the unit embeddings (b, V). A CNN's body is trained with the projector; of CLIP the projector
    alone is, on frozen unit features. There a linear one starts as the identity where T is the same CLIP's own text,
    so that round 0 is zero-shot CLIP; all others start from the run's seed. A ``Tensor`` T is fixed: it stands in
    ``constants["text"]`` and is never sent. The weights of a ``TextTower`` are trained and sent with the rest, and T
    is computed from them at every call.
    """
    backbone = setup.backbone
    body: nn.Module
    if isinstance(backbone, ClipBackbone):
        body, width, encoder, transform = UnitLength(), backbone.embed_dim, backbone.image_encoder(), None
    else:
        body, width = copy.deepcopy(backbone.module), backbone.feature_dim
        encoder, transform = None, backbone.transform
    dim = text.dim if isinstance(text, TextTower) else text.shape[1]
    with default_generator_from(setup.spec.seed, "projector"):
        projector = build_projector(width, dim, shape)
    if shape == ProjectorShape() and width == dim and chosen_text_encoder(setup) == setup.spec.backbone:
        only = projector.get_submodule("fc")
        assert isinstance(only, nn.Linear)
        nn.init.eye_(only.weight)
        nn.init.zeros_(only.bias)
    net = nn.Sequential(OrderedDict(body=body, projector=projector))
    weights, buffers, embed = as_function(net)
    if isinstance(text, TextTower):
        weights |= text.weights
    else:
        text = unit(text.detach()).to(setup.spec.device)

    def forward(tensors: Tensors, inputs: Tensor, training: bool) -> Outputs:
        embedding = unit(embed(tensors, inputs, training))
        classes = text.vectors(tensors) if isinstance(text, TextTower) else text
        return Outputs(scale * embedding @ classes.T, embedding)

    return Model(
        weights=weights,
        buffers=buffers,
        forward=forward,
        encoder=encoder,
        transform=transform,
        constants={} if isinstance(text, TextTower) else {"text": text},
        batch_norm=batch_norm_names(net),
    )
