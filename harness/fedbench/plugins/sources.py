"""Which files the code of a method is made of: its module, what that imports of its own, the data beside them.

Import statements are read, not carried out; those inside functions count as well. A module is a method's own if it is
of a package that registers methods, of the method's distribution, or not installed at all (code in development).
Python's own modules, fedbench's and those of other distributions are not: the harness counts with every run, and the
versions of the libraries with the harness.

Of data, all files of a package that registers methods count, since a package says what belongs to it. The folder of a
single file does not (it may be a home folder): there, files that its strings name by their path from it count.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution
from pathlib import Path, PurePosixPath
from typing import NoReturn

from fedbench.core.errors import FedbenchError

PLUGIN = "--plugin"
"""The folder under which a ``--plugin`` file and the data beside it are named; no package can be called so."""
_BY_NAME = frozenset({"import_module", "__import__", "iter_modules", "walk_packages", "run_module", "run_path"})
"""Functions that import what they are given the name of."""
_NOT_SOURCES = frozenset({"__pycache__", "fedbench-store"})
"""Folders in a package that are written by running it."""


def files_of(
    start: str | Path, registering: Collection[str], distribution: Distribution | None = None
) -> dict[str, Path]:
    """The files that the code of the module, or of the ``--plugin`` file, ``start`` is made of, by name.

    Names are those of modules as paths, so they do not depend on where the code lies. ``registering`` are the top-level
    packages that register methods, ``distribution`` the one that ``start`` comes in. FedbenchError where a file cannot
    be read.
    """
    return files_of_all([start], registering, distribution)


def files_of_all(
    starts: Iterable[str | Path], registering: Collection[str], distribution: Distribution | None = None
) -> dict[str, Path]:
    """`files_of` of several that come in one distribution; what they share is read once."""
    walk = _Walk(registering, distribution)
    for start in starts:
        if isinstance(start, Path):
            walk.add(f"{PLUGIN}/{start.name}", start, "")
        else:
            walk.add_module(start)
    walk.finish()
    return walk.files


def digest_of(files: Mapping[str, Path]) -> str:
    """sha256 over names and content; FedbenchError where a file cannot be read."""
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        try:
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").digest()
        except OSError as error:
            raise _unreadable(path, error) from error
        digest.update(name.encode(errors="surrogateescape") + b"\0" + content)
    return digest.hexdigest()


def files_under(root: Path) -> Iterator[tuple[str, Path]]:
    """Every regular file of a package with its path in it; neither hidden ones nor what running it writes.

    FedbenchError for a folder that cannot be listed.
    """
    for folder, inside, names in os.walk(root, onerror=_refuse):
        inside[:] = sorted(name for name in inside if not _is_left_out(name))
        within = Path(folder).relative_to(root).as_posix()
        for name in sorted(names):
            path = Path(folder, name)
            if not _is_left_out(name) and path.suffix != ".pyc" and path.is_file():
                yield (name if within == "." else f"{within}/{name}"), path


def _is_left_out(name: str) -> bool:
    return name.startswith(".") or name in _NOT_SOURCES


def _refuse(error: OSError) -> NoReturn:
    raise _unreadable(Path(error.filename), error) from error


class _Walk:
    """Follows imports from file to file; ``files`` are those found."""

    def __init__(self, registering: Collection[str], distribution: Distribution | None) -> None:
        self.files: dict[str, Path] = {}
        self._registering = frozenset(registering) - {"fedbench"}
        self._distribution = distribution
        self._specs: dict[str, ModuleSpec | None] = {}
        self._own: dict[str, bool] = {}
        self._reached: set[str] = set()
        self._followed: set[str] = set()
        self._whole: set[str] = set()
        self._waiting: list[tuple[str, Path, str]] = []

    def add_module(self, name: str) -> None:
        """The module of that name, if it is a method's own, and the packages around it."""
        top, *rest = name.split(".")
        if not self._is_own(top):
            return
        self._reach(top)
        for end in range(1, len(rest) + 1):
            self._reach(".".join([top, *rest[:end]]))

    def add(self, name: str, path: Path, package: str) -> None:
        """A file, and in time what it imports; ``package`` is what its relative imports start from."""
        if name not in self._followed:
            self._followed.add(name)
            self.files[name] = path
            self._waiting.append((name, path, package))

    def finish(self) -> None:
        """Follow the imports of all files that were added."""
        while self._waiting:
            name, path, package = self._waiting.pop()
            if path.suffix != ".py":
                continue
            try:
                source = _read(path.read_bytes(), package)
            except OSError as error:
                raise _unreadable(path, error) from error
            for imported in source.imports:
                self.add_module(imported)
            around = self._outermost(package)
            if source.is_open and around:
                self._add_package(around)
            if around not in self._whole:
                self._add_data(name, path, source)

    def _reach(self, name: str) -> None:
        if name in self._reached:
            return
        self._reached.add(name)
        spec = self._spec(name)
        if spec is None or not spec.has_location or spec.origin is None:
            return
        is_package = spec.submodule_search_locations is not None
        package = name if is_package else name.rpartition(".")[0]
        path = Path(spec.origin)
        self.add(str(PurePosixPath(package.replace(".", "/")) / path.name), path, package)
        if is_package and name == self._outermost(name) and name.partition(".")[0] in self._registering:
            self._whole.add(name)
            for inner, file in files_under(path.parent):
                if file.suffix != ".py":
                    self.files[f"{name.replace('.', '/')}/{inner}"] = file

    def _outermost(self, package: str) -> str:
        """The outermost package around a module that is no mere namespace; "" where there is none."""
        parts = package.split(".") if package else []
        for end in range(1, len(parts) + 1):
            spec = self._spec(".".join(parts[:end]))
            if spec is not None and spec.has_location:
                return ".".join(parts[:end])
        return ""

    def _add_package(self, package: str) -> None:
        """All modules of the package, since one of them imports some that no statement names."""
        spec = self._spec(package)
        if spec is not None and spec.origin is not None:
            for inner, file in files_under(Path(spec.origin).parent):
                if file.suffix == ".py":
                    folders = inner.split("/")[:-1]
                    self.add(f"{package.replace('.', '/')}/{inner}", file, ".".join([package, *folders]))

    def _add_data(self, name: str, path: Path, source: _Source) -> None:
        folder = path.resolve().parent
        for text in source.paths:
            if os.path.isfile(folder / text):
                file = (folder / text).resolve()
                if file.is_relative_to(folder) and file != path.resolve():
                    self.files[str(PurePosixPath(name).parent / file.relative_to(folder).as_posix())] = file

    def _is_own(self, top: str) -> bool:
        if top not in self._own:
            self._own[top] = top in self._registering or self._is_ours_by_place(top)
        return self._own[top]

    def _is_ours_by_place(self, top: str) -> bool:
        if top in sys.stdlib_module_names or top == "fedbench":
            return False
        spec = self._spec(top)
        if spec is None:
            return False
        inside = list(spec.submodule_search_locations or ())
        if not inside and not spec.has_location:
            return False
        place = Path(inside[0] if inside else str(spec.origin))
        return not _is_installed(place.parent) or place.name in self._distributed()

    def _distributed(self) -> set[str]:
        """Names of the folders and modules that the distribution puts where packages are installed."""
        files = None if self._distribution is None else self._distribution.files
        return {file.parts[0] for file in files or ()}

    def _spec(self, name: str) -> ModuleSpec | None:
        """Where the module is; None where there is none. Imports nothing."""
        if name not in self._specs:
            self._specs[name] = self._found(name)
        return self._specs[name]

    def _found(self, name: str) -> ModuleSpec | None:
        parent = name.rpartition(".")[0]
        if parent:
            above = self._spec(parent)
            if above is None or above.submodule_search_locations is None:
                return None
            return PathFinder.find_spec(name, list(above.submodule_search_locations))
        try:
            return importlib.util.find_spec(name)
        except (ImportError, ValueError):
            return None


@dataclass(frozen=True)
class _Source:
    """What the text of a module says of other files."""

    imports: tuple[str, ...] = ()
    """Names that may be those of modules; ``from a import b`` gives a and a.b."""
    is_open: bool = False
    """Whether it imports what no statement names."""
    paths: frozenset[str] = frozenset()
    """Strings, and those joined by ``/`` or by a call, that may be paths of files."""


@lru_cache(maxsize=1024)
def _read(content: bytes, package: str) -> _Source:
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):
        return _Source()  # whoever imports it says so
    imports: list[str] = []
    paths: set[str] = set()
    is_open = False
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                imports += [alias.name for alias in names]
            case ast.ImportFrom(names=names):
                base = _absolute(node, package)
                imports += [base, *(f"{base}.{alias.name}" for alias in names)] if base else []
                is_open = is_open or any(alias.name == "*" for alias in names)
            case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called), args=arguments):
                texts = [text for argument in arguments for text in _joined(argument)]
                paths.add("/".join(texts))
                imports += texts if called in _BY_NAME else []
            case ast.Name(id=mentioned) | ast.Attribute(attr=mentioned):
                is_open = is_open or mentioned in _BY_NAME
            case ast.Constant(value=str()) | ast.BinOp(op=ast.Div()):
                paths.add("/".join(_joined(node)))
    return _Source(tuple(imports), is_open, frozenset(paths - {""}))


def _absolute(node: ast.ImportFrom, package: str) -> str:
    """The module that is imported from; "" for a relative import that leads nowhere."""
    if not node.level:
        return node.module or ""
    parts = package.split(".") if package else []
    if node.level > len(parts):
        return ""
    return ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [node.module])])


def _joined(node: ast.AST) -> list[str]:
    """The strings at the end of ``folder / "data" / "table.csv"``; nothing where the last is no string."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.BinOp(left=left, op=ast.Div(), right=ast.Constant(value=str(text))):
            return [*_joined(left), text]
    return []


def _is_installed(folder: Path) -> bool:
    """Whether an installer puts packages there, and writes down which."""
    return folder.name in ("site-packages", "dist-packages") or any(folder.glob("*.dist-info/RECORD"))


def _unreadable(path: Path, error: OSError) -> FedbenchError:
    return FedbenchError(
        f"source {'folder' if path.is_dir() else 'file'} {str(path)!r} cannot be read: {error.strerror}."
    )
