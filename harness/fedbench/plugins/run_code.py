"""The code of a run: the harness, and of each method of its stack what that is made of. What resuming relies on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path

from fedbench.core.spec import RunSpec, stack_names
from fedbench.core.version import PACKAGE
from fedbench.kinds.registry import (
    METHOD,
    OBJECT,
    Registered,
    installed,
    installed_plugins,
    is_harness,
    look_up,
    parted,
    plugins_everywhere,
    strangers,
)
from fedbench.plugins.own_code import digest_of_code
from fedbench.plugins.provenance import roots, versions
from fedbench.plugins.sources import PLUGIN, digest_of, files_of, files_of_all, files_under


@dataclass(frozen=True)
class MethodCode:
    """The code of one method or other plug-in: its module, what that imports of its own, the data beside them."""

    method: str
    """Its name; of a plug-in of another kind, kind and name."""
    hash: str
    package: str = ""
    """The distribution it comes in; "" for those that come with fedbench, and for a plugin file."""
    version: str = ""
    """Of the package."""
    plugin: str = ""
    """Name of the ``--plugin`` file; ``object:CLASS`` of a class that a program brought."""

    def as_json(self) -> dict[str, str]:
        """What there is to say of it, by name."""
        return {name: value for name, value in asdict(self).items() if value}


@dataclass(frozen=True)
class RunCode:
    """The code that makes a run."""

    harness: str
    """Hash of fedbench's sources and of the versions that it runs on."""
    methods: tuple[MethodCode, ...] = ()
    """Of the stack, in its order; not the defaults, which are the harness's."""

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
        names = stack_names(stack)
        self._methods |= {name: self._of_method(name) for name in names if name not in self._methods}
        found = [self._methods[name] for name in names]
        for one in plugins:
            name = f"{one.kind} {one.name}"
            if name not in self._methods:
                self._methods[name] = self._of_source(name, one.source)
            found.append(self._methods[name])
        return RunCode(self.harness, tuple(code for code in found if code is not None))

    def of_run(self, spec: RunSpec) -> RunCode:
        """The code of ``spec``: its methods', and that of whatever else it names that does not come with fedbench."""
        with plugins_everywhere(self._plugin_files):
            return self.of(spec.method, plugins_of(spec))

    @cached_property
    def harness(self) -> str:
        """Hash of the harness, which is in the code of every run."""
        return harness_hash()

    @cached_property
    def everything(self) -> str:
        """`code_hash` with the plugin files."""
        return code_hash(self._plugin_files)

    @cached_property
    def plugins(self) -> tuple[dict[str, str], ...]:
        """Name and hash of every plugin file, whether a run uses it or not."""
        return tuple(
            {"plugin": file.name, "hash": digest_of(files_of(file, self._registering))} for file in self._plugin_files
        )

    @cached_property
    def _registering(self) -> frozenset[str]:
        return frozenset(roots())

    @cached_property
    def _ours(self) -> frozenset[str]:
        """The distribution that fedbench itself comes in."""
        points = [point for point in installed(METHOD) if is_harness(point)]
        return frozenset(point.dist.name for point in points if point.dist is not None)

    def _of_method(self, name: str) -> MethodCode | None:
        """None for a method of the harness's own."""
        return self._of_source(name, look_up(METHOD, name, plugin_files=self._plugin_files).source)

    def _of_source(self, name: str, source: Path | EntryPoint | type) -> MethodCode | None:
        if isinstance(source, type):
            return MethodCode(name, digest_of_code([source]), plugin=f"{OBJECT}:{source.__qualname__}")
        if isinstance(source, Path):
            return MethodCode(name, digest_of(files_of(source, self._registering)), plugin=source.name)
        if is_harness(source):
            return None
        digest = digest_of(files_of(source.module, self._registering, source.dist))
        if source.dist is None or source.dist.name in self._ours:
            return MethodCode(name, digest)
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
    found: list[Registered] = []
    for kind, texts in named.items():
        names = [parted(kind, text.partition("?")[0])[0] for text in texts]
        found += strangers(kind, list(dict.fromkeys(names))).values()
    return found


def harness_hash() -> str:
    """sha256 over what can change the numbers of every run: fedbench's modules and tables, and versions of libraries.

    FedbenchError where a source cannot be read.
    """
    root = PACKAGE
    files = {name: path for name, path in files_under(root) if path.suffix in (".py", ".json")}
    return hashlib.sha256(f"{sorted(versions().items())!r}{digest_of(files)}".encode()).hexdigest()


def code_hash(plugin_files: Iterable[Path] = ()) -> str:
    """sha256 over all code that a command can reach: the harness, every registered method, the plugin files."""
    return hashlib.sha256(f"{harness_hash()}{digest_of(files_beside(plugin_files))}".encode()).hexdigest()


def files_beside(plugin_files: Iterable[Path] = ()) -> dict[str, Path]:
    """The files of every registered method and plugin file, by the names under which a worker is sent them.

    Those of the n-th plugin file and of the data beside it are in the folder ``--plugin/n``, since two may be called
    the same.
    """
    registering = frozenset(roots())
    points = [point for point in installed_plugins() if not is_harness(point)]
    modules: dict[Distribution | None, list[str]] = {}
    for point in points:
        modules.setdefault(point.dist, []).append(point.module)
    found: dict[str, Path] = {}
    for distribution, starts in modules.items():
        found |= files_of_all(starts, registering, distribution)
    for number, plugin in enumerate(plugin_files):
        for name, path in files_of(plugin, registering).items():
            inner = name.removeprefix(f"{PLUGIN}/")
            found[name if inner == name else f"{PLUGIN}/{number}/{inner}"] = path
    return found
