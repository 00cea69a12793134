"""The base of plug-ins of all kinds but methods: a name, parameters, and a docstring that describes them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

from fedbench.core.errors import FedbenchError, unknown_name
from fedbench.core.method.base import NoParams, name_params
from fedbench.core.method.hyper import declared, parse_value

P = TypeVar("P")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
OF_FAMILY = re.compile(rf"({NAME.pattern}:)?{NAME.pattern}")
"""The name of a backbone, which may have a family in front, as in ``clip:embedded``."""
LONGEST_NAME = 100


class Plugin(Generic[P]):
    """A plug-in with parameters of the type ``P``, its `Params`, which are typed behind its name: ``name?width=8``.

    The docstring's first paragraph is what `fedbench list` says of it.
    """

    kind: ClassVar[str]
    """The kind of plug-in, a key of `fedbench.kinds.registry.GROUPS`."""
    name: ClassVar[str]
    """Letters, digits, hyphens and underscores. A backbone's name may have two such parts, as in ``clip:embedded``."""
    location: ClassVar[str | None] = None
    """The word for what follows the colon behind the name (``FILE``); None where nothing may follow."""
    Params: ClassVar[type] = NoParams
    """A frozen dataclass of ``hyper(...)`` fields, or `Options`: the ``P`` that a class names after its base."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        name_params(cls, Plugin)

    def __init__(self, params: P) -> None:
        self.params = params

    @classmethod
    def description(cls) -> str:
        """The docstring's first paragraph, on one line."""
        return " ".join(inspect.cleandoc(cls.__doc__ or "").partition("\n\n")[0].split())

    @classmethod
    def options(cls) -> tuple[str, ...]:
        """The names of the options that may follow the question mark."""
        return tuple(declared(cls.Params))

    @classmethod
    def _is_of_harness(cls) -> bool:
        """Whether its name is one that the harness keeps for itself."""
        return False

    @classmethod
    def usage(cls) -> str:
        """The name as it is typed, without options."""
        return cls.name if cls.location is None else f"{cls.name}:{cls.location}"


AnyPlugin = Plugin[Any]


def check_plugin(cls: object, kind: str, where: str) -> None:
    """Raise FedbenchError, which begins with ``where`` the class comes from, unless it is a plug-in of ``kind``."""
    if not isinstance(cls, type) or not issubclass(cls, Plugin) or getattr(cls, "kind", None) != kind:
        raise FedbenchError(f"plugin {where} is no {kind}; derive it from fedbench.api.{BASES[kind]}.")
    name, allowed = getattr(cls, "name", None), OF_FAMILY if kind == "backbone" else NAME
    if not isinstance(name, str) or not allowed.fullmatch(name) or len(name) > LONGEST_NAME:
        raise FedbenchError(
            f"plugin {where}, class {cls.__name__}: name={name!r} cannot be a name; use up to {LONGEST_NAME} letters "
            "(a-z), digits, hyphens and underscores, a letter or digit first."
        )
    if cls._is_of_harness():
        raise FedbenchError(
            f"plugin {where}, class {cls.__name__}: name={name!r} is as the harness calls {kind}s of its own; give it "
            "another."
        )
    if not cls.description():
        raise FedbenchError(f"plugin {where}, class {cls.__name__}: no docstring; say in it what {name} is.")
    lacking = [name for name in dir(cls) if getattr(getattr(cls, name, None), "__isabstractmethod__", False)]
    if lacking:
        raise FedbenchError(f"plugin {where}, class {cls.__name__}: no {' and no '.join(lacking)}; define it.")
    try:
        declared(cls.Params)
    except FedbenchError as error:
        raise FedbenchError(f"plugin {where}, class {cls.__name__}: {error}") from error


BASES = {
    "data set": "DatasetSource",
    "partition": "Partition",
    "backbone": "BackboneFamily",
    "text encoder": "TextEncoder",
    "metric": "Metric",
}
"""Kind -> the class in `fedbench.api` that a plug-in of it derives from."""


def taken_apart(text: str) -> tuple[str, str | None, dict[str, str]]:
    """Name, location (None without a colon) and options of ``name[:location][?option=value&...]``."""
    head, question, tail = text.partition("?")
    name, colon, location = head.partition(":")
    options: dict[str, str] = {}
    for part in tail.split("&") if question else ():
        option, _, value = part.partition("=")
        if not option or not value:
            raise FedbenchError(f"{text!r}: {part!r} is not option=value; type {name}?option=value&...")
        if option in options:
            raise FedbenchError(f"{text!r}: option {option!r} is given twice; keep one of them.")
        options[option] = value
    return name, location if colon else None, options


def made(cls: type[AnyPlugin], location: str | None, options: Mapping[str, str], text: str) -> tuple[AnyPlugin, str]:
    """The plug-in with ``options`` for its parameters, and its location. FedbenchError for what it does not take."""
    listing = f"See fedbench list {listed_as(cls.kind)}."
    if cls.location is None and location is not None:
        where = "its name" if ":" in cls.name else "the colon"
        raise FedbenchError(f"{cls.kind} {text!r}: nothing can follow {where}; type {cls.name!r}. {listing}")
    if cls.location is not None and not location:
        raise FedbenchError(f"{cls.kind} {text!r} is incomplete: type {cls.usage()}. {listing}")
    for option, value in options.items():
        if not cls.options():
            raise FedbenchError(f"{cls.kind} {cls.name!r} takes no options, got {f'{option}={value}'!r}. {listing}")
        if option not in cls.options():
            raise unknown_name(f"option of {cls.kind} {cls.name!r}", option, cls.options(), listing)
    own = declared(cls.Params)
    return cls(_params(cls, {option: options[option] for option in options if option in own}, text)), location or ""


def _params(cls: type[AnyPlugin], values: Mapping[str, str], text: str) -> Any:
    if hasattr(cls.Params, "model_fields"):
        from fedbench.kinds.options import read_options  # with pydantic

        return read_options(cls.Params, values, f"{cls.kind} {text!r}")
    known = declared(cls.Params)
    return cls.Params(**{name: parse_value(f"{cls.name}?{name}", known[name], values[name]) for name in values})


def listed_as(kind: str) -> str:
    """The name that `fedbench list` has for the plug-ins of ``kind``."""
    return f"{kind}s".replace("data sets", "datasets").replace(" ", "-")
