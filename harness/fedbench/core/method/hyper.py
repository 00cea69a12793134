"""Hyper-parameters, declared once: the declaration feeds the command line, Optuna, MLflow, the docs and the tests."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from fedbench.core.errors import FedbenchError, unknown_name

T = TypeVar("T")


@dataclass(frozen=True)
class Hyper:
    """The declaration of one hyper-parameter, apart from its default and type."""

    symbol: str
    source: str
    low: float | None = None
    high: float | None = None
    log: bool = False
    choices: tuple[Any, ...] | None = None
    neutral: Any = None
    """The value at which the method equals FedAvg; None where there is none."""
    off: Any = None
    """A further allowed value outside the range that switches the hyper-parameter's term off. It is not searched."""
    search: tuple[float, float] | bool | None = None
    """The range that tuning searches: a narrower one, none (False), all choices (True), or the whole range (None)."""
    when: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    """Other hyper-parameters of the method and the values they must have for this one to have an effect."""

    needs: str = ""
    """Another hyper-parameter of the method. If that one is neutral or off, this one has no effect."""

    @property
    def searched(self) -> tuple[float, float] | tuple[Any, ...] | None:
        """The range, or the choices, that tuning searches; None where it leaves the hyper-parameter alone."""
        if self.choices is not None:
            return self.choices if self.search is True else None
        if isinstance(self.search, tuple):
            return self.search
        return None if self.search is False or self.low is None or self.high is None else (self.low, self.high)

    def allowed(self) -> str:
        """The allowed values in words."""
        beside = [special for special in (self.neutral, self.off) if special is not None]
        return self._ranged() + "".join(f", or {special!r}" for special in beside if not self.in_range(special))

    def _ranged(self) -> str:
        if self.choices is not None:
            return f"one of {', '.join(repr(c) for c in self.choices)}"
        if self.low is not None and self.high is not None:
            return f"between {self.low:g} and {self.high:g}"
        if self.high is not None:
            return f"at most {self.high:g}"
        return "any value" if self.low is None else f"at least {self.low:g}"

    def admits(self, value: Any) -> bool:
        """Whether ``value`` is allowed; the neutral value and the one that is ``off`` are, also outside the range."""
        if not self.is_on(value):
            return True
        return self.in_range(value)

    def is_on(self, value: Any) -> bool:
        """Whether ``value`` is neither neutral nor off."""
        return not any(special is not None and value == special for special in (self.neutral, self.off))

    def in_range(self, value: Any) -> bool:
        """Whether ``value`` lies in the range, or is one of the choices."""
        if self.choices is not None:
            return value in self.choices
        if isinstance(value, float) and not math.isfinite(value):
            return False
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


def hyper(
    default: T,
    *,
    symbol: str,
    source: str,
    low: float | None = None,
    high: float | None = None,
    log: bool = False,
    choices: Sequence[T] | None = None,
    neutral: T | None = None,
    off: T | None = None,
    search: tuple[float, float] | bool | None = None,
    when: Mapping[str, tuple[Any, ...]] | None = None,
    needs: str = "",
) -> T:
    """A field of a method's frozen ``Params`` dataclass.

    ``symbol`` as the paper writes it, ``source`` where default and range come from, ``low`` / ``high`` / ``log`` or
    ``choices`` the range, ``neutral`` the value that turns the method into FedAvg, ``off`` one outside the range that
    switches its term off. A field of type bool or Literal has its choices from its type. Optuna searches the range of a
    number, or the part of it that ``search`` gives, ``when`` other hyper-parameters have the values named and the one
    it ``needs`` is not off; choices (variants, ablations) only with ``search=True``.
    A default outside its own range, or a search outside it, raises ValueError at import.
    """
    given = None if choices is None else tuple(choices)
    declared = Hyper(symbol, source, low, high, log, given, neutral, off, search, dict(when or {}), needs)
    if not declared.admits(default):
        raise ValueError(f"default {default!r} of {symbol} is not {declared.allowed()}")
    if isinstance(search, tuple) and (given is not None or not all(map(declared.in_range, search))):
        raise ValueError(f"search {search!r} of {symbol} is not {declared.allowed()}")
    if isinstance(search, tuple) and search[0] >= search[1]:
        raise ValueError(f"search {search!r} of {symbol} must go from low to high")
    if declared.searched is not None and given is None and log and declared.searched[0] <= 0:
        raise ValueError(f"the log range of {symbol} must lie above 0; a value of 0 is declared as off or neutral")
    return dataclasses.field(default=default, metadata={"hyper": declared})


@dataclass(frozen=True)
class Declared:
    """A hyper-parameter of a ``Params`` class: name, type, default and declaration."""

    name: str
    type: Any
    default: Any
    hyper: Hyper


def declared(params: type) -> dict[str, Declared]:
    """All hyper-parameters of a ``Params`` class by name, in the order of the class; of a model of pydantic its fields.

    Raises FedbenchError for what is no frozen dataclass, and for a field that was not made by ``hyper``.
    """
    if not isinstance(params, type):
        raise FedbenchError(f"Params={params!r} is not a class; make it a frozen dataclass of hyper(...) fields.")
    return dict(_declared(params))


@lru_cache(maxsize=256)
def _declared(params: type) -> dict[str, Declared]:
    """`declared`, cached, since a suite asks for every row, setting and seed."""
    if hasattr(params, "model_fields"):
        return {name: _of_field(name, field) for name, field in params.model_fields.items()}
    # what `hyper` made is replaced by its default where the class is made a dataclass
    left = [name for name, value in vars(params).items() if isinstance(value, dataclasses.Field)]
    if left or not dataclasses.is_dataclass(params) or not _is_frozen(params):
        raise FedbenchError(
            f"{params.__name__} is not a frozen dataclass; write @dataclass(frozen=True, kw_only=True) above the class."
        )
    plain = [f.name for f in dataclasses.fields(params) if "hyper" not in f.metadata]
    if plain:
        raise FedbenchError(f"{params.__name__}.{plain[0]} must be declared with fedbench.api.hyper(...).")
    try:
        types = typing.get_type_hints(params)
    except Exception as error:  # annotations are code
        raise FedbenchError(f"the types of {params.__name__} cannot be read: {error!r}.") from error
    named = {
        name for f in dataclasses.fields(params) for name in (*f.metadata["hyper"].when, f.metadata["hyper"].needs)
    }
    for name in named - {"", *types}:
        raise FedbenchError(
            f"{params.__name__}: {name!r}, which another hyper-parameter depends on, is none of its own."
        )
    return {
        f.name: Declared(f.name, types[f.name], f.default, _with_choices(f.metadata["hyper"], types[f.name], f.default))
        for f in dataclasses.fields(params)
    }


def _of_field(name: str, field: Any) -> Declared:
    """The declaration of a field of a pydantic model; of what may be None that of the rest."""
    low, high = (next((getattr(m, end) for m in field.metadata if hasattr(m, end)), None) for end in ("ge", "le"))
    kinds = [kind for kind in typing.get_args(field.annotation) if kind is not type(None)]
    kind = kinds[0] if field.default is None else field.annotation
    choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else None
    return Declared(name, kind, field.default, Hyper("option", field.description, low, high, choices=choices))


def _with_choices(hyper: Hyper, kind: Any, default: Any) -> Hyper:
    """``hyper`` with the choices that the type ``kind`` names, unless it has its own; the default must be one."""
    if hyper.choices is None and kind is bool and isinstance(default, bool):
        hyper = dataclasses.replace(hyper, choices=(default, not default))
    if hyper.choices is None and typing.get_origin(kind) is typing.Literal:
        hyper = dataclasses.replace(hyper, choices=typing.get_args(kind))
    if not hyper.admits(default):
        raise FedbenchError(f"the default {default!r} of {hyper.symbol} is not {hyper.allowed()}.")
    return hyper


def _is_frozen(params: Any) -> bool:
    return bool(params.__dataclass_params__.frozen)


def build_params(method: str, params: type, values: Mapping[str, object]) -> Any:
    """The ``Params`` of ``method`` with ``values`` (typed, or strings from the command line) over the defaults.

    Raises FedbenchError for an unknown name, a wrong type or a value outside the range.
    """
    known = declared(params)
    typed = {}
    for name, value in values.items():
        if name not in known:
            raise unknown_name(f"hyper-parameter of {method}", name, known, f"See `fedbench describe {method}`.")
        typed[name] = parse_value(f"{method}.{name}", known[name], value)
    return params(**typed)


def parse_value(key: str, parameter: Declared, value: object) -> Any:
    """``value`` as the parameter's type, checked against its range; ``key`` names it in the error."""
    import pydantic  # not for commands that only list names

    try:
        if isinstance(value, bool) and parameter.type in (int, float):
            raise ValueError("pydantic would take it for 0 or 1")
        parsed = pydantic.TypeAdapter(parameter.type).validate_python(value)
    except ValueError:  # pydantic's ValidationError is one
        if parameter.hyper.choices is None:
            kind = getattr(parameter.type, "__name__", parameter.type)
            raise FedbenchError(
                f"{key}={value!r} is not a {kind}; allowed: {parameter.hyper.allowed()} "
                f"(symbol {parameter.hyper.symbol}, default {parameter.default!r})."
            ) from None
        parsed = value
    if not parameter.hyper.admits(parsed):
        raise FedbenchError(
            f"{key}={value!r} is out of range; allowed: {parameter.hyper.allowed()} "
            f"(symbol {parameter.hyper.symbol}, default {parameter.default!r}, {parameter.hyper.source})."
        )
    return parsed
