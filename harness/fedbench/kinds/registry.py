"""Plug-ins by kind and name: those of installed packages, of plug-in files (``--plugin FILE``) and of a program.

Methods are one of the seven kinds. Installed plug-ins are known by their entry points; `Registered.load` imports one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from fedbench.core.errors import FedbenchError, reason_of, shortened, unknown_name
from fedbench.kinds.base import AnyPlugin, Plugin, check_plugin, listed_as, made, taken_apart

if TYPE_CHECKING:
    from fedbench.core.method.base import AnyMethod

METHOD = "method"
GROUPS = {
    METHOD: "fedbench.methods",
    "data set": "fedbench.datasets",
    "partition": "fedbench.partitions",
    "backbone": "fedbench.backbones",
    "text encoder": "fedbench.text_encoders",
    "metric": "fedbench.metrics",
    "suite": "fedbench.suites",
}
"""Kind of plug-in -> the group of entry points that a package registers it in."""
OBJECT = "object"
"""First part of the names of a program's own data sets, partitions and backbones: ``object:NAME``."""
IN_NO_FILE = "(in no file)"
"""Stands behind the name of a class of a notebook or prompt: nothing tells whether its code changed."""
PLUGIN_FILES: ContextVar[tuple[Path, ...]] = ContextVar("PLUGIN_FILES", default=())
"""Files whose plug-ins are found everywhere; see `plugins_everywhere`."""
_OWN: dict[tuple[str, str], type] = {}
_LONGEST_REASON = 500


@dataclass(frozen=True)
class Registered:
    """A plug-in that is known by name; `load` imports it."""

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
        """The plug-in's source, for errors."""
        if isinstance(self.source, Path):
            return f"the plugin file {str(self.source)!r}"
        if isinstance(self.source, type):
            return f"the class {self.source.__qualname__} of this program"
        dist = self.source.dist
        return f"{self.source.value} of the package {'unknown' if dist is None else dist.name}"

    def load(self) -> type[Any]:
        """Its class. FedbenchError where it cannot be imported, or is no plug-in of its kind and name."""
        if isinstance(self.source, Path):
            return _of_file(self.source, self.kind)[self.name]
        if isinstance(self.source, type):
            return self.source
        with importing(f"{self.kind} {self.name!r} ({self.source.value})", "reinstall it"):
            loaded = self.source.load()
        _check(loaded, self.kind, self.source.value)
        if loaded.name != self.name:
            raise FedbenchError(f"{self.source.value} calls itself {loaded.name!r} but is registered as {self.name!r}.")
        return cast(type[Any], loaded)


def registered(kind: str, plugin_files: Iterable[Path] = ()) -> dict[str, Registered]:
    """The plug-ins of ``kind`` by name; those of ``plugin_files`` too. Imports no installed one.

    Of several with one name it has the first: `find` refuses that name.
    """
    return {name: alike[0] for name, alike in _candidates(kind, plugin_files).items()}


def find(kind: str, name: str, hint: str = "", plugin_files: Iterable[Path] = ()) -> type[Any]:
    """The class of the plug-in of ``kind`` called ``name``.

    FedbenchError for an unknown name, with the nearest ones; for a name that two have; and for a class that cannot be
    imported or is no plug-in of its kind.
    """
    return look_up(kind, name, hint, plugin_files).load()


def look_up(kind: str, name: str, hint: str = "", plugin_files: Iterable[Path] = ()) -> Registered:
    """The plug-in that `find` loads, without importing an installed one."""
    known = _candidates(kind, plugin_files)
    if name == OBJECT and name not in known:
        raise FedbenchError(
            f"a {kind} called {OBJECT}:... was an object of a Python program, which no name brings back; give that "
            "object to fedbench.run once more."
        )
    if name not in known:
        hint = hint or f"See `fedbench list {listed_as(kind)}`."
        raise unknown_name(kind, name, known, hint, hint_lists=kind == METHOD)
    first, *others = known[name]
    for other in others:
        if not _is_copy(other, first):
            files = sum(isinstance(one.source, Path) for one in (first, other))
            remedy = ("uninstall one", "rename yours, or leave --plugin out", "rename one")[files]
            sources = f"{first.described_source} and {other.described_source}"
            raise FedbenchError(f"two {kind}s are called {name!r}: {sources}; {remedy}.")
    # a file that is a copy of the installed plug-in's module is that module in development
    return others[-1] if others else first


def find_method(name: str, plugin_files: Iterable[Path] = ()) -> type[AnyMethod]:
    """The class of the method ``name``; see `find`."""
    return cast("type[AnyMethod]", find(METHOD, name, plugin_files=plugin_files))


def method_names(plugin_files: Iterable[Path] = ()) -> list[str]:
    """The names of all methods, without importing the installed ones."""
    return sorted(registered(METHOD, plugin_files))


def build(kind: str, text: str) -> tuple[AnyPlugin, str]:
    """The plug-in that ``name[:location][?option=value&...]`` stands for, and the location ("" for none)."""
    name, location, options = parted(kind, text)
    return made(find(kind, name), location, options, text)


def parted(kind: str, text: str) -> tuple[str, str | None, dict[str, str]]:
    """`taken_apart`, except that a registered name with a colon (``clip:embedded``) is a name without a location."""
    name, location, options = taken_apart(text)
    if location:
        inner, *rest = re.split("[:@]", location, maxsplit=1)
        if f"{name}:{inner}" in registered(kind):
            return f"{name}:{inner}", rest[0] if rest else None, options
    return name, location, options


def strangers(kind: str, names: Collection[str]) -> Mapping[str, Registered]:
    """Registered plug-ins among ``names`` whose code is not part of the harness.

    Objects of a program (``object:NAME-HASH``) are left out: the hash in the name identifies them.
    """
    known = registered(kind)
    mentioned = [known[name] for name in names if name in known and name != OBJECT]
    return {one.name: one for one in mentioned if not is_harness(one.source)}


def is_harness(source: EntryPoint | Path | type) -> bool:
    """Whether a plug-in is part of the harness itself, whose code counts with every run."""
    return not isinstance(source, Path | type) and source.module.partition(".")[0] == "fedbench"


def comes_with_fedbench(source: EntryPoint | Path | type) -> bool:
    """Whether a plug-in is of the distribution that fedbench itself comes in."""
    return not isinstance(source, Path | type) and source.dist is not None and source.dist.name in _own_distributions()


def _own_distributions() -> set[str]:
    return {point.dist.name for point in installed(METHOD) if is_harness(point) and point.dist is not None}


def _candidates(kind: str, plugin_files: Iterable[Path]) -> dict[str, list[Registered]]:
    """Different plug-ins by name. A program's own method replaces all others: it was checked when it was passed in."""
    files = dict.fromkeys((*plugin_files, *PLUGIN_FILES.get()))
    every = [Registered(kind, point.name, point) for point in installed(kind)]
    every += [Registered(kind, name, file) for file in files for name in _of_file(file, kind)]
    every += [Registered(kind, name, cls) for (of, name), cls in _OWN.items() if of == kind]
    by_name: dict[str, list[Registered]] = {}
    for plugin in every:
        alike = by_name.setdefault(plugin.name, [])
        if kind == METHOD and isinstance(plugin.source, type):
            alike[:] = [plugin]
        elif _value(plugin) not in map(_value, alike):
            alike.append(plugin)
    return by_name


def _value(plugin: Registered) -> str:
    return str(plugin.source) if isinstance(plugin.source, Path | type) else plugin.source.value


def _is_copy(of_file: Registered, plugin: Registered) -> bool:
    """Whether ``of_file`` is from a plug-in file that is the module of the installed ``plugin``, or a copy of it."""
    if not isinstance(of_file.source, Path) or isinstance(plugin.source, Path | type):
        return False
    try:
        spec = importlib.util.find_spec(plugin.source.module)
        content = of_file.source.read_bytes()
        return spec is not None and spec.origin is not None and Path(spec.origin).read_bytes() == content
    except (ImportError, OSError):
        return False


# --- installed packages


def installed(kind: str) -> tuple[EntryPoint, ...]:
    """The entry points of plug-ins of that kind, of all packages on the path; imports none of them.

    Reading them takes some 25 ms, so they are read again only after a folder on the path has changed.
    """
    return _read(tuple((folder, _changed(folder or ".")) for folder in sys.path)).get(kind, ())


def installed_plugins() -> tuple[EntryPoint, ...]:
    """The entry points of plug-ins of all kinds, methods first."""
    return tuple(point for kind in GROUPS for point in installed(kind))


def _changed(folder: str) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return 0


@lru_cache(maxsize=1)
def _read(path: tuple[tuple[str, int], ...]) -> Mapping[str, tuple[EntryPoint, ...]]:
    every = entry_points()
    return {kind: tuple(every.select(group=group)) for kind, group in GROUPS.items()}


# --- plug-in files


@contextmanager
def plugins_everywhere(plugin_files: Iterable[Path]) -> Iterator[None]:
    """Within the block the plug-ins of ``plugin_files`` are found everywhere."""
    token = PLUGIN_FILES.set(tuple(dict.fromkeys((*PLUGIN_FILES.get(), *plugin_files))))
    try:
        yield
    finally:
        PLUGIN_FILES.reset(token)


def load_plugin_file(path: Path) -> list[type[AnyMethod]]:
    """The method classes that a Python file defines. FedbenchError for a file that defines no plug-in of any kind."""
    return list(_of_file(path, METHOD).values())


def _of_file(path: Path, kind: str) -> dict[str, type[Any]]:
    classes = [cls for cls in _classes_of(path) if _kind_of(cls)]
    if not classes:
        raise FedbenchError(
            f"plugin file {str(path)!r} defines no method: no class with `name` and `Params`; and no other plug-in."
        )
    known: dict[str, type[Any]] = {}
    for cls in classes:
        if _kind_of(cls) != kind:
            continue
        _check(cls, kind, f"file {str(path)!r}")
        if kind == METHOD and cls.name == "fedavg":
            raise FedbenchError(f"plugin file {str(path)!r} names its method 'fedavg', the defaults' own name.")
        other = known.setdefault(cls.name, cls)
        if other is not cls:
            raise FedbenchError(
                f"plugin file {str(path)!r}: {other.__name__} and {cls.__name__} are both called {cls.name!r}; "
                "rename one."
            )
    return known


def _kind_of(cls: type[Any]) -> str:
    """The kind of plug-in that a class of a file is; "" for none, or for a base class without a name of its own."""
    if issubclass(cls, Plugin):
        return getattr(cls, "kind", "") if "name" in vars(cls) else ""
    return METHOD if hasattr(cls, "name") and hasattr(cls, "Params") else ""


def _check(cls: Any, kind: str, where: str) -> None:
    if kind == METHOD:
        from fedbench.kinds.methods import check_method  # imports torch

        check_method(cls, where)
    else:
        check_plugin(cls, kind, where)


def _classes_of(path: Path) -> list[type[Any]]:
    """The classes that the file defines, in its order, each once; it is run when it is first read."""
    module = _module(path)
    return list({c: None for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__})


def _module(path: Path) -> ModuleType:
    if not path.is_file():
        raise FedbenchError(f"plugin file {str(path)!r} does not exist; give the path of a Python file.")
    # two files may have one name
    name = f"fedbench_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    module = sys.modules.get(name)
    if module is not None:
        return module
    location = importlib.util.spec_from_file_location(name, path)
    if location is None or location.loader is None:
        raise FedbenchError(f"plugin file {str(path)!r} is not a Python file; its name must end in .py.")
    module = importlib.util.module_from_spec(location)
    # dataclasses look their module up in sys.modules while the file is being executed
    sys.modules[name] = module
    try:
        with importing(f"plugin file {str(path)!r}", "mend it"):
            location.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


@contextmanager
def importing(what: str, remedy: str) -> Iterator[None]:
    """Raise FedbenchError, which names ``what`` and the ``remedy``, for anything that the block raises.

    A module may raise SystemExit as well (a script without a main guard). A KeyboardInterrupt is somebody's Ctrl-C, and
    passes.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        reason = shortened(reason_of(error), _LONGEST_REASON)
        raise FedbenchError(f"{what} cannot be imported: {reason}; {remedy}.") from error


# --- objects of a program


@contextmanager
def own_plugins(given: Mapping[tuple[str, str], type]) -> Iterator[None]:
    """Within the block the classes that a program brings are known by kind and name, in every thread."""
    before = dict(_OWN)
    _OWN.update(given)
    try:
        yield
    finally:
        _OWN.clear()
        _OWN.update(before)


def own(kind: str) -> dict[str, type]:
    """The program's own plug-ins of one kind that are registered now, by name."""
    return {name: cls for (of, name), cls in _OWN.items() if of == kind}
