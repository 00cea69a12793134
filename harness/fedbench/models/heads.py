"""The two models a method gets by default: a linear head on frozen CLIP features, and the whole network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedbench.core.errors import FedbenchError
from fedbench.core.types import ForwardPass, LinearHead, Model, Outputs, Tensors
from fedbench.models import load_backbone
from fedbench.models.clip.backbone import ClipBackbone, full_clip_model
from fedbench.models.cnn.backbone import batch_norm_names, cnn_model
from fedbench.models.cnn.pretrained import PretrainedNetwork

if TYPE_CHECKING:
    from fedbench.core.method.tasks import ModelSetup


def clip_of(setup: ModelSetup) -> ClipBackbone:
    """The run's CLIP backbone. FedbenchError for another kind; methods avoid that by declaring ``requires``."""
    if not isinstance(setup.backbone, ClipBackbone):
        raise FedbenchError(
            f"this model needs a CLIP backbone, not {setup.spec.backbone!r}; use --set backbone=clip:embedded."
        )
    return setup.backbone


def frozen_of(setup: ModelSetup) -> ClipBackbone | PretrainedNetwork:
    """The run's backbone with frozen image features: CLIP, or a pretrained network.

    FedbenchError for a network that starts at random; methods avoid that by declaring ``requires``.
    """
    if not isinstance(setup.backbone, ClipBackbone | PretrainedNetwork):
        raise FedbenchError(
            f"this model needs a pretrained backbone, not {setup.spec.backbone!r}; use --set backbone=clip:embedded."
        )
    return setup.backbone


def teacher_of(setup: ModelSetup) -> ClipBackbone:
    """The teacher, a CLIP: as set by ``teacher``, else the backbone itself if it is CLIP, else the embedded one."""
    if setup.spec.teacher == "auto" and isinstance(setup.backbone, ClipBackbone):
        return setup.backbone
    name = "clip:embedded" if setup.spec.teacher == "auto" else setup.spec.teacher
    loaded = load_backbone(name, data_dir=setup.data_dir, seed=setup.spec.seed)
    if not isinstance(loaded, ClipBackbone):
        raise FedbenchError(f"teacher {name!r} is not CLIP; write for instance backbone.teacher=clip:embedded.")
    loaded.module.to(setup.spec.device)
    return loaded


def scaled_logits(features: Tensor, weight: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """s (z W^T + b), (batch, C), with ``features`` z (batch, d), ``weight`` W (C, d), ``bias`` b (C,)."""
    logits = torch.nn.functional.linear(features, weight, bias)
    return logits if scale == 1 else scale * logits


@dataclass(frozen=True, eq=False)
class TextOutputs(Outputs):
    """Outputs of a model that classifies by the texts of its classes; ``features`` are unit image features."""

    texts: Tensor
    """Unit text features (K, d)."""


def text_classifier(texts: Callable[[Tensors], Tensor], scale: float) -> ForwardPass:
    """A forward pass from raw image features (b, d) to ``scale`` times their cosines to the classes' texts.

    ``texts`` gives unit text features (K, d) from the trained tensors. The outputs are `TextOutputs`.
    """

    def forward(tensors: Tensors, inputs: Tensor, training: bool) -> Outputs:
        features, vectors = torch.nn.functional.normalize(inputs, dim=-1), texts(tensors)
        return TextOutputs(scaled_logits(features, vectors, None, scale), features, vectors)

    return forward


def linear_layer(name: str, rows: int, columns: int, generator: torch.Generator) -> dict[str, Tensor]:
    """``name.weight`` (rows, columns) and ``name.bias`` (rows,), uniform in +-1/sqrt(columns): torch's own default."""
    bound = columns**-0.5
    weight = (2 * torch.rand(rows, columns, generator=generator) - 1) * bound
    return {f"{name}.weight": weight, f"{name}.bias": (2 * torch.rand(rows, generator=generator) - 1) * bound}


def default_model(setup: ModelSetup) -> Model:
    """The model of methods that don't answer ``build_model``: the whole network, or a linear head on frozen
    features."""
    return full_model(setup) if setup.tunes_everything else linear_head(setup)


def linear_head(setup: ModelSetup) -> Model:
    """A linear head s (W z + b) on unit image features z, W initialised with the classes' unit text features, b = 0.

    Round 0 is thus zero-shot CLIP. s is the backbone's learned scale unless ``head_scale`` is set; it is not trained.
    For a pretrained network without text, z are its features as they are, W is drawn and s is 1. (The form of FST-CBDG,
    arXiv 2404.11046, section 3.2, with CLIP's own scale.)
    """
    if isinstance(setup.backbone, PretrainedNetwork):
        drawn = linear_layer("head", len(setup.classnames), setup.backbone.feature_dim, setup.generator("head"))
        scale = setup.spec.head_scale or 1.0
        return head_on_features(setup.backbone, drawn["head.weight"], scale, unit_features=False)
    clip = clip_of(setup)
    text = clip.text_features(setup.classnames, setup.spec.templates)
    return head_on_features(clip, text, setup.spec.head_scale or clip.logit_scale)


def head_on_features(
    backbone: ClipBackbone | PretrainedNetwork, weight: Tensor, scale: float, *, unit_features: bool = True
) -> Model:
    """A linear head s (W z + b) on frozen image features z, W starting from ``weight`` (C, d) and b from zero.

    z is brought to unit length unless ``unit_features`` is false; it is what ``Outputs.features`` holds.
    """

    def forward(tensors: Tensors, inputs: Tensor, training: bool) -> Outputs:
        features = torch.nn.functional.normalize(inputs, dim=-1) if unit_features else inputs
        return Outputs(scaled_logits(features, tensors["head.weight"], tensors["head.bias"], scale), features)

    return Model(
        weights={"head.weight": weight.clone(), "head.bias": torch.zeros(len(weight))},
        forward=forward,
        encoder=backbone.image_encoder(),
        head=LinearHead(scale=scale),
    )


def full_model(setup: ModelSetup) -> Model:
    """A model trained as a whole: a CNN with a new linear head, or both towers of CLIP with class prompts as
    classifier."""
    head = None
    if isinstance(setup.backbone, ClipBackbone):
        weights, buffers, forward = full_clip_model(setup.backbone, setup.classnames, setup.spec.templates)
        norm = batch_norm_names(setup.backbone.module)
    else:
        weights, buffers, forward = cnn_model(setup.backbone, len(setup.classnames), setup.spec.seed)
        head, norm = LinearHead(), batch_norm_names(setup.backbone.module, "body.")
    return Model(
        weights=weights,
        buffers=buffers,
        forward=forward,
        transform=setup.backbone.transform,
        head=head,
        batch_norm=norm,
    )
