"""Backbones by name: dual encoders of open_clip and transformers, and CNNs.

    clip:embedded                           the tiny CLIP that ships with fedbench
    clip:lite0-minilm                       two networks pretrained on photos and texts, joined by a linear map
    clip:ViT-B-32-quickgelu@openai          an open_clip architecture and pretrained tag
    clip:ViT-B-32:weights/open_clip.safetensors   ... or a weights file
    resnet8?width=1&projector=512           a CNN with options
    alexnet?weights=imagenet                ... that starts from torchvision's weights

Importing this package is cheap; torch and open_clip are imported when a backbone is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from fedbench.kinds.base import taken_apart
from fedbench.kinds.kinds import AnyFamily, AnyTextEncoder, BackboneRequest, Pretraining, TextRequest
from fedbench.kinds.registry import build, registered
from fedbench.models.names import parse_backbone

if TYPE_CHECKING:
    from torch import nn

    from fedbench.models.clip.backbone import ClipBackbone
    from fedbench.models.cnn.backbone import CnnBackbone


def load_backbone(
    name: str, *, data_dir: Path, seed: int, image_size: tuple[int, int] | None = None
) -> ClipBackbone | CnnBackbone:
    """The backbone that ``name`` describes.

    ``data_dir`` is where pretrained weights are looked up and kept; ``seed`` initialises networks trained from
    scratch; ``image_size`` is the data set's (height, width), for a clear error where a network needs more.
    """
    family, request = _requested(name, data_dir, seed, image_size)
    from fedbench.models.cnn.backbone import default_generator_from

    # what draws from torch's own generator follows the seed as well
    with default_generator_from(seed, "backbone"):
        return cast("ClipBackbone | CnnBackbone", family.load(request))


def image_network(
    name: str,
    module: nn.Module,
    feature_dim: int,
    *,
    size: int | None = None,
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406),
    std: tuple[float, float, float] = (0.229, 0.224, 0.225),
) -> CnnBackbone:
    """A backbone that is trained from scratch: ``module`` maps images (b, 3, h, w) to features (b, feature_dim).

    Images are resized to ``size`` pixels square (None: they keep theirs), scaled to 0..1 and normalised by ``mean`` and
    ``std`` of each channel, ImageNet's by default.
    """
    from fedbench.models.cnn.backbone import CnnBackbone
    from fedbench.models.inputs import PixelTransform

    transform = PixelTransform(mean, std, size, mode="squash", interpolation="bilinear")
    return CnnBackbone(name, module, feature_dim, transform)


def how_to_get(name: str, data_dir: Path) -> str:
    """How to get the published weights of a backbone or text encoder; "" if they are here, or none are needed."""
    if taken_apart(name.partition("?")[0])[0] in registered("text encoder"):
        encoder, location = build("text encoder", name)
        return cast(AnyTextEncoder, encoder).how_to_get(TextRequest(name, location, (), (), 0, 1, data_dir))
    family, request = _requested(name, data_dir)
    return family.how_to_get(request)


def image_size_of(name: str) -> int | None:
    """The side in pixels of the square images that the backbone called ``name`` is made for.

    Nothing is loaded for it. None where the name says no size and is unknown; ``load_backbone`` says what is wrong.
    """
    family, request = _requested(name, Path())
    return family.image_size(request)


def pretraining_of(name: str) -> Pretraining | None:
    """The data that the backbone's weights were trained on; None if it starts at random."""
    family, request = _requested(name, Path())
    return family.pretrained_on(request)


def _requested(
    name: str, data_dir: Path, seed: int = 0, image_size: tuple[int, int] | None = None
) -> tuple[AnyFamily, BackboneRequest]:
    parse_backbone(name)
    family, location = build("backbone", name)
    return cast(AnyFamily, family), BackboneRequest(name, location, data_dir, seed, image_size)
