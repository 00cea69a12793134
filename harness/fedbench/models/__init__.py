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
from typing import TYPE_CHECKING

from fedbench.models.names import EMBEDDED, FAMILIES, LITE0_MINILM, PHOTOS, PRETRAINED, parse_backbone

if TYPE_CHECKING:
    from fedbench.models.clip.backbone import ClipBackbone
    from fedbench.models.cnn.backbone import CnnBackbone


def load_backbone(
    name: str, *, data_dir: Path, seed: int, image_size: tuple[int, int] | None = None
) -> ClipBackbone | CnnBackbone:
    """The backbone that ``name`` describes.

    ``data_dir`` is where pretrained weights are looked up and kept; ``seed`` initialises networks trained from
    scratch; ``image_size`` is the data set's (height, width), for a clear error where a network needs more.
    """
    parsed = parse_backbone(name)
    if parsed.arch == LITE0_MINILM:
        from fedbench.models.photos.dual import load_lite0_minilm

        return load_lite0_minilm(parsed)
    if parsed.family == "hf-clip":
        from fedbench.models.clip.transformers_models import load_transformers_clip

        return load_transformers_clip(parsed)
    if parsed.family == "clip":
        from fedbench.models.clip.loading import load_clip

        return load_clip(parsed, data_dir)
    if parsed.family in PRETRAINED:
        from fedbench.models.cnn.pretrained import load_pretrained_network

        return load_pretrained_network(parsed, seed)
    if parsed.weights:
        from fedbench.models.cnn.imagenet import load_started

        return load_started(parsed, seed, image_size, data_dir)
    from fedbench.models.cnn.backbone import load_cnn

    return load_cnn(parsed, seed, image_size)


def how_to_get(name: str, data_dir: Path) -> str:
    """What to do about published weights of a backbone or text encoder; "" where they are here, or it needs none.

    Of text encoders those that are CLIP, or GloVe's vectors of words.
    """
    if name.startswith("glove:"):
        from fedbench.models.text.glove import how_to_get_glove

        return how_to_get_glove(name, data_dir)
    parsed = parse_backbone(name)
    if parsed.weights:
        from fedbench.models.cnn.imagenet import how_to_get_imagenet

        return how_to_get_imagenet(parsed, data_dir)
    if parsed.family != "clip" or not parsed.checkpoint or parsed.arch == LITE0_MINILM:
        return ""
    from fedbench.models.clip.weights import how_to_get_clip

    return how_to_get_clip(parsed, data_dir)


def image_size_of(name: str) -> int | None:
    """The side in pixels of the square images that the backbone called ``name`` is made for.

    Nothing is loaded for it. None where the name says no size and is unknown; ``load_backbone`` says what is wrong.
    """
    parsed = parse_backbone(name)
    if parsed.arch == LITE0_MINILM:
        from fedbench.models.photos.packages import LITE0_SIZE

        return LITE0_SIZE
    if parsed.family == "hf-clip":
        from fedbench.models.clip.transformers_models import transformers_image_size

        return transformers_image_size(parsed.checkpoint, name)
    if parsed.family == "clip":
        from fedbench.models.clip.loading import clip_image_size

        return clip_image_size(parsed)
    if parsed.family in PRETRAINED:
        from fedbench.models.cnn.pretrained import pretrained_image_size

        return pretrained_image_size(parsed)
    from fedbench.models.cnn.backbone import cnn_image_size

    return cnn_image_size(parsed)


def backbone_names() -> dict[str, str]:
    """How backbones are written, and what each is."""
    own = {"clip:embedded": EMBEDDED, f"clip:{LITE0_MINILM}": PHOTOS}
    return {**own, **{family.form: family.meaning for family in FAMILIES.values()}}
