"""Capabilities of a dual encoder's towers besides features, under the names that methods use in ``requires``."""

from __future__ import annotations

from torch import nn

from fedbench.models.clip.image_towers import image_tower
from fedbench.models.clip.patches import has_patches
from fedbench.models.clip.text_encoder import ClipTextEncoder
from fedbench.models.clip.text_encoders import OpenClipText, text_encoder
from fedbench.models.prompts.causal_text import can_pack

CAPABILITIES = ("context", "text_layers", "image_layers", "patches")


def lacking(module: nn.Module) -> dict[str, str]:
    """The capabilities that a dual encoder lacks, with the reason for each.

    ``context``: learned vectors among a text's tokens; ``text_layers``, ``image_layers``: tokens and additions inside
    the layers; ``patches``: features of an image's parts in the space of the texts. Every dual encoder has features of
    whole images and texts.
    """
    text, tower = text_encoder(module), image_tower(module)
    lacks = {"context": text.lacks} if text.lacks else {}
    if not can_pack(text):
        lacks["text_layers"] = f"its text tower is {_text_kind(text)}, not a causal transformer of plain blocks"
    visual = _kind(getattr(module, "visual", None) or getattr(module, "vision_model", None))
    if tower is None or tower.blocks is None:
        lacks["image_layers"] = f"its image tower is {visual}, not a vision transformer of plain blocks"
    if not has_patches(module):
        lacks["patches"] = (
            f"its image tower is {visual}, neither a vision transformer with a class token nor CLIP's ResNet"
        )
    return lacks


def _text_kind(text: ClipTextEncoder) -> str:
    if not isinstance(text, OpenClipText):
        return "of another kind"
    return f"{'causal' if text.is_causal else 'bidirectional'}, pooling at {text.pool_type!r}"


def _kind(tower: object) -> str:
    trunk = getattr(tower, "trunk", None)
    if trunk is not None:
        return f"timm's {type(trunk).__name__}"
    pools = getattr(tower, "pool_type", None)
    return type(tower).__name__ + (f" that pools at {pools!r}" if pools else "")
