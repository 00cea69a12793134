"""Where a result comes from: the git commit, the packages that register methods, their files, versions of libraries."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from fedbench.core.errors import FedbenchError
from fedbench.core.version import PACKAGE, __version__
from fedbench.kinds.registry import installed_plugins

_NOT_SOURCES = frozenset({"__pycache__", "fedbench-store"})
"""Folders in a package that are written by running it."""
_GIT_SECONDS = 5.0
_LIBRARIES = {
    "torch": "torch",
    "torchvision": "torchvision",
    "open_clip": "open_clip_torch",
    "transformers": "transformers",
    "numpy": "numpy",
    "mlflow": "mlflow",
}
"""What an import is called -> the distribution it comes in."""


def commit() -> str:
    """The git commit of fedbench's source tree, with ``+dirty`` where sources differ from it; "" outside a checkout."""
    folder = PACKAGE
    # An installed copy may lie in the work tree of some other repository, which does not track it.
    if _git(folder, "ls-files", "--error-unmatch", "--", "__init__.py") is None:
        return ""
    head, top = _git(folder, "rev-parse", "HEAD"), _git(folder, "rev-parse", "--show-toplevel")
    if head is None or top is None:
        return ""
    inside = sorted({str(root) for root in roots().values() if root.resolve().is_relative_to(Path(top).resolve())})
    return head + ("+dirty" if _git(folder, "status", "--porcelain", "--", *inside) else "")


def versions() -> dict[str, str]:
    """The versions of fedbench, Python and the libraries that can change a number."""
    found = {"fedbench": __version__, "python": platform.python_version()}
    for name, distribution in _LIBRARIES.items():
        try:
            found[name] = version(distribution)
        except PackageNotFoundError:
            continue
    return found


def roots() -> dict[str, Path]:
    """Top-level package -> its folder, or the file of a single module: fedbench and whatever registers plug-ins.

    `fedbench_flower` is one of them, though it registers none: others derive theirs from it. Imports none of them.
    """
    found = {"fedbench": PACKAGE}
    packages = [point.value.partition(":")[0].partition(".")[0] for point in installed_plugins()]
    for package in [*packages, "fedbench_flower"]:
        spec = None if package in found else find_spec(package)
        if spec is not None and spec.origin is not None:
            found[package] = Path(spec.origin).parent if spec.submodule_search_locations else Path(spec.origin)
        elif spec is not None and spec.submodule_search_locations:
            found[package] = Path(next(iter(spec.submodule_search_locations)))
    return found


def files_under(root: Path) -> Iterator[tuple[str, Path]]:
    """Every regular file of a package, or the one of a single module, by its path from the folder around it.

    Neither hidden ones nor what running it writes. FedbenchError for a folder that cannot be listed.
    """
    if root.is_file():
        yield root.name, root
        return
    for folder, inside, names in os.walk(root, onerror=_refuse):
        inside[:] = sorted(name for name in inside if not _is_left_out(name))
        for name in sorted(names):
            path = Path(folder, name)
            if not _is_left_out(name) and path.suffix != ".pyc" and path.is_file():
                yield path.relative_to(root.parent).as_posix(), path


def digest_of(files: Mapping[str, Path]) -> str:
    """sha256 over names and content; FedbenchError where a file cannot be read."""
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        try:
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").digest()
        except OSError as error:
            raise unreadable(path, error) from error
        digest.update(name.encode(errors="surrogateescape") + b"\0" + content)
    return digest.hexdigest()


def unreadable(path: Path, error: OSError) -> FedbenchError:
    """The error for a source that can't be read."""
    kind = "folder" if path.is_dir() else "file"
    return FedbenchError(f"source {kind} {str(path)!r} cannot be read: {error.strerror}.")


def _refuse(error: OSError) -> NoReturn:
    raise unreadable(Path(error.filename), error) from error


def _is_left_out(name: str) -> bool:
    return name.startswith(".") or name in _NOT_SOURCES


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints, or None where it fails or is missing."""
    command = ["git", "-C", str(folder), *arguments]
    # Without optional locks `git status` leaves the index of a checkout that others use alone.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, env=environment)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
