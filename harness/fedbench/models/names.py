"""Names of backbones: ``family[:arch[@checkpoint]][?option=value&...]``; a colon may take the place of ``@``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from fedbench.core.errors import FedbenchError
from fedbench.kinds.registry import build, parted, registered

if TYPE_CHECKING:
    from fedbench.kinds.kinds import AnyFamily

LIST_HINT = "See `fedbench list backbones`."


@dataclass(frozen=True)
class BackboneName:
    """A parsed name, with the options of our families. Those that a family doesn't take have no effect."""

    text: str
    family: str
    arch: str = ""
    checkpoint: str = ""
    width: int = 4
    projector: int | None = None
    projector_layers: int = 1
    dense: int = 2
    bn: int = 0
    resize: int | None = None
    stem: str = "imagenet"
    weights: str = ""
    """The initial weights of a CNN: ``imagenet``, a file, or empty for a random start."""


IMAGENET = "imagenet"
"""The value of ``weights`` that stands for torchvision's file."""
FOLDERS = ("local-dir", "hf-hub")
"""Words in the place of an architecture, for a folder or a name of the hub with open_clip's own configuration."""


def split_checkpoint(rest: str) -> tuple[str, str, str]:
    """Split ``ARCH@CHECKPOINT`` or ``ARCH:CHECKPOINT`` into architecture, sign and checkpoint; the last two may be
    empty.

    The first sign counts: an architecture contains neither, a path may contain both.
    """
    sign = next((letter for letter in rest if letter in "@:"), "")
    arch, _, checkpoint = rest.partition(sign) if sign else (rest, "", "")
    return arch, sign, checkpoint


def is_dual_encoder(name: str) -> bool:
    """Whether ``name`` is that of a backbone with a text tower."""
    family = family_of(name)
    return family is not None and family.is_dual_encoder


def is_pretrained(name: str) -> bool:
    """Whether the backbone called ``name`` has weights from elsewhere, or starts from such."""
    family = family_of(name)
    return (family is not None and family.is_pretrained) or "weights=" in name.partition("?")[2]


def family_of(name: str) -> type[AnyFamily] | None:
    """The family of the backbone called ``name``; None where nobody registered it."""
    plugin = registered("backbone").get(parted("backbone", name.partition("?")[0])[0])
    return None if plugin is None else cast("type[AnyFamily]", plugin.load())


def canonical_backbone(name: str) -> str:
    """``name`` as it stands in a run's identity: ``clip:ViT-B-32@openai`` for ``clip:ViT-B/32:openai``."""
    family, colon, rest = name.partition(":")
    arch, sign, checkpoint = split_checkpoint(rest)
    if family != "clip" or not arch:
        return name
    return f"{family}{colon}{arch.replace('/', '-')}{sign and '@'}{checkpoint}"


def parse_backbone(name: str) -> BackboneName:
    """Parse a backbone's name; FedbenchError where family or options are wrong.

    A family registered by others has parameters of its own, which are no part of the answer.
    """
    from fedbench.kinds.options import Options

    family, location = build("backbone", name)
    arch, sign, checkpoint = split_checkpoint(location)
    if family.name == "clip" and (not arch or (sign and not checkpoint)):
        raise FedbenchError(f"backbone {name!r} is incomplete: write 'clip:embedded' or 'clip:ARCH@CHECKPOINT'.")
    if family.name == "timm" and not checkpoint:
        raise FedbenchError(f"backbone {name!r} is incomplete: write 'timm:ARCH@FILE'.")
    if family.name not in ("clip", "timm"):
        arch, checkpoint = "", location
    options = family.params.model_dump() if isinstance(family.params, Options) else {}
    # open_clip writes ViT-B-32 for the papers' ViT-B/32
    return BackboneName(name, family.name, arch.replace("/", "-"), checkpoint, **options)
