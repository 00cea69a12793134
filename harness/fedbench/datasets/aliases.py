"""Data sets under several names: which names are of the same images."""

from __future__ import annotations

from pathlib import PurePosixPath
from urllib.parse import parse_qsl

CIFAR10 = frozenset({"cifar10", "hf:uoft-cs/cifar10", "hf:cifar10"})
CIFAR100 = frozenset({"cifar100", "hf:uoft-cs/cifar100", "hf:cifar100"})
FASHION = frozenset({"fashion-mnist", "hf:zalando-datasets/fashion_mnist", "hf:fashion_mnist"})
OFFICE_HOME = frozenset({"imagefolder:OfficeHome", "imagefolder:Office-Home"})
_ALIKE = (CIFAR10, CIFAR100, FASHION, OFFICE_HOME)
_WHERE = frozenset({"download", "layout", "classnames", "names", "image", "label", "domain", "root"})
"""Options that say where things are and what they are called, not which images there are."""


def same_data(one: str, other: str) -> bool:
    """Whether two names are of the same images; options that only say where they are do not count."""
    return images_of(one) == images_of(other)


def images_of(text: str) -> tuple[str, dict[str, str]]:
    """Which images a name is of: the data set, by the first of its names, and the options that change them."""
    name, options = name_and_options(text)
    scheme, _, place = name.partition(":")
    if scheme in ("imagefolder", "listfile"):
        # the folder's own name, wherever it lies
        name = f"{scheme}:{PurePosixPath(place).name.removesuffix('.tar')}"
    alike = next((names for names in _ALIKE if name in names), frozenset({name}))
    return min(alike), {key: value for key, value in options.items() if key not in _WHERE}


def name_and_options(text: str) -> tuple[str, dict[str, str]]:
    """The name of a data set or backbone, and the options behind its question mark."""
    name, _, options = text.partition("?")
    return name, dict(parse_qsl(options, keep_blank_values=True))
