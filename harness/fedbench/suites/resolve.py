"""One cell of a suite, with the command line's settings, as a complete run spec.

Precedence, weakest first: fedbench's defaults, the suite's `training`, the scale's `set`, the setting's, the method's
`recipe` (optimiser only), what scale and setting say `of` the method, the row's `set`, its `at` of the scale, `--set`.
Settings know where they stand, so that errors say it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from fedbench.core.errors import FedbenchError, unknown_name
from fedbench.core.method.base import AnyMethod
from fedbench.core.method.hyper import build_params, declared
from fedbench.core.scenario import Scenario
from fedbench.core.spec import MOST_SEED, RunSpec, Training
from fedbench.datasets.catalogue import same_data
from fedbench.kinds.registry import build, find_method
from fedbench.models.names import canonical_backbone
from fedbench.plugins.assembly import role_of
from fedbench.scenarios import scenario_named
from fedbench.suites.files import read_yaml
from fedbench.suites.suite import Key, Row, Scale, Setting, Suite, problem_of

RUN_KEYS = ("dataset", "backbone", "text_encoder", "teacher", "tune", "head_scale", "templates", "device", "metrics")
_ALIASES = {"backbone.text": "text_encoder", "backbone.teacher": "teacher"}
LISTS = ("templates", "metrics")
"""Run settings that have several values."""
READ_BY_SOME = ("text_encoder", "teacher")
"""Run settings that only methods naming them in ``reads`` look at."""
_SAME_CELL = ("backbone", "device")
"""Run settings that leave a run the published cell: another backbone is named wherever the two stand side by side."""
Find = Callable[[str], type[AnyMethod]]


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
    on: tuple[str, ...] = ()
    """Backbones: of all rows only those on one of them."""


@dataclass(frozen=True)
class GridCell:
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

    def of_the_suite(self, where: str) -> Iterator[LayerSource]:
        """Settings of the scale and of the grid, weakest first."""
        for named, part in self._parts():
            yield LayerSource(f"{where}, {named}", part.set, part, ("set",))

    def of_the_method(self, where: str) -> Iterator[LayerSource]:
        """What scale and grid say of the methods that the row runs, weakest first."""
        for named, part in self._parts():
            for method in self.row.stack:
                yield LayerSource(f"{where}, {named}, of {method}", part.of.get(method, {}), part, ("of", method))

    def _parts(self) -> Iterator[tuple[str, Scale | Setting]]:
        if self.scale is not None:
            yield "scale", self.scale
        if self.setting is not None:
            yield f"setting {self.name!r}", self.setting

    def of_the_row(self, where: str, scale: str) -> Iterator[LayerSource]:
        """The row's own settings, weakest first: those everywhere, those at the scale called ``scale``."""
        yield LayerSource(f"{where}, row {self.row.method!r}", self.row.set, self.row, ("set",))
        yield LayerSource(f"{where}, row {self.row.method!r}, at the scale", self.at or {}, self.row, ("at", scale))


def resolve(suite: Suite, cell: GridCell, seed: int, overrides: Overrides, find: Find | None = None) -> RunSpec:
    """One cell and seed as a complete spec: every default is written out, so the run id covers it.

    ``find`` is `finder`'s, for whoever resolves many cells.
    """
    stack = cell.row.stack
    find = find or finder(overrides)
    try:
        classes = {name: find(name) for name in stack}
    except FedbenchError as error:
        raise FedbenchError(f"{cell.row.place('method')}{error}") from error
    where = f"suite {suite.name!r}"
    draft = Draft(
        classes,
        run={"dataset": suite.dataset, "backbone": suite.backbone},
        params={name: {} for name in stack},
    )
    draft.stand(LayerSource(where, {"dataset": suite.dataset, "backbone": suite.backbone}, suite), "run")
    draft.start(LayerSource(where, suite.training, suite, ("training",)), suite.scenario)
    for source in cell.of_the_suite(where):
        draft.apply(source, strict=False)
    given = {key: _listed(key, text) if key in LISTS else text for key, text in overrides.sets}
    own = [*cell.of_the_method(where), *cell.of_the_row(where, overrides.scale or next(iter(suite.scales), ""))]
    decided = {key.removeprefix("training.") for settings in (*(s.settings for s in own), given) for key in settings}
    draft.training |= _recipe(classes, decided)
    if "scenario" in given:
        # another scenario for the whole suite: what a row needs of its own (hidden labels) still holds in it
        draft.apply(LayerSource("--set", {"scenario": given.pop("scenario")}), strict=False)
    for source in own:
        draft.apply(source, strict=True)
    of_the_cell = str(draft.run["dataset"])
    draft.apply(LayerSource("--set", given), strict=False)
    draft.run["backbone"] = canonical_backbone(str(draft.run["backbone"]))
    same_cell = all(
        key in _SAME_CELL or (key == "dataset" and same_data(value, of_the_cell))
        for key, value in dict(overrides.sets).items()
    )
    scenario = Scenario(**draft.checked(Scenario, draft.scenario, "scenario"))
    draft.check_plugins(scenario)
    resolved = {}
    for name, cls in classes.items():
        built = draft.built(name)
        resolved[name] = {field: getattr(built, field) for field in declared(cls.Params)}
    return RunSpec(
        **draft.checked(RunSpec, draft.run, "run"),
        scenario=scenario,
        training=Training(**draft.checked(Training, draft.training, "training")),
        method="+".join(stack),
        params={name: values for name, values in resolved.items() if values},
        seed=checked_seed(seed),
        label=cell.row.label,
        setting=cell.name,
        scale=overrides.scale or next(iter(suite.scales), ""),
        # with other settings it is no longer the published cell
        published=cell.published if same_cell else (),
    )


def finder(overrides: Overrides) -> Find:
    """`find_method` with the plugin files of ``overrides``, which looks through what is installed once per method."""
    return cache(partial(find_method, plugin_files=overrides.plugin_files))


def checked_seed(seed: int) -> int:
    """``seed``; FedbenchError for one that can't be kept."""
    if not 0 <= seed <= MOST_SEED:
        raise FedbenchError(f"seed {seed} is out of range; allowed: 0 to {MOST_SEED}.")
    return seed


def parse_assignment(text: str) -> tuple[str, str]:
    """``key=value`` of ``--set``."""
    key, sign, value = text.partition("=")
    if not sign or not key.strip():
        raise FedbenchError(f"--set {text!r} is not key=value; write for instance --set rounds=50.")
    return key.strip(), value.strip()


def _listed(key: str, text: str) -> Any:
    """A setting that has several values, written as in a suite file: ``["a {}", "the {}"]``; else its one value."""
    if not text.startswith("["):
        return text
    try:
        return read_yaml(text, key)[0]
    except FedbenchError:
        raise FedbenchError(
            f'--set {key}={text!r} is not a list; write for instance --set \'{key}=["a photo of a {{}}", "a drawing of '
            "a {}\"]', every value in quotation marks."
        ) from None


def _recipe(classes: Mapping[str, Any], decided: Set[str]) -> dict[str, object]:
    """The stack's optimiser settings. A learner's come before those of methods around it; two others may disagree only
    on what it, the row or --set has decided."""
    learners = [cls for cls in classes.values() if role_of(cls) == "learner"]
    of_learners: dict[str, object] = {key: value for cls in learners for key, value in cls.recipe.items()}
    recipe: dict[str, object] = {}
    for cls in classes.values():
        for key, value in cls.recipe.items():
            if recipe.get(key, value) != value and key not in decided | of_learners.keys():
                raise FedbenchError(
                    f"the stacked recipes disagree on {key} ({recipe[key]!r} and {value!r}); use --set {key}=..."
                )
            recipe[key] = value
    return recipe | of_learners


# --- settings laid over one another


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
    """Origin of each setting that was put last, by section and name; those of a whole scenario by no name."""

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
    """The section of a key: ("run" | "scenario" | "training" | a method, field). An unknown key is an error."""
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
