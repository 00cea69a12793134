"""Find methods, build one plugin manager for one run, refuse stacks that clash, and say who answers which hook."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, cast

import pluggy

from fedbench.defaults import FedAvg
from fedbench.errors import FedbenchError, unknown_name
from fedbench.hookspecs import Hooks, HookSpecs, Method, plugin_manager, relay
from fedbench.hyper import build_params
from fedbench.spec import stack_names

GROUP = "fedbench.methods"
_LIST_HINT = "See `fedbench list methods`."
HOOK_NAMES = tuple(name for name in vars(HookSpecs) if not name.startswith("_"))


@dataclass(frozen=True)
class Assembly:
    """One run's plugins: ``hooks`` to call, and ``owners``, hook name -> who answers it, in call order."""

    hooks: Hooks
    owners: Mapping[str, str]


def method_names(plugin_files: Iterable[Path] = ()) -> list[str]:
    """The names of all registered methods, without importing the installed ones."""
    return sorted({*_entry_points(), *_from_files(plugin_files)})


def find_method(name: str, plugin_files: Iterable[Path] = ()) -> type[Method]:
    """The method class registered as ``name`` in the entry-point group ``fedbench.methods``, or in a plugin file.

    Raises FedbenchError for an unknown name, a plugin that cannot be imported, or a class that lacks attributes.
    """
    from_files = _from_files(plugin_files)
    if name in from_files:
        return from_files[name]
    known = _entry_points()
    if name not in known:
        raise unknown_name("method", name, {*known, *from_files}, _LIST_HINT)
    point = known[name]
    try:
        loaded = point.load()
    except Exception as error:
        raise FedbenchError(f"method {name!r} ({point.value}) cannot be imported: {error!r}; reinstall it.") from error
    _check_class(loaded, point.value)
    if loaded.name != name:
        raise FedbenchError(f"{point.value} calls itself {loaded.name!r} but is registered as {name!r}.")
    return cast(type[Method], loaded)


def source_of(name: str, plugin_files: Iterable[Path] = ()) -> Path | EntryPoint:
    """What the method is found by: the plugin file that defines it, or its entry point. Imports no installed one."""
    of_files = {cls.name: path for path in plugin_files for cls in load_plugin_file(path)}
    known = _entry_points()
    if name not in {*of_files, *known}:
        raise unknown_name("method", name, {*known, *of_files}, _LIST_HINT)
    return of_files.get(name) or known[name]


def assemble(
    method: str,
    params: Mapping[str, Mapping[str, Any]],
    plugin_files: Iterable[Path] = (),
    listeners: Sequence[object] = (),
) -> Assembly:
    """The plugin manager of one run of the stack ``method``, hyper-parameters checked.

    ``listeners`` are plugins that only answer notifications. Raises FedbenchError for an unknown method or
    hyper-parameter, a value out of range, and two methods that answer the same first-result hook.
    """
    stack = stack_names(method)
    strangers = sorted(set(params) - set(stack) - {"fedavg"})
    if strangers:
        raise FedbenchError(
            f"hyper-parameters are given for {', '.join(strangers)}, which is not in the run's stack {method!r}."
        )
    manager = plugin_manager()
    for listener in listeners:
        manager.register(listener)
    for name in reversed(stack):
        if name != "fedavg":
            cls = find_method(name, plugin_files)
            manager.register(cls(build_params(name, cls.Params, params.get(name, {}))), name)
    # Of several trylast answers pluggy calls the last registered last: so the defaults, which are trylast, go in after
    # the methods, and even a method marked trylast is asked before them.
    defaults = FedAvg(build_params("fedavg", FedAvg.Params, params.get("fedavg", {})))
    manager.register(defaults, "fedavg")
    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise FedbenchError(f"{method}: {error}; hooks are {', '.join(HOOK_NAMES)}.") from error
    defaults.replaced = _replacements(manager, method)
    return Assembly(relay(manager), _owner_table(manager))


def _replacements(manager: pluggy.PluginManager, method: str) -> dict[str, str]:
    """First-result hook -> the one method that answers it before the defaults; two of them are a clash."""
    replaced = {}
    for hook in HOOK_NAMES:
        caller = getattr(manager.hook, hook)
        if not caller.spec.opts["firstresult"]:
            continue
        owners = [i.plugin_name for i in caller.get_hookimpls() if not i.hookwrapper and not i.wrapper]
        methods = sorted(name for name in owners if name != "fedavg")
        if len(methods) > 1:
            raise FedbenchError(
                f"the stack {method!r} clashes: {' and '.join(methods)} both answer the hook {hook}; "
                "run them as separate rows."
            )
        if methods:
            replaced[hook] = methods[0]
    return replaced


def _owner_table(manager: pluggy.PluginManager) -> dict[str, str]:
    table = {}
    for hook in HOOK_NAMES:
        named = [i.plugin_name for i in reversed(getattr(manager.hook, hook).get_hookimpls())]
        methods = [name for name in named if not name.isdigit()]
        if methods:
            table[hook] = ", ".join(methods)
    return table


def _entry_points() -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        other = found.get(point.name)
        if other is not None and other.value != point.value:
            raise FedbenchError(
                f"two plugins are registered as {point.name!r}: {other.value} and {point.value}; uninstall one."
            )
        found[point.name] = point
    return found


def _from_files(paths: Iterable[Path]) -> dict[str, type[Method]]:
    found: dict[str, type[Method]] = {}
    for path in paths:
        for cls in load_plugin_file(path):
            if cls.name == "fedavg":
                raise FedbenchError(f"plugin file {str(path)!r} names its method 'fedavg', the defaults' own name.")
            found[cls.name] = cls
    return found


def load_plugin_file(path: Path) -> list[type[Method]]:
    """The method classes defined in a Python file (``--plugin file.py``), for methods in development."""
    if not path.is_file():
        raise FedbenchError(f"plugin file {str(path)!r} does not exist; give the path of a Python file.")
    module_name = f"fedbench_plugin_{path.stem}"
    module = sys.modules.get(module_name)
    if module is None or getattr(module, "__file__", None) != str(path):
        location = importlib.util.spec_from_file_location(module_name, path)
        if location is None or location.loader is None:
            raise FedbenchError(f"plugin file {str(path)!r} is not a Python file; its name must end in .py.")
        module = importlib.util.module_from_spec(location)
        # dataclasses look their module up in sys.modules while the file is being executed
        sys.modules[module_name] = module
        try:
            location.loader.exec_module(module)
        except Exception as error:
            del sys.modules[module_name]
            raise FedbenchError(f"plugin file {str(path)!r} cannot be imported: {error!r}.") from error
    classes = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module_name]
    methods = [c for c in classes if hasattr(c, "name") and hasattr(c, "Params")]
    if not methods:
        raise FedbenchError(f"plugin file {str(path)!r} defines no method: no class with `name` and `Params`.")
    for cls in methods:
        _check_class(cls, str(path))
    return cast(list[type[Method]], methods)


def _check_class(cls: object, where: str) -> None:
    missing = [a for a in ("name", "citation", "Params", "recipe") if not hasattr(cls, a)]
    if not isinstance(cls, type) or missing:
        what = f"lacks {', '.join(missing)}" if isinstance(cls, type) else "is not a class"
        raise FedbenchError(f"plugin {where} {what}; a method is a class with name, citation, Params and recipe.")
