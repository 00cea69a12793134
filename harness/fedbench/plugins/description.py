"""What there is to say of a method, read off its class and kept from one command to the next.

A method has to be imported to be described, and torch with it, which takes seconds. So what the installed methods say
stands beside the harness's byte code, and is made anew when a source of a package that registers methods has changed.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
import typing
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbench.core.errors import FedbenchError
from fedbench.core.files import replacing
from fedbench.core.version import PACKAGE
from fedbench.kinds.registry import METHOD, installed
from fedbench.plugins.provenance import digest_of, files_under, roots

if TYPE_CHECKING:
    from fedbench.core.method.base import AnyMethod
    from fedbench.core.method.hyper import Hyper

Row = tuple[str, ...]


@dataclass(frozen=True)
class Description:
    """A method in words."""

    name: str
    citation: str
    text: str
    """Docstring of its module."""
    role: str
    """What it is in a stack, in words."""
    requires: Row
    prevents: Row
    """What no other method of its stack can require."""
    hooks: tuple[Row, ...]
    """Hook, kind, and what the method does there, in the order in which hooks are called."""
    parameters: tuple[Row, ...]
    """Name, symbol, type, default, range, neutral value and source of each hyper-parameter."""
    searched: Row
    """What tuning searches of each of them, "" for nothing."""
    has_neutral: bool
    """Whether one of them has a neutral value."""
    recipe: str


class Descriptions:
    """Descriptions of the installed methods, and of methods in plugin files, which are never kept on disk."""

    def __init__(self, plugin_files: tuple[Path, ...] = ()) -> None:
        self._plugin_files = plugin_files
        self._place = None if plugin_files else _place()
        self._known = {} if self._place is None else _read(self._place)

    def of(self, name: str) -> Description:
        """The method called ``name``. Raises FedbenchError for an unknown one, and for one that can't be used."""
        if name not in self._known:
            from fedbench.kinds.registry import find_method  # imports torch

            self._known[name] = _described(find_method(name, self._plugin_files))
            if self._place is not None and not sys.dont_write_bytecode:
                _keep(self._place, [one for point in installed(METHOD) if (one := _usable(point.name)) is not None])
        return self._known[name]


def _usable(name: str) -> Description | None:
    from fedbench.kinds.registry import find_method

    try:
        return _described(find_method(name))
    except FedbenchError:  # whoever asks for it is told
        return None


def _place() -> Path:
    every = dict(file for root in roots().values() for file in files_under(root))
    files = {name: path for name, path in every.items() if path.suffix == ".py"}
    points = sorted(f"{point.name} = {point.value}" for point in installed(METHOD))
    digest = hashlib.sha256("\n".join([digest_of(files), *points]).encode()).hexdigest()
    return PACKAGE / "__pycache__" / f"methods-{digest[:32]}.json"


def _read(place: Path) -> dict[str, Description]:
    try:
        content = json.loads(place.read_text(encoding="utf-8"))
        return {name: Description(**{key: _rows(value) for key, value in of.items()}) for name, of in content.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}  # not there, or damaged


def _keep(place: Path, methods: Sequence[Description]) -> None:
    text = json.dumps({method.name: asdict(method) for method in methods})
    with suppress(OSError, FedbenchError):  # where nothing can be written, there is no byte code either
        for older in place.parent.glob("methods-*.json"):
            older.unlink()
        with replacing(place, "descriptions") as file:
            file.write_text(text, encoding="utf-8")


def _rows(value: Any) -> Any:
    return tuple(map(_rows, value)) if isinstance(value, list) else value


def _described(cls: type[AnyMethod]) -> Description:
    from fedbench.core.method.base import ROLES, declares
    from fedbench.core.method.hyper import declared
    from fedbench.plugins.assembly import role_of

    module, parameters = sys.modules.get(cls.__module__), declared(cls.Params)
    return Description(
        cls.name,
        cls.citation,
        inspect.getdoc(module) or inspect.getdoc(cls) or "",
        f"{role_of(cls)}: {ROLES[role_of(cls)]}",
        _worded(declares(cls, "requires")),
        _worded(declares(cls, "prevents")),
        _hooks(cls),
        parameter_rows(cls.Params),
        tuple(_searched(parameter.hyper) for parameter in parameters.values()),
        any(parameter.hyper.neutral is not None for parameter in parameters.values()),
        ", ".join(f"{key}={number(value)}" for key, value in cls.recipe.items()),
    )


def _worded(requirements: Sequence[str]) -> Row:
    from fedbench.core.method.base import REQUIREMENTS

    return tuple(REQUIREMENTS.get(name, name) for name in requirements)


def parameter_rows(params: type) -> tuple[Row, ...]:
    """Name, symbol, type, default, range, neutral value and source of each hyper-parameter of a ``Params`` class."""
    from fedbench.core.method.hyper import declared

    return tuple(
        (name, one.hyper.symbol, _kind(one.type), number(one.default), _range(one.hyper), number(one.hyper.neutral))
        + (one.hyper.source,)
        for name, one in declared(params).items()
    )


def _searched(known: Hyper) -> str:
    searched = known.searched
    if searched is None:
        return ""
    return (" to " if known.choices is None else ", ").join(map(number, searched))


def _hooks(cls: type[AnyMethod]) -> tuple[Row, ...]:
    from fedbench.core.method.hooks import HookSpecs
    from fedbench.kinds.methods import HOOK_NAMES, wraps

    rows = []
    for name in HOOK_NAMES:
        function = getattr(cls, name, None)
        if function is not None and (hasattr(function, "fedbench_impl") or name in wraps(cls)):
            opts: dict[str, Any] = getattr(getattr(HookSpecs, name), "fedbench_spec", {})
            kind = "wrapped" if name in wraps(cls) else "first result" if opts.get("firstresult") else "collected"
            rows.append((name, kind, (inspect.getdoc(function) or "").partition("\n")[0]))
    return tuple(rows)


def _kind(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return "choice"
    return getattr(kind, "__name__", str(kind))


def number(value: object) -> str:
    """A value in a table."""
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _range(known: Hyper) -> str:
    if known.choices is not None:
        return ", ".join(map(number, known.choices))
    if known.low is None and known.high is None:
        return "any"
    bounds = f"{number(known.low)} to {number(known.high)}" if known.high is not None else f">= {number(known.low)}"
    tuned = f", tuned {number(known.search[0])} to {number(known.search[1])}" if isinstance(known.search, tuple) else ""
    return bounds + (" (log)" if known.log else "") + tuned
