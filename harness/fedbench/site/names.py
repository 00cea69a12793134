"""File names of pages, and where code lies in its repository."""

from __future__ import annotations

import hashlib
import re
from importlib.util import find_spec
from pathlib import Path

_LONGEST = 80
_ROOTS = ("pyproject.toml", ".git")


def slug(name: str) -> str:
    """``name`` as a file name without suffix: lower-case letters, digits, ``.``, ``_``, ``-`` and ``+``.

    A name that has to change for it gets a digest, so that two names never share a page, also where the file system
    does not tell capital letters.
    """
    plain = re.sub(r"[^a-z0-9._+-]+", "-", name.lower()).lstrip(".-")[:_LONGEST]
    return plain if plain == name else f"{plain or 'page'}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"


def in_repository(path: Path) -> str:
    """``path`` from the root of its repository, with slashes; "" outside one, since nobody else has that path."""
    whole = path.absolute()
    for folder in whole.parents:
        if any((folder / name).exists() for name in _ROOTS):
            return whole.relative_to(folder).as_posix()
    return ""


def source_of(module: str) -> str:
    """Where a module's source lies: its path in the repository, or below its package where it is installed."""
    spec = find_spec(module)
    inside = f"{module.replace('.', '/')}.py"
    if spec is None or spec.origin is None:
        return inside
    is_installed = "site-packages" in Path(spec.origin).parts
    return inside if is_installed else in_repository(Path(spec.origin)) or inside
