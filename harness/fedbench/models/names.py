"""Names of backbones: ``family[:arch[@checkpoint]][?option=value&...]``; a colon may take the place of ``@``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from fedbench.core.errors import FedbenchError, unknown_name
from fedbench.kinds.base import taken_apart, whole_number
from fedbench.kinds.registry import build, find, parted, registered

if TYPE_CHECKING:
    from fedbench.kinds.kinds import AnyFamily

LIST_HINT = "See `fedbench list backbones`."


@dataclass(frozen=True)
class BackboneName:
    """A parsed name. Options that a family doesn't take keep their defaults."""

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
_OURS = frozenset(
    {
        *("clip", "hf-clip", "lite0", "timm", "resnet8", "convnet", "fedavg-cnn", "alexnet", "vgg11", "resnet18"),
        "resnet50",
    }
)
"""Families whose names `parse_backbone` reads."""
_NUMBERS = {"width": 64, "projector": 65536, "projector_layers": 2, "dense": 2, "bn": 1, "resize": 4096}
_WORDS = {"stem": ("cifar", "imagenet")}


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
    family, location, options = taken_apart(name)
    rest = location or ""
    known = cast("type[AnyFamily]", find("backbone", parted("backbone", name)[0], LIST_HINT))
    if known.name not in _OURS:
        build("backbone", name)
        return BackboneName(name, known.name)
    if family == "clip":
        arch, sign, checkpoint = split_checkpoint(rest)
        if not arch or (sign and not checkpoint):
            raise FedbenchError(f"backbone {name!r} is incomplete: write 'clip:embedded' or 'clip:ARCH@CHECKPOINT'.")
        arch = arch.replace("/", "-")  # open_clip writes ViT-B-32 for the papers' ViT-B/32
    elif family == "timm":
        arch, _, checkpoint = split_checkpoint(rest)
        if not arch or not checkpoint:
            raise FedbenchError(f"backbone {name!r} is incomplete: write 'timm:ARCH@FILE'.")
    elif family == "hf-clip":
        arch, checkpoint = "", rest
        if not rest:
            raise FedbenchError(f"backbone {name!r} is incomplete: write 'hf-clip:NAME_OR_FOLDER'.")
    else:
        arch = checkpoint = ""
        if location is not None or "@" in family:
            raise FedbenchError(f"backbone {family!r} takes no architecture or checkpoint, got {name!r}. {LIST_HINT}")
    allowed = known.options()
    for option, value in options.items():
        if not allowed:
            raise FedbenchError(f"backbone {family!r} takes no options, got '{option}={value}'.")
        if option not in allowed:
            raise unknown_name(f"option of backbone {family!r}:", option, allowed, LIST_HINT)
    values = {option: _value(family, option, value) for option, value in options.items()}
    if "projector_layers" in values and "projector" not in values:
        raise FedbenchError(f"backbone {name!r}: projector_layers needs a projector; add '&projector=WIDTH'.")
    if "weights" in values and values.get("stem") == "cifar":
        raise FedbenchError(
            f"backbone {name!r}: weights of ImageNet are for its stem of 7x7 and stride 2, and stem=cifar has another; "
            "leave one of them out (resize=224 enlarges small images)."
        )
    return BackboneName(name, family, arch, checkpoint, **values)


def _value(family: str, option: str, value: str) -> Any:
    """A number of `_NUMBERS`, one of `_WORDS`, or any text."""
    where = f"option {option}={value!r} of backbone {family!r}: expected"
    if option in _WORDS and value not in _WORDS[option]:
        raise FedbenchError(f"{where} one of {', '.join(_WORDS[option])}.")
    if option not in _NUMBERS:
        return value
    number = whole_number(value, 1, _NUMBERS[option])
    if number is None:
        raise FedbenchError(f"{where} a whole number from 1 to {_NUMBERS[option]}.")
    return number
