"""The origin of a result: the git commit, the code of a run by plug-in, versions of libraries. Resuming needs it.

The code of a plug-in of fedbench's own packages is its module, what that imports of packages with plug-ins, and their
JSON files. That of somebody else's is all of their distribution, with its version. That of a ``--plugin`` file, or of
the module of a class that a program brings, is the file, what it imports of its folder, of its package and of packages
with plug-ins, and the files beside it that its strings name. Imports are read off the compiled code, not carried out.
"""

from __future__ import annotations

import dis
import hashlib
import os
import platform
import subprocess
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import EntryPoint, PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, NoReturn

from fedbench.core.errors import FedbenchError
from fedbench.core.version import PACKAGE, __version__
from fedbench.kinds.registry import (
    IN_NO_FILE,
    METHOD,
    OBJECT,
    Registered,
    comes_with_fedbench,
    installed_plugins,
    is_harness,
    look_up,
    parted,
    plugins_everywhere,
    strangers,
)

if TYPE_CHECKING:
    from fedbench.core.spec import RunSpec


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
    versions_here = {"fedbench": __version__, "python": platform.python_version()}
    for name, distribution in _LIBRARIES.items():
        try:
            versions_here[name] = version(distribution)
        except PackageNotFoundError:
            continue
    return versions_here


def roots() -> dict[str, Path]:
    """Top-level package -> its folder, or the file of a single module: fedbench and whatever registers plug-ins.

    `fedbench_flower` is one of them, though it registers none: others derive theirs from it. Imports none of them.
    """
    folders = {"fedbench": PACKAGE}
    packages = [point.value.partition(":")[0].partition(".")[0] for point in installed_plugins()]
    for package in [*packages, "fedbench_flower"]:
        spec = None if package in folders else find_spec(package)
        if spec is not None and spec.origin is not None:
            folders[package] = Path(spec.origin).parent if spec.submodule_search_locations else Path(spec.origin)
        elif spec is not None and spec.submodule_search_locations:
            folders[package] = Path(next(iter(spec.submodule_search_locations)))
    return folders


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


PLUGIN = "--plugin"
"""The folder under which ``--plugin`` files are named; no package can be called so."""
_HASHED_BY_VERSION = frozenset({"torch", "fedbench"})
"""Their versions, or their own code, count with every run."""
_LONGEST_NAME = 255


@dataclass(frozen=True)
class MethodCode:
    """The code of one method or other plug-in."""

    method: str
    """Its name; of a plug-in of another kind, kind and name."""
    hash: str
    package: str = ""
    """The distribution it comes in; "" for those that come with fedbench, and for a plugin file."""
    version: str = ""
    """Version of the package."""
    plugin: str = ""
    """Name of the ``--plugin`` file; ``object:CLASS`` of a class that a program brought."""

    def as_json(self) -> dict[str, str]:
        return {name: value for name, value in asdict(self).items() if value}


@dataclass(frozen=True)
class RunCode:
    """The code that makes a run."""

    harness: str
    """Hash of fedbench's sources and of the versions that it runs on."""
    methods: tuple[MethodCode, ...] = ()
    """Plug-ins of the stack, in its order, without the defaults, which are the harness's."""

    @property
    def hash(self) -> str:
        """Runs with the same run id and the same hashes of code, data and weights are interchangeable."""
        parts = [self.harness, *(f"{code.method} {code.hash}" for code in self.methods)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


class Codes:
    """The code of runs with these plugin files, as it is when first read."""

    def __init__(self, plugin_files: Iterable[Path] = ()) -> None:
        self._plugin_files = tuple(plugin_files)
        self._methods: dict[str, MethodCode | None] = {}

    def of(self, stack: str, plugins: Sequence[Registered] = ()) -> RunCode:
        """The code of a run of ``stack`` with these plug-ins of other kinds, which are no part of the harness.

        FedbenchError for an unknown method, or a file that cannot be read.
        """
        from fedbench.core.spec import stack_names  # imports pydantic

        names = stack_names(stack)
        self._methods |= {name: self._of_method(name) for name in names if name not in self._methods}
        codes = [self._methods[name] for name in names]
        for plugin in plugins:
            name = f"{plugin.kind} {plugin.name}"
            if name not in self._methods:
                self._methods[name] = self._of_source(name, plugin.source)
            codes.append(self._methods[name])
        return RunCode(self.harness, tuple(code for code in codes if code is not None))

    def of_run(self, spec: RunSpec) -> RunCode:
        """The code of ``spec``: its methods', and that of whatever else it names that does not come with fedbench."""
        with plugins_everywhere(self._plugin_files):
            return self.of(spec.method, plugins_of(spec))

    @cached_property
    def harness(self) -> str:
        return harness_hash()

    @cached_property
    def everything(self) -> str:
        return code_hash(self._plugin_files)

    @cached_property
    def plugins(self) -> tuple[dict[str, str], ...]:
        """Name and hash of every plugin file, whether a run uses it or not."""
        return tuple({"plugin": file.name, "hash": _digest_of_file(file)} for file in self._plugin_files)

    def _of_method(self, name: str) -> MethodCode | None:
        return self._of_source(name, look_up(METHOD, name, plugin_files=self._plugin_files).source)

    def _of_source(self, name: str, source: Path | EntryPoint | type) -> MethodCode | None:
        if isinstance(source, type):
            called = f"{OBJECT}:{source.__qualname__}"
            file = _file_of(source)
            return MethodCode(name, digest_of_code([source]), plugin=called if file else f"{called} {IN_NO_FILE}")
        if isinstance(source, Path):
            return MethodCode(name, _digest_of_file(source), plugin=source.name)
        if is_harness(source):
            return None
        top, *rest = source.module.split(".")
        root = roots()[top]
        if comes_with_fedbench(source):
            module = root.joinpath(*rest)
            file = module.with_suffix(".py") if not module.is_dir() else module / "__init__.py"
            tables = {name: path for name, path in files_under(root) if path.suffix == ".json"}
            return MethodCode(name, digest_of(with_imports(file, root, top) | tables))
        files = dict(files_under(root))
        if source.dist is None:
            return MethodCode(name, digest_of(files))
        for folder in {part.parts[0] for part in source.dist.files or () if part.suffix == ".py"} - {top, ".."}:
            if (place := Path(str(source.dist.locate_file(folder)))).exists():
                files |= dict(files_under(place))
        digest = hashlib.sha256(f"{source.dist.version} {digest_of(files)}".encode()).hexdigest()
        return MethodCode(name, digest, source.dist.name, source.dist.version)


def plugins_of(spec: RunSpec) -> list[Registered]:
    """The plug-ins that ``spec`` names beside its methods and that do not come with fedbench."""
    named = {
        "data set": [spec.dataset],
        "partition": [spec.scenario.partition],
        "backbone": [spec.backbone, spec.teacher, spec.text_encoder],
        "text encoder": [spec.text_encoder],
        "metric": spec.metrics,
    }
    plugins: list[Registered] = []
    for kind, texts in named.items():
        names = [parted(kind, text.partition("?")[0])[0] for text in texts]
        plugins += strangers(kind, list(dict.fromkeys(names))).values()
    return plugins


def harness_hash() -> str:
    """sha256 over what can change the numbers of every run: fedbench's modules and tables, and versions of libraries.

    FedbenchError where a source cannot be read.
    """
    root = PACKAGE
    files = {name: path for name, path in files_under(root) if path.suffix in (".py", ".json")}
    return hashlib.sha256(f"{sorted(versions().items())!r}{digest_of(files)}".encode()).hexdigest()


def code_hash(plugin_files: Sequence[Path] = ()) -> str:
    """sha256 over all code that a command can reach: the harness, every package with plug-ins, the plugin files."""
    packages = {top: root for top, root in roots().items() if top != "fedbench"}
    files = dict(file for root in packages.values() for file in files_under(root)) | files_beside(plugin_files)
    return hashlib.sha256(f"{harness_hash()}{digest_of(files)}".encode()).hexdigest()


def files_beside(plugin_files: Iterable[Path]) -> dict[str, Path]:
    """The plugin files, the n-th in a folder ``--plugin/n`` since two may be called the same, and what they import."""
    files: dict[str, Path] = {}
    for number, plugin in enumerate(plugin_files):
        imported = with_imports(plugin, plugin.parent)
        files |= {name: path for name, path in imported.items() if path != plugin}
        files[f"{PLUGIN}/{number}/{plugin.name}"] = plugin
    return files


def digest_of_code(definitions: Iterable[type | FunctionType]) -> str:
    """sha256 over the files in which these classes and functions of a program, and their bases, are defined.

    Another one each time where one is in no file, as in a notebook: nothing tells whether it is as it was.
    """
    digests: set[str] = set()
    for definition in (base for each in definitions for base in getattr(each, "__mro__", (each,))):
        top = definition.__module__.partition(".")[0]
        if top not in _HASHED_BY_VERSION and top not in sys.stdlib_module_names:
            file = _file_of(definition)
            digests.add(uuid.uuid4().hex if file is None else _digest_of_file(file, definition.__module__))
    return hashlib.sha256("\n".join(sorted(digests)).encode()).hexdigest()


def _file_of(definition: type | FunctionType) -> Path | None:
    file = getattr(sys.modules.get(definition.__module__), "__file__", None)
    return Path(file) if file is not None and Path(file).is_file() else None


def _digest_of_file(file: Path, module: str = "") -> str:
    """Hash of a plug-in file, or of the file of a ``module`` that may lie in a package."""
    above = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    root = file.parents[len(above) - 1] if above else file.parent
    return digest_of(with_imports(file, root, above[0] if above else ""))


def with_imports(file: Path, root: Path, package: str = "") -> dict[str, Path]:
    """``file`` and the modules that it imports, and they in turn: path from ``root``, or from around a package -> file.

    ``root`` is the folder of ``package``, or one in which modules lie. Followed are modules below ``root`` and those of
    packages that register plug-ins. FedbenchError where a file cannot be read.
    """
    others = {top: place for top, place in roots().items() if place.is_dir() and top not in (package, "fedbench")}
    files: dict[str, Path] = {}
    waiting = [(file, root, package)]
    while waiting:
        path, base, top = waiting.pop()
        name = path.relative_to(base).as_posix()
        name = f"{top}/{name}" if top != package else name
        if name not in files:
            files[name] = path
            waiting += _imports(path, base, top, others)
    return files


def _imports(file: Path, root: Path, package: str, others: Mapping[str, Path]) -> Iterator[tuple[Path, Path, str]]:
    """The modules that the code of ``file`` imports, and the packages around them; each with its root and package.

    Of a file in no package also the files beside it that its strings name.
    """
    if file.suffix != ".py":
        return
    try:
        # no syntax tree: before Python 3.11.8 two threads that make one at a time fail
        waiting: list[object] = [compile(file.read_bytes(), str(file), "exec", dont_inherit=True)]
    except OSError as error:
        raise unreadable(file, error) from error
    except (SyntaxError, ValueError):
        return  # whoever imports it says so
    above = package.split(".") if package else []
    while waiting:
        code = waiting.pop()
        if isinstance(code, str) and not package and _is_file_name(code) and (root / code).is_file():
            yield root / code, root, package
        if not isinstance(code, CodeType):
            continue
        waiting += code.co_consts
        steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
        for number, step in enumerate(steps):
            if step.opname != "IMPORT_NAME":
                continue
            level, names = steps[number - 2].argval, steps[number - 1].argval or ()
            start = [*above, *file.relative_to(root).parts[:-level]] if level else []
            base = [*start, *filter(None, step.argval.split("."))]
            for parts in [base, *([*base, name] for name in names)]:
                if parts and parts[0] in others:
                    yield from _modules(others[parts[0]], parts[1:], parts[0])
                elif parts[: len(above)] == above:
                    yield from _modules(root, parts[len(above) :], package)


def _is_file_name(text: str) -> bool:
    path = Path(text)
    return 0 < len(text) < _LONGEST_NAME and "\0" not in text and not path.is_absolute() and ".." not in path.parts


def _modules(root: Path, inside: Sequence[str], package: str) -> Iterator[tuple[Path, Path, str]]:
    """The files of the module ``inside`` a package and of the packages around it."""
    for end in range(0 if package else 1, len(inside) + 1):
        module = root.joinpath(*inside[:end])
        for path in (module.with_suffix(".py"), module / "__init__.py"):
            if path.is_file() and path.is_relative_to(root):
                yield path, root, package
