"""What a dual encoder's towers can be asked for beside features, as methods name it in ``requires``."""

from __future__ import annotations

from typing import Any

from torch import nn

from fedbench.models.clip.text_encoders import OpenClipText, text_encoder
from fedbench.models.clip.transformer_blocks import is_plain
from fedbench.models.prompts.causal_text import can_pack
from fedbench.models.prompts.image_tokens import has_class_token

CAPABILITIES = ("context", "text_layers", "image_layers", "patches")


def lacking(module: nn.Module) -> dict[str, str]:
    """The capabilities that a dual encoder lacks, and why: what its tower is or does.

    ``context``: learned vectors among a text's tokens; ``text_layers``, ``image_layers``: tokens and additions inside
    the layers; ``patches``: features of an image's parts in the space of the texts. Features of whole images and texts
    every dual encoder has.
    """
    from open_clip.modified_resnet import ModifiedResNet

    text, visual = text_encoder(module), getattr(module, "visual", None)
    found = {"context": text.lacks} if text.lacks else {}
    if not can_pack(text):
        is_own = isinstance(text, OpenClipText)
        kind = _kind(text) if is_own else "another library's"
        found["text_layers"] = f"its text tower is {kind}, not open_clip's causal transformer of plain blocks"
    image = f"its image tower is {_kind(visual)}"
    transformer: Any = getattr(visual, "transformer", None)
    if not (has_class_token(visual) and is_plain(transformer)):
        found["image_layers"] = f"{image}, not open_clip's vision transformer of plain blocks with a class token"
    if not has_class_token(visual) and not isinstance(visual, ModifiedResNet):
        found["patches"] = f"{image}, neither a vision transformer with a class token nor CLIP's ResNet"
    return found


def _kind(tower: object) -> str:
    if tower is None:
        return "another library's"
    trunk = getattr(tower, "trunk", None)
    if trunk is not None:
        return f"timm's {type(trunk).__name__}"
    if isinstance(tower, OpenClipText):
        blocks = "bidirectional" if tower.attn_mask is None else "causal"
        return f"{blocks}, pooling at {tower.pool_type!r}"
    return f"{type(tower).__name__} that pools at {getattr(tower, 'pool_type', 'its own place')!r}"
