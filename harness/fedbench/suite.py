"""From a suite file and the command line to run specs: rows of methods, crossed with seeds, with overrides applied.

Precedence, weakest first: fedbench's defaults, the suite's `training`, the method's `recipe` (optimiser only), the
row's `set`, the command line's `--set`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedbench.assemble import find_method
from fedbench.errors import FedbenchError, unknown_name
from fedbench.hookspecs import Method
from fedbench.hyper import build_params, declared
from fedbench.scenarios import scenario_named
from fedbench.scenarios.scenario import Scenario
from fedbench.spec import OPTIMISER_KEYS, RunSpec, Training, stack_names

_RUN_KEYS = ("dataset", "backbone", "text_encoder", "teacher", "tune", "head_scale", "templates", "device")
_ALIASES = {"backbone.text": "text_encoder", "backbone.teacher": "teacher"}
_READ_BY_SOME = ("text_encoder", "teacher")
"""Run settings that only methods naming them in ``reads`` look at."""


class Row(BaseModel):
    """One row of a suite: a method or stack, on a backbone, with its own settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: str = Field(description="method or stack a+b")
    set: dict[str, Any] = Field(default_factory=dict, description="settings of this row, as in --set")


class Suite(BaseModel):
    """Which methods meet which scenario, with which budget and seeds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(description="what results are filed under")
    description: str = Field("", description="one sentence for `fedbench list suites`")
    dataset: str = Field("embedded", description="data set")
    backbone: str = Field("clip:embedded", description="backbone of rows that name none")
    scenario: str | dict[str, Any] = Field("longtail", description="a scenario's name, or {preset: name, field: value}")
    training: dict[str, Any] = Field(default_factory=dict, description="budget and optimiser, see Training")
    seeds: tuple[int, ...] = Field((0,), min_length=1, description="one run a row and seed")
    baseline: str = Field("fedavg", description="row the others are compared with")
    headline: str = Field("global_accuracy", description="metric the leaderboard is sorted by and Δ is taken of")
    columns: tuple[str, ...] = Field((), description="leaderboard columns beside the headline")
    rows: tuple[Row, ...] = Field(min_length=1, description="the methods")


@dataclass(frozen=True)
class Overrides:
    """What the command line adds to a suite."""

    methods: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    sets: tuple[tuple[str, str], ...] = ()
    plugin_files: tuple[Path, ...] = ()


def suite_names() -> dict[str, str]:
    """The suites that ship with fedbench: name -> description."""
    folder = resources.files("fedbench_suites")
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".yaml"))
    return {name.removesuffix(".yaml"): load_suite(name.removesuffix(".yaml")).description for name in names}


def load_suite(name: str) -> Suite:
    """A shipped suite by name, or any suite file by path. FedbenchError names file, line, field and what is allowed."""
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
        if not path.is_file():
            raise FedbenchError(f"suite file {name!r} does not exist; see `fedbench list suites` for names.")
        return parse_suite(path.read_text(encoding="utf-8"), name)
    folder = resources.files("fedbench_suites")
    file = folder / f"{name}.yaml"
    if not file.is_file():
        known = [entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml")]
        raise unknown_name("suite", name, known, "See `fedbench list suites`, or give the path of a .yaml file.")
    return parse_suite(file.read_text(encoding="utf-8"), f"{name}.yaml")


def parse_suite(text: str, where: str) -> Suite:
    """The suite in ``text``; ``where`` is the file's name in errors."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise FedbenchError(f"{where}{line}: not valid YAML: {getattr(error, 'problem', error)}.") from error
    if not isinstance(content, dict):
        raise FedbenchError(f"{where}: a suite is a mapping with name, scenario and rows.")
    try:
        return Suite.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        path = [str(part) for part in first["loc"]]
        problem = _problem(first, Row if path[0] == "rows" and len(path) > 2 else Suite)
        raise FedbenchError(f"{where}, line {_line_of(node, first['loc'])}, {'.'.join(path)}: {problem}") from None


def single(scenario: str | None, dataset: str | None, backbone: str | None) -> Suite:
    """The suite of a run without a suite file: the methods come from the command line."""
    given: dict[str, Any] = {"dataset": dataset, "backbone": backbone, "scenario": scenario}
    return Suite(name="adhoc", rows=(Row(method="fedavg"),), **{k: v for k, v in given.items() if v is not None})


def expand(suite: Suite, overrides: Overrides) -> list[RunSpec]:
    """All runs of ``suite`` by row, then seed. ``--method`` picks the suite's rows of that name, or adds one."""
    rows: list[Row] = list(suite.rows)
    if overrides.methods:
        rows = []
        for method in overrides.methods:
            wanted = stack_names(method)
            chosen = [row for row in suite.rows if stack_names(row.method) == wanted]
            rows.extend(chosen or [Row(method="+".join(wanted))])
    _refuse_stray_keys(rows, overrides)
    seeds = overrides.seeds or suite.seeds
    return [resolve(suite, row, seed, overrides) for row in rows for seed in seeds]


def resolve(suite: Suite, row: Row, seed: int, overrides: Overrides) -> RunSpec:
    """One row and seed as a complete spec: every default is written out, so the run id covers it."""
    stack = stack_names(row.method)
    classes = {name: find_method(name, overrides.plugin_files) for name in stack}
    run: dict[str, Any] = {"dataset": suite.dataset, "backbone": suite.backbone}
    where = f"suite {suite.name!r}"
    scenario = _scenario(suite.scenario, where)
    decided = {key.removeprefix("training.") for key in (*row.set, *(key for key, _ in overrides.sets))}
    training = _checked(Training, dict(suite.training), where, "training") | _recipe(classes, decided)
    params: dict[str, dict[str, Any]] = {name: {} for name in stack}
    for source, settings in ((f"{where}, row {row.method!r}", row.set.items()), ("--set", overrides.sets)):
        # a scenario by name comes first, so that the order in which settings are given does not matter
        for key, value in sorted(settings, key=lambda pair: pair[0] != "scenario"):
            section, name = _section(key, stack)
            if section == "other-method" and source != "--set":
                raise FedbenchError(f"{source}: set names {key.partition('.')[0]}, which the row does not run.")
            if section == "scenario" and name == "":
                scenario = _scenario(value, source)
            elif section == "scenario":
                scenario |= {name: value}
            elif section == "training":
                training[name] = value
            elif section == "run" and name in _READ_BY_SOME and not _reads(classes.values(), name):
                if source != "--set":
                    raise FedbenchError(f"{source}: {row.method} does not read {name}; leave it out.")
            elif section == "run":
                run[name] = (value,) if name == "templates" and isinstance(value, str) else value
            elif section in params:
                params[section][name] = value
    resolved = {}
    for name, cls in classes.items():
        built = build_params(name, cls.Params, params[name])
        resolved[name] = {field: getattr(built, field) for field in declared(cls.Params)}
    return RunSpec(
        **_checked(RunSpec, run, where, ""),
        scenario=Scenario(**_checked(Scenario, scenario, where, "scenario")),
        training=Training(**_checked(Training, training, where, "training")),
        method="+".join(stack),
        params={name: values for name, values in resolved.items() if values},
        seed=seed,
    )


def parse_assignment(text: str) -> tuple[str, str]:
    """``key=value`` of ``--set``."""
    key, sign, value = text.partition("=")
    if not sign or not key.strip():
        raise FedbenchError(f"--set {text!r} is not key=value; write for instance --set rounds=50.")
    return key.strip(), value.strip()


def _section(key: str, stack: Sequence[str]) -> tuple[str, str]:
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


def _refuse_stray_keys(rows: Iterable[Row], overrides: Overrides) -> None:
    """A ``--set METHOD.NAME`` that no row of the suite would read is a mistake, not a no-op."""
    stacks = [name for row in rows for name in stack_names(row.method)]
    for key, _ in overrides.sets:
        section, name = _section(key, stacks)
        methods = (find_method(method, overrides.plugin_files) for method in stacks)
        if section == "run" and name in _READ_BY_SOME and not _reads(methods, name):
            raise FedbenchError(f"--set {key}: none of the methods reads it ({', '.join(sorted(set(stacks)))}).")
        if section == "other-method":
            head = key.partition(".")[0]
            cls = find_method(head, overrides.plugin_files)
            if name not in declared(cls.Params):
                raise unknown_name(f"hyper-parameter of {head}", name, declared(cls.Params))
            raise FedbenchError(f"--set {key}: no row runs {head}; rows run {', '.join(sorted(set(stacks)))}.")


def _reads(classes: Iterable[type[Method]], name: str) -> bool:
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
        raise FedbenchError(f"{dotted}={first['input']!r}: {_problem(first, model)}") from None
    return {name: getattr(validated, name) for name in values}


def _none_words(values: dict[str, Any]) -> dict[str, Any]:
    """The command line's word ``none`` for an optional field."""
    return {k: None if isinstance(v, str) and v.lower() == "none" and k in _NULLABLE else v for k, v in values.items()}


_NULLABLE = ("head_scale", "holdout_domain", "partition_seed")


def _problem(error: Any, model: type[BaseModel]) -> str:
    name = str(error["loc"][-1]) if error["loc"] else ""
    if error["type"] == "extra_forbidden":
        return str(unknown_name("field", name, model.model_fields))
    field = model.model_fields.get(name)
    about = f" ({field.description})" if field is not None and field.description else ""
    return f"{error['msg'][0].lower()}{error['msg'][1:]}{about}."


def _line_of(node: yaml.Node | None, location: Sequence[int | str]) -> int:
    """The line of the innermost part of ``location`` that stands in the file."""
    line = 1
    for part in location:
        if isinstance(node, yaml.MappingNode):
            found = next(((k, v) for k, v in node.value if k.value == part), None)
            if found is None:
                return line
            line, node = found[0].start_mark.line + 1, found[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            node = node.value[part]
            line = node.start_mark.line + 1
    return line
