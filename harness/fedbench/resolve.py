"""One cell of a suite, with the command line's settings, as a complete run spec.

Precedence, weakest first: fedbench's defaults, the suite's `training`, the scale's `set`, the setting's, the method's
`recipe` (optimiser only), what scale and setting say `of` the method, the row's `set`, its `at` of the scale, `--set`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from fedbench.assemble import find_method
from fedbench.comparable import same_data
from fedbench.errors import FedbenchError, unknown_name
from fedbench.hookspecs import Method
from fedbench.hyper import build_params, declared
from fedbench.models.grammar import canonical_backbone
from fedbench.scenarios import scenario_named
from fedbench.scenarios.scenario import Scenario
from fedbench.spec import OPTIMISER_KEYS, RunSpec, Training, stack_names
from fedbench.suite import Key, Row, Scale, Setting, Suite, problem_of

_RUN_KEYS = ("dataset", "backbone", "text_encoder", "teacher", "tune", "head_scale", "templates", "device")
_ALIASES = {"backbone.text": "text_encoder", "backbone.teacher": "teacher"}
READ_BY_SOME = ("text_encoder", "teacher")
"""Run settings that only methods naming them in ``reads`` look at."""
_SAME_CELL = ("backbone", "device")
"""Run settings that leave a run the published cell: another backbone is told wherever the two stand side by side."""


@dataclass(frozen=True)
class Overrides:
    """What the command line adds to a suite."""

    methods: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    sets: tuple[tuple[str, str], ...] = ()
    plugin_files: tuple[Path, ...] = ()
    scale: str = ""
    """The suite's first scale where empty."""
    settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cell:
    """One place of a suite's grid: a row in a setting at a scale."""

    row: Row
    setting: Setting | None = None
    scale: Scale | None = None
    at: Mapping[str, Any] | None = None
    """The row's own settings at the scale."""

    @property
    def name(self) -> str:
        """The setting's name; empty for a suite without a grid."""
        return "" if self.setting is None else self.setting.name

    @property
    def published(self) -> tuple[Key, ...]:
        """The keys of the published numbers this cell replays: the setting's columns, overruled by the row's."""
        if self.setting is None:
            return ()
        keys = [
            {"method": self.row.method, "variant": "", **of_setting, **of_row}
            for of_setting in self.setting.published
            for of_row in self.row.published
        ]
        return tuple(dict(key) for key in dict.fromkeys(tuple(sorted(key.items())) for key in keys))

    def of_the_suite(self, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Settings of the scale and of the grid with their source, weakest first."""
        for named, part in self._parts():
            yield f"{where}, {named}", part.set

    def of_the_method(self, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """What scale and grid say of the methods that the row runs, weakest first."""
        for named, part in self._parts():
            for method in stack_names(self.row.method):
                yield f"{where}, {named}, of {method}", part.of.get(method, {})

    def _parts(self) -> Iterator[tuple[str, Scale | Setting]]:
        if self.scale is not None:
            yield "scale", self.scale
        if self.setting is not None:
            yield f"setting {self.name!r}", self.setting

    def of_the_row(self, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """The row's own settings, weakest first: those everywhere, those at the scale."""
        yield f"{where}, row {self.row.method!r}", self.row.set
        yield f"{where}, row {self.row.method!r}, at the scale", self.at or {}


def resolve(suite: Suite, cell: Cell, seed: int, overrides: Overrides) -> RunSpec:
    """One cell and seed as a complete spec: every default is written out, so the run id covers it."""
    stack = stack_names(cell.row.method)
    classes = {name: find_method(name, overrides.plugin_files) for name in stack}
    where = f"suite {suite.name!r}"
    draft = _Draft(
        classes,
        run={"dataset": suite.dataset, "backbone": suite.backbone},
        scenario=_scenario(suite.scenario, where),
        training=_checked(Training, dict(suite.training), where, "training"),
        params={name: {} for name in stack},
    )
    for source, settings in cell.of_the_suite(where):
        draft.apply(settings, source, strict=False)
    own, given = [*cell.of_the_method(where), *cell.of_the_row(where)], dict(overrides.sets)
    decided = {key.removeprefix("training.") for settings in (*(s for _, s in own), given) for key in settings}
    draft.training |= _recipe(classes, decided)
    if "scenario" in given:
        # another scenario for the whole suite: what a row needs of its own (hidden labels) still holds in it
        draft.apply({"scenario": given.pop("scenario")}, "--set", strict=False)
    for source, settings in own:
        draft.apply(settings, source, strict=True)
    of_the_cell = str(draft.run["dataset"])
    draft.apply(given, "--set", strict=False)
    draft.run["backbone"] = canonical_backbone(str(draft.run["backbone"]))
    same_cell = all(
        key in _SAME_CELL or (key == "dataset" and same_data(value, of_the_cell))
        for key, value in dict(overrides.sets).items()
    )
    resolved = {}
    for name, cls in classes.items():
        built = build_params(name, cls.Params, draft.params[name])
        resolved[name] = {field: getattr(built, field) for field in declared(cls.Params)}
    return RunSpec(
        **_checked(RunSpec, draft.run, where, ""),
        scenario=Scenario(**_checked(Scenario, draft.scenario, where, "scenario")),
        training=Training(**_checked(Training, draft.training, where, "training")),
        method="+".join(stack),
        params={name: values for name, values in resolved.items() if values},
        seed=seed,
        label=cell.row.label,
        setting=cell.name,
        scale=overrides.scale or next(iter(suite.scales), ""),
        # with other settings it is no longer the published cell
        published=cell.published if same_cell else (),
    )


@dataclass
class _Draft:
    """A spec in the making, by section."""

    classes: Mapping[str, type[Method]]
    run: dict[str, Any]
    scenario: dict[str, Any]
    training: dict[str, Any]
    params: dict[str, dict[str, Any]]

    def apply(self, settings: Mapping[str, Any], source: str, *, strict: bool) -> None:
        """Put ``settings`` over what is there; ``strict`` refuses those that the row's methods would not read."""
        # a scenario by name comes first, so that the order in which settings are given does not matter
        for key, value in sorted(settings.items(), key=lambda pair: pair[0] != "scenario"):
            section, name = section_of(key, tuple(self.classes))
            unread = section == "run" and name in READ_BY_SOME and not reads(self.classes.values(), name)
            if strict and section == "other-method":
                raise FedbenchError(f"{source}: set names {key.partition('.')[0]}, which the row does not run.")
            if strict and unread:
                raise FedbenchError(f"{source}: its methods don't read {name}; leave it out.")
            if section == "scenario" and name == "":
                self.scenario = _scenario(value, source)
            elif section == "scenario":
                self.scenario[name] = value
            elif section == "training":
                self.training[name] = value
            elif section == "run" and not unread:
                self.run[name] = (value,) if name == "templates" and isinstance(value, str) else value
            elif section in self.params:
                self.params[section][name] = value


def parse_assignment(text: str) -> tuple[str, str]:
    """``key=value`` of ``--set``."""
    key, sign, value = text.partition("=")
    if not sign or not key.strip():
        raise FedbenchError(f"--set {text!r} is not key=value; write for instance --set rounds=50.")
    return key.strip(), value.strip()


def section_of(key: str, stack: Sequence[str]) -> tuple[str, str]:
    """Where a key belongs: ("run" | "scenario" | "training" | a method, field). An unknown key is an error."""
    key = _ALIASES.get(key, key)
    head, dot, rest = key.partition(".")
    if key == "scenario":
        return "scenario", ""
    if key in ("seed", "method"):
        raise FedbenchError(f"{key} is not a setting of a row; give --{key}, which may be repeated.")
    if not dot:
        sections = {"run": _RUN_KEYS, "scenario": Scenario.model_fields, "training": Training.model_fields}
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
    known = [*_RUN_KEYS, "scenario", *Scenario.model_fields, *Training.model_fields]
    raise unknown_name("setting", key, known, "A method's own are written METHOD.NAME, see `fedbench describe METHOD`.")


def reads(classes: Iterable[type[Method]], name: str) -> bool:
    """Whether one of the methods looks at the run's setting ``name`` (one of ``READ_BY_SOME``)."""
    return any(name in getattr(cls, "reads", ()) for cls in classes)


def _recipe(classes: Mapping[str, Any], decided: Set[str]) -> dict[str, object]:
    """The stack's optimiser settings; two methods may disagree only on what the row or --set has decided."""
    recipe: dict[str, object] = {}
    for name, cls in classes.items():
        wrong = sorted(set(cls.recipe) - OPTIMISER_KEYS)
        if wrong:
            raise FedbenchError(f"the recipe of {name} sets {', '.join(wrong)}; it may set the optimiser only.")
        for key, value in cls.recipe.items():
            if recipe.get(key, value) != value and key not in decided:
                raise FedbenchError(
                    f"the stacked recipes disagree on {key} ({recipe[key]!r} and {value!r}); use --set {key}=..."
                )
            recipe[key] = value
    return recipe


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
    raise FedbenchError(f"{where}: scenario={value!r} is neither a name nor a mapping.")


def _checked(model: type[BaseModel], values: dict[str, Any], where: str, section: str) -> dict[str, Any]:
    """``values`` as the types of ``model``'s fields; FedbenchError with field, value and what is allowed."""
    for name in values:
        if name not in model.model_fields:
            raise unknown_name(f"{section or 'run'} setting in {where}", name, model.model_fields)
    try:
        validated = model.model_validate(_none_words(values))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        dotted = f"{section}.{name}" if section and name else name or section
        raise FedbenchError(f"{dotted}={first['input']!r}: {problem_of(first, model)}") from None
    return {name: getattr(validated, name) for name in values}


def _none_words(values: dict[str, Any]) -> dict[str, Any]:
    """The command line's word ``none`` for an optional field."""
    return {k: None if isinstance(v, str) and v.lower() == "none" and k in _NULLABLE else v for k, v in values.items()}


_NULLABLE = ("head_scale", "holdout_domain", "partition_seed")
