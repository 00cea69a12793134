"""File names of pages, and where code lies in its repository."""

from __future__ import annotations

import hashlib
import re
from importlib.util import find_spec
from pathlib import Path

from fedbench.core.version import PACKAGE

_LONGEST = 80
_ROOTS = ("pyproject.toml", ".git")


def slug(name: str) -> str:
    """``name`` as a file name without suffix: lower-case letters, digits, ``.``, ``_``, ``-`` and ``+``.

    A name that has to change for it gets a digest, so that two names never share a page, also where the file system
    does not tell capital letters.
    """
    plain = re.sub(r"[^a-z0-9._+-]+", "-", name.lower()).lstrip(".-")[:_LONGEST]
    return plain if plain == name and name else f"{plain or 'page'}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"


def in_repository(path: Path) -> str:
    """``path`` from the root of its repository, with slashes; "" outside one, since nobody else has that path."""
    root = _root_of(path)
    return "" if root is None else path.absolute().relative_to(root).as_posix()


def source_of(module: str) -> tuple[str, bool]:
    """Path of a module's source, and whether it is a path in fedbench's own repository.

    For an installed package, or one of another repository, it is the path below the package's folder.
    """
    spec, inside = find_spec(module), f"{module.replace('.', '/')}.py"
    if spec is None or spec.origin is None:
        return inside, False
    root = _root_of(Path(spec.origin))
    is_ours = root is not None and root == _root_of(PACKAGE)
    # an environment may lie in the repository
    if not is_ours or "site-packages" in Path(spec.origin).parts:
        return inside, False
    return in_repository(Path(spec.origin)), True


def _root_of(path: Path) -> Path | None:
    folders = path.absolute().parents
    return next((folder for folder in folders if any((folder / name).exists() for name in _ROOTS)), None)
