"""Hyper-parameters, declared once: the declaration feeds the command line, Optuna, MLflow, the docs and the tests."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import pydantic

from fedbench.errors import FedbenchError, unknown_name

T = TypeVar("T")


@dataclass(frozen=True)
class Hyper:
    """What is known of one hyper-parameter besides its default and type."""

    symbol: str
    source: str
    low: float | None = None
    high: float | None = None
    log: bool = False
    choices: tuple[Any, ...] | None = None
    neutral: Any = None
    """The value at which the method equals FedAvg; None where there is none."""

    def allowed(self) -> str:
        """The allowed values in words."""
        if self.choices is not None:
            return f"one of {', '.join(repr(c) for c in self.choices)}"
        if self.low is not None and self.high is not None:
            return f"between {self.low:g} and {self.high:g}"
        if self.high is not None:
            return f"at most {self.high:g}"
        return "any value" if self.low is None else f"at least {self.low:g}"

    def admits(self, value: Any) -> bool:
        """Whether ``value`` is allowed; the neutral value always is, also outside the search range."""
        if self.neutral is not None and value == self.neutral:
            return True
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
) -> T:
    """A field of a method's frozen ``Params`` dataclass.

    ``symbol`` as the paper writes it, ``source`` where default and range come from, ``low`` / ``high`` / ``log`` or
    ``choices`` the range (it is also what Optuna searches), ``neutral`` the value that turns the method into FedAvg.
    A default outside its own range raises ValueError at import.
    """
    declared = Hyper(symbol, source, low, high, log, None if choices is None else tuple(choices), neutral)
    if not declared.admits(default):
        raise ValueError(f"default {default!r} of {symbol} is not {declared.allowed()}")
    return dataclasses.field(default=default, metadata={"hyper": declared})


@dataclass(frozen=True)
class Declared:
    """A hyper-parameter of a ``Params`` class: name, type, default and declaration."""

    name: str
    type: Any
    default: Any
    hyper: Hyper


def declared(params: type) -> dict[str, Declared]:
    """All hyper-parameters of a ``Params`` class by name, in the order of the class.

    Raises FedbenchError for a field that was not made by ``hyper``.
    """
    plain = [f.name for f in dataclasses.fields(params) if "hyper" not in f.metadata]
    if plain:
        raise FedbenchError(f"{params.__name__}.{plain[0]} must be declared with fedbench.hyper.hyper(...).")
    types = typing.get_type_hints(params)
    return {
        f.name: Declared(f.name, types[f.name], f.default, cast(Hyper, f.metadata["hyper"]))
        for f in dataclasses.fields(params)
    }


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
    try:
        parsed = pydantic.TypeAdapter(parameter.type).validate_python(value)
    except pydantic.ValidationError:
        raise FedbenchError(
            f"{key}={value!r} is not a {_type_name(parameter.type)}; allowed: {parameter.hyper.allowed()} "
            f"(symbol {parameter.hyper.symbol}, default {parameter.default!r})."
        ) from None
    if not parameter.hyper.admits(parsed):
        raise FedbenchError(
            f"{key}={value!r} is out of range; allowed: {parameter.hyper.allowed()} "
            f"(symbol {parameter.hyper.symbol}, default {parameter.default!r}, {parameter.hyper.source})."
        )
    return parsed


def _type_name(kind: Any) -> str:
    return getattr(kind, "__name__", str(kind))
