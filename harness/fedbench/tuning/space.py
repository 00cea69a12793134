"""What tuning searches: the learning rate, the weight decay where there is one, and what the row's methods declare.

A setting that the row has switched off (its neutral value, 0 on a log scale) stays as it is: the row is about that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from optuna import Trial

from fedbench.core.errors import unknown_name
from fedbench.core.method.hyper import Declared, declared
from fedbench.core.spec import RunSpec
from fedbench.kinds.registry import find_method

# wide enough for what papers use (SGD 0.001 to 0.1, Adam 5e-5 to 1e-3), and the same for every method
_LEARNING_RATES = {"sgd": (1e-3, 0.3), "adam": (1e-5, 1e-2), "adamw": (1e-5, 1e-2)}
_WEIGHT_DECAYS = (1e-6, 1.0)


@dataclass(frozen=True)
class Dimension:
    """One searched setting: ``low`` to ``high`` (``log`` scale, ``whole`` numbers), or one of ``choices``."""

    key: str
    """The name as in --set: ``lr``, ``fedprox.mu``."""
    symbol: str
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False
    choices: tuple[Any, ...] = ()
    when: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Settings, by key, with the values under which this one has an effect."""

    def draw(self, trial: Trial) -> Any:
        """The trial's value, from the sampler of its study."""
        if self.choices:
            return trial.suggest_categorical(self.key, self.choices)
        if self.whole:
            return trial.suggest_int(self.key, int(self.low), int(self.high), log=self.log)
        return trial.suggest_float(self.key, self.low, self.high, log=self.log)

    def as_json(self) -> dict[str, Any]:
        """For a study's record."""
        return {name: value for name, value in asdict(self).items() if value not in ((), {}, False)}


def space_of(spec: RunSpec, plugin_files: Sequence[Path] = ()) -> tuple[Dimension, ...]:
    """The dimensions that can be searched for ``spec``, in the order in which they are drawn."""
    training = spec.training
    dimensions = [_ranged("lr", "lr", training.lr, *_LEARNING_RATES[training.optimizer])]
    if training.weight_decay:
        dimensions.append(_ranged("weight_decay", "weight decay", training.weight_decay, *_WEIGHT_DECAYS))
    for method in spec.stack:
        parameters = declared(find_method(method, plugin_files).Params)
        values = spec.params.get(method, {})
        on = {"", *(name for name, parameter in parameters.items() if parameter.hyper.is_on(values[name]))}
        available = {name: parameter for name, parameter in parameters.items() if parameter.hyper.needs in on}
        drawn = [_of_method(method, parameter, values[name]) for name, parameter in available.items()]
        dimensions += [dimension for dimension in drawn if dimension is not None]
    current, searched = values_of(spec), {dimension.key for dimension in dimensions}
    # one that depends on what is neither searched nor set as it needs never has an effect
    dimensions = [d for d in dimensions if all(key in searched or current[key] in d.when[key] for key in d.when)]
    # what others depend on is drawn before them
    return tuple(sorted(dimensions, key=lambda d: bool(d.when)))


def restricted(spaces: Sequence[tuple[Dimension, ...]], keys: Collection[str]) -> list[tuple[Dimension, ...]]:
    """Each space with the dimensions called for by ``keys`` only; all of them where there are no keys.

    Raises FedbenchError for a key that is in none of the spaces.
    """
    known = sorted({dimension.key for space in spaces for dimension in space})
    for key in keys:
        if key not in known:
            raise unknown_name("hyper-parameter that these rows can tune", key, known)
    return [tuple(d for d in space if not keys or d.key in keys) for space in spaces]


def values_of(spec: RunSpec) -> dict[str, Any]:
    """Every setting that tuning could search, by key, with its value in ``spec``."""
    of_methods = {f"{method}.{name}": value for method, params in spec.params.items() for name, value in params.items()}
    return {"lr": spec.training.lr, "weight_decay": spec.training.weight_decay, **of_methods}


def defaults_of(spec: RunSpec, space: Sequence[Dimension]) -> dict[str, Any]:
    """The values of ``spec`` in the space: the first trial. Dimensions without effect are left out."""
    current = values_of(spec)
    return {d.key: current[d.key] for d in space if _holds(d.when, current)}


def draw(trial: Trial, space: Sequence[Dimension], spec: RunSpec) -> dict[str, Any]:
    """The trial's values by key: drawn by the study's sampler, for those that have an effect under the ones before."""
    drawn: dict[str, Any] = {}
    current = values_of(spec)
    for dimension in space:
        if _holds(dimension.when, current | drawn):
            drawn[dimension.key] = dimension.draw(trial)
    return drawn


def with_values(spec: RunSpec, values: Mapping[str, Any]) -> RunSpec:
    """``spec`` with other values, given by key. Raises FedbenchError for a key that is none of its settings."""
    known = values_of(spec)
    for key in values:
        if key not in known:
            raise unknown_name(f"setting of {spec.title!r}", key, known)
    training = {key: value for key, value in values.items() if "." not in key}
    params = {method: dict(own) for method, own in spec.params.items()}
    for key, value in values.items():
        method, dot, name = key.partition(".")
        if dot:
            params[method][name] = value
    changed = spec.training.model_copy(update=training)
    return spec.model_copy(update={"training": changed, "params": params})


def _of_method(method: str, parameter: Declared, value: Any) -> Dimension | None:
    known = parameter.hyper
    searched = known.searched
    if searched is None or not known.in_range(value):
        return None
    key = f"{method}.{parameter.name}"
    when = {f"{method}.{name}": tuple(values) for name, values in known.when.items()}
    if known.choices is not None:
        return Dimension(key, known.symbol, choices=tuple(searched), when=when)
    low, high = searched
    return _ranged(key, known.symbol, value, low, high, log=known.log, whole=parameter.type is int, when=when)


def _ranged(
    key: str,
    symbol: str,
    value: float,
    low: float,
    high: float,
    *,
    log: bool = True,
    whole: bool = False,
    when: Mapping[str, tuple[Any, ...]] | None = None,
) -> Dimension:
    # wide enough for the row's own value, which is the first trial
    return Dimension(key, symbol, min(low, value), max(high, value), log, whole, when=when or {})


def _holds(when: Mapping[str, tuple[Any, ...]], values: Mapping[str, Any]) -> bool:
    return all(values[key] in allowed for key, allowed in when.items())
