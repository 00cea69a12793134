"""A run's spec in the making: settings from several places, laid over one another, and where each of them stands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError

from fedbench.core.errors import FedbenchError, unknown_name
from fedbench.core.method.base import AnyMethod
from fedbench.core.method.hyper import build_params
from fedbench.core.scenario import Scenario
from fedbench.core.spec import Training
from fedbench.kinds.registry import build
from fedbench.scenarios import scenario_named
from fedbench.suites.suite import Row, Scale, Setting, Suite, problem_of

RUN_KEYS = ("dataset", "backbone", "text_encoder", "teacher", "tune", "head_scale", "templates", "device", "metrics")
_ALIASES = {"backbone.text": "text_encoder", "backbone.teacher": "teacher"}
LISTS = ("templates", "metrics")
"""Run settings that have several values."""
READ_BY_SOME = ("text_encoder", "teacher")
"""Run settings that only methods naming them in ``reads`` look at."""


@dataclass(frozen=True)
class LayerSource:
    """Settings, and where they stand."""

    described: str
    """In words, for settings of no file."""
    settings: Mapping[str, Any]
    part: Suite | Scale | Setting | Row | None = None
    path: tuple[str, ...] = ()

    def place(self, key: str) -> str:
        """File, line and path of the setting ``key``, with a colon behind; empty where it stands in no file."""
        return "" if self.part is None else self.part.place(*self.path, key)


@dataclass
class Draft:
    """A spec in the making, by section."""

    classes: Mapping[str, type[AnyMethod]]
    run: dict[str, Any]
    params: dict[str, dict[str, Any]]
    scenario: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    places: dict[tuple[str, str], str] = field(default_factory=dict)
    """Where the settings stand that were put last, by section and name; those of a whole scenario by no name."""

    def start(self, training: LayerSource, scenario: str | dict[str, Any]) -> None:
        """The suite's own training and scenario."""
        for name in training.settings:
            if name not in Training.model_fields:
                known = Training.model_fields
                raise _at(training.place(name), unknown_name(f"training setting in {training.described}", name, known))
        self.training = dict(training.settings)
        self.stand(training, "training")
        whole = LayerSource(training.described, {"scenario": scenario}, training.part)
        self.apply(whole, strict=False)
        inside = scenario if isinstance(scenario, dict) else {}
        self.stand(LayerSource(training.described, inside, training.part, ("scenario",)), "scenario")

    def stand(self, source: LayerSource, section: str) -> None:
        """Remember where the settings of a section stand."""
        self.places |= {(section, name): source.place(name) for name in source.settings}

    def apply(self, source: LayerSource, *, strict: bool) -> None:
        """Put the settings of ``source`` over the others; ``strict`` refuses those that the methods would not read."""
        # a scenario by name comes first, so that the order in which settings are given does not matter
        for key, value in sorted(source.settings.items(), key=lambda pair: pair[0] != "scenario"):
            place = source.place(key)
            try:
                section, name = section_of(key, tuple(self.classes))
                if section == "scenario" and name == "":
                    self.scenario = _scenario(value, source.described)
                    self.places = {key: known for key, known in self.places.items() if key[0] != "scenario"}
            except FedbenchError as error:
                raise _at(place, error) from None
            unread = section == "run" and name in READ_BY_SOME and not reads(self.classes.values(), name)
            if strict and section == "other-method":
                reason = f"{source.described}: set names {key.partition('.')[0]}, which the row does not run."
                raise _at(place, FedbenchError(reason))
            if strict and unread:
                raise _at(place, FedbenchError(f"{source.described}: its methods don't read {name}; leave it out."))
            self.places[section, name] = place
            if section == "scenario" and name != "":
                self.scenario[name] = value
            elif section == "training":
                self.training[name] = value
            elif section == "run" and not unread:
                self.run[name] = (value,) if name in LISTS and isinstance(value, str) else value
            elif section in self.params:
                self.params[section][name] = value

    def built(self, method: str) -> Any:
        """The ``Params`` of ``method``; an error says where the wrong value stands."""
        params = self.classes[method].Params
        for name, value in self.params[method].items():
            try:
                build_params(method, params, {name: value})
            except FedbenchError as error:
                raise _at(self.places.get((method, name), ""), error) from None
        return build_params(method, params, self.params[method])

    def check_plugins(self, scenario: Scenario) -> None:
        """FedbenchError with its place for a partition or metric that there is not, or options that it does not take.

        Data sets and backbones are looked at when they are loaded.
        """
        named = {("scenario", "partition"): [scenario.partition], ("run", "metrics"): self.run.get("metrics", ())}
        for (section, name), texts in named.items():
            for text in texts:
                try:
                    build(name.removesuffix("s"), str(text))
                except FedbenchError as error:
                    raise _at(self._place(section, name), error) from None

    def checked(self, model: type[BaseModel], values: dict[str, Any], section: str) -> dict[str, Any]:
        """``values`` as the types of ``model``'s fields; FedbenchError with place, field, value and what is allowed."""
        try:
            for name, value in values.items():
                _refuse_bool(model, name, value, "" if section == "run" else f"{section}.")
            validated = model.model_validate(_none_words(values))
        except ValidationError as error:
            first = error.errors()[0]
            dotted = ".".join(str(part) for part in (section, *first["loc"]) if part != "run")
            reason = f"{dotted}={_brief(first['input'])}: {problem_of(first, model)}"
            raise _at(self._place(section, str(first["loc"][0])), FedbenchError(reason)) from None
        except _NotANumber as error:
            raise _at(self._place(section, error.name), error) from None
        return {name: getattr(validated, name) for name in values}

    def _place(self, section: str, name: str) -> str:
        return self.places.get((section, name), self.places.get((section, ""), ""))


class _NotANumber(FedbenchError):
    def __init__(self, name: str, reason: str) -> None:
        super().__init__(reason)
        self.name = name


def _refuse_bool(model: type[BaseModel], name: str, value: object, head: str) -> None:
    """``true`` for a number, which pydantic would take for 1."""
    if isinstance(value, bool) and model.model_fields[name].annotation in _NUMBERS:
        about = model.model_fields[name].description
        raise _NotANumber(name, f"{head}{name}={str(value).lower()}: it is a number ({about}).")


_NUMBERS = (int, float, int | None, float | None)


def _at(place: str, error: FedbenchError) -> FedbenchError:
    """``error`` with the place in front, if it has one."""
    return FedbenchError(f"{place}{error}") if place else error


def _brief(value: object) -> str:
    """``repr`` of a value, its beginning where that is long."""
    shown = repr(value)
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}..."


_LONGEST = 200


def section_of(key: str, stack: Sequence[str]) -> tuple[str, str]:
    """Where a key belongs: ("run" | "scenario" | "training" | a method, field). An unknown key is an error."""
    key = _ALIASES.get(key, key)
    head, dot, rest = key.partition(".")
    if key == "scenario":
        return "scenario", ""
    if key in ("seed", "method"):
        raise FedbenchError(f"{key} is not a setting of a row; give --{key}, which may be repeated.")
    if not dot:
        sections = {"run": RUN_KEYS, "scenario": Scenario.model_fields, "training": Training.model_fields}
        for section, names in sections.items():
            if key in names:
                return section, key
    elif head in ("scenario", "training"):
        fields = (Scenario if head == "scenario" else Training).model_fields
        if rest in fields:
            return head, rest
        raise unknown_name(f"{head} setting", rest, fields)
    elif head in stack:
        return head, rest
    elif dot:
        return "other-method", rest
    known = [*RUN_KEYS, "scenario", *Scenario.model_fields, *Training.model_fields]
    hint = "See `fedbench list settings`; a method's own are written METHOD.NAME, see `fedbench describe METHOD`."
    raise unknown_name("setting", key, known, hint, hint_lists=True)


def reads(classes: Iterable[type[AnyMethod]], name: str) -> bool:
    """Whether one of the methods looks at the run's setting ``name`` (one of ``READ_BY_SOME``)."""
    return any(name in getattr(cls, "reads", ()) for cls in classes)


def _scenario(value: object, where: str) -> dict[str, Any]:
    if isinstance(value, str):
        return scenario_named(value).model_dump()
    if isinstance(value, dict):
        given = dict(value)
        preset = given.pop("preset", None)
        base = {} if preset is None else scenario_named(str(preset)).model_dump()
        unknown = [key for key in given if key not in Scenario.model_fields]
        if unknown:
            raise unknown_name(f"scenario setting in {where}", str(unknown[0]), [*Scenario.model_fields, "preset"])
        return base | given
    raise FedbenchError(f"{where}: scenario={_brief(value)} is neither a name nor a mapping.")


def _none_words(values: dict[str, Any]) -> dict[str, Any]:
    """The command line's word ``none`` for an optional field."""
    return {k: None if isinstance(v, str) and v.lower() == "none" and k in _NULLABLE else v for k, v in values.items()}


_NULLABLE = ("head_scale", "holdout_domain", "partition_seed", "local_steps", "clip_norm")
