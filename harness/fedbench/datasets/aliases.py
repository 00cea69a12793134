"""Data sets under several names: which names are of the same images."""

from __future__ import annotations

from urllib.parse import parse_qsl

from fedbench.datasets.catalogue import alike, plain_name

_WHERE = frozenset({"download", "layout", "classnames", "names", "image", "label", "domain", "root"})
"""Options that say where things are and what they are called, not which images there are."""


def same_data(one: str, other: str) -> bool:
    """Whether two names are of the same images; options that only say where they are do not count."""
    return images_of(one) == images_of(other)


def images_of(text: str) -> tuple[str, dict[str, str]]:
    """Which images a name is of: the data set, by the first of its names, and the options that change them."""
    name, options = name_and_options(text)
    return min(alike(plain_name(name))), {key: value for key, value in options.items() if key not in _WHERE}


def name_and_options(text: str) -> tuple[str, dict[str, str]]:
    """The name of a data set or backbone, and the options behind its question mark."""
    name, _, options = text.partition("?")
    return name, dict(parse_qsl(options, keep_blank_values=True))
