"""Plug-ins by kind and name: those of installed packages, built in or not, and those of plug-in files."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import cast

from fedbench.core.errors import FedbenchError, unknown_name
from fedbench.kinds.base import AnyPlugin, check_plugin, listed_as, made, taken_apart
from fedbench.kinds.files import PLUGIN_FILES, classes_of
from fedbench.kinds.importing import importing
from fedbench.kinds.installed import installed
from fedbench.kinds.own import OBJECT, own


@dataclass(frozen=True)
class Registered:
    """A plug-in that is known by name; it is imported by `load`."""

    kind: str
    name: str
    source: EntryPoint | Path | type
    """Its entry point, the plug-in file, or the class itself where a program brings it."""

    @property
    def origin(self) -> str:
        """The package with its version, or the file's name."""
        if isinstance(self.source, Path):
            return self.source.name
        if isinstance(self.source, type):
            return "this program"
        dist = self.source.dist
        return "unknown" if dist is None else f"{dist.name} {dist.version}"

    @property
    def described_source(self) -> str:
        """What it is found by, for errors."""
        if isinstance(self.source, Path):
            return f"the plugin file {str(self.source)!r}"
        if isinstance(self.source, type):
            return f"the class {self.source.__qualname__} of this program"
        dist = self.source.dist
        return f"{self.source.value} of the package {'unknown' if dist is None else dist.name}"

    def load(self) -> type[AnyPlugin]:
        """Its class. FedbenchError where it cannot be imported, or is no plug-in of its kind and name."""
        if isinstance(self.source, Path):
            return _of_file(self.source, self.kind)[self.name]
        if isinstance(self.source, type):
            return cast(type[AnyPlugin], self.source)
        with importing(f"{self.kind} {self.name!r} ({self.source.value})", "reinstall it"):
            loaded = self.source.load()
        check_plugin(loaded, self.kind, self.source.value)
        if loaded.name != self.name:
            raise FedbenchError(f"{self.source.value} calls itself {loaded.name!r} but is registered as {self.name!r}.")
        return cast(type[AnyPlugin], loaded)


def registered(kind: str) -> dict[str, Registered]:
    """The plug-ins of ``kind`` by name, in the order of their packages; imports no installed one.

    FedbenchError for a name that two of them have.
    """
    known: dict[str, Registered] = {}
    found = [Registered(kind, point.name, point) for point in installed(kind)]
    found += [Registered(kind, name, file) for file in PLUGIN_FILES.get() for name in _of_file(file, kind)]
    found += [Registered(kind, name, cls) for name, cls in own(kind).items()]
    for one in found:
        other = known.setdefault(one.name, one)
        if _value(other) != _value(one):
            raise FedbenchError(
                f"two plugins of the kind {kind} are called {one.name!r}: {other.described_source} and "
                f"{one.described_source}; rename one."
            )
    return known


def find(kind: str, name: str, hint: str = "") -> type[AnyPlugin]:
    """The class of the plug-in of ``kind`` called ``name``; an unknown name is answered with the nearest ones."""
    known = registered(kind)
    if name == OBJECT and name not in known:
        raise FedbenchError(
            f"a {kind} called {OBJECT}:... was an object of a Python program, which no name brings back; give that "
            "object to fedbench.run once more."
        )
    if name not in known:
        raise unknown_name(kind, name, known, hint or f"See `fedbench list {listed_as(kind)}`.")
    return known[name].load()


def build(kind: str, text: str) -> tuple[AnyPlugin, str]:
    """The plug-in that ``name[:location][?option=value&...]`` stands for, and the location ("" for none)."""
    name, location, options = parted(kind, text)
    return made(find(kind, name), location, options, text)


def parted(kind: str, text: str) -> tuple[str, str | None, dict[str, str]]:
    """`taken_apart`, where a registered name with a colon in it, as ``clip:embedded``, is no name with a location."""
    name, location, options = taken_apart(text)
    if location:
        inner, *rest = re.split("[:@]", location, maxsplit=1)
        if f"{name}:{inner}" in registered(kind):
            return f"{name}:{inner}", rest[0] if rest else None, options
    return name, location, options


def strangers(kind: str, names: Collection[str]) -> Mapping[str, Registered]:
    """Those of ``names`` that do not come with fedbench itself: their code is no part of the harness.

    Objects of a program are none (``object:NAME-HASH``): what they are is in the hashes of their names.
    """
    known = registered(kind)
    mentioned = [known[name] for name in names if name in known and name != OBJECT]
    return {one.name: one for one in mentioned if not is_harness(one.source)}


def is_harness(source: EntryPoint | Path | type) -> bool:
    """Whether a plug-in is part of the harness itself, whose code counts with every run."""
    return not isinstance(source, Path | type) and source.module.partition(".")[0] == "fedbench"


def _value(one: Registered) -> str:
    return str(one.source) if isinstance(one.source, Path | type) else one.source.value


def _of_file(path: Path, kind: str) -> dict[str, type[AnyPlugin]]:
    found: dict[str, type[AnyPlugin]] = {}
    for cls in classes_of(path):
        if getattr(cls, "kind", None) == kind and "name" in vars(cls):
            check_plugin(cls, kind, f"file {str(path)!r}")
            plugin = cast(type[AnyPlugin], cls)
            if found.setdefault(plugin.name, plugin) is not plugin:
                raise FedbenchError(f"plugin file {str(path)!r}: two classes are called {plugin.name!r}; rename one.")
    return found
