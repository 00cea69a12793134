"""Plug-ins that a Python program brings as objects: known in its process while it uses them, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

OBJECT = "object"
"""What the names of a program's own data sets, partitions and backbones begin with: ``object:NAME``."""
IN_NO_FILE = "(in no file)"
"""Stands behind the name of a class of a notebook or prompt, of which nothing tells whether its code changed."""
_OWN: dict[tuple[str, str], type] = {}


@contextmanager
def own_plugins(given: Mapping[tuple[str, str], type]) -> Iterator[None]:
    """Within the block the classes are known by kind and name, in every thread of this process."""
    before = dict(_OWN)
    _OWN.update(given)
    try:
        yield
    finally:
        _OWN.clear()
        _OWN.update(before)


def own(kind: str) -> dict[str, type]:
    """Those of one kind that are known now, by name."""
    return {name: cls for (of, name), cls in _OWN.items() if of == kind}
