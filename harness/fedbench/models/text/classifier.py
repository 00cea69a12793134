"""A model that compares the projected features of an image body with text vectors of the classes."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import Tensor, nn
from torch.nn.functional import normalize

from fedbench.core.types import Model, Outputs, Tensors
from fedbench.models.clip.backbone import ClipBackbone
from fedbench.models.cnn.backbone import as_function, batch_norm_names, default_generator_from
from fedbench.models.text.tower import TextTower
from fedbench.models.text.vectors import chosen_text_encoder

if TYPE_CHECKING:
    from fedbench.core.method.tasks import ModelSetup

EPS = 1e-8
"""The smallest divisor of a length. An embedding can be all zero after a ReLU; its cosines are then 0."""


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
