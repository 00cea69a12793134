"""Suite files: which methods meet which settings, at which scale, and which published numbers they replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from fedbench.errors import FedbenchError, unknown_name
from fedbench.spec import stack_names

Seed = Annotated[int, Field(ge=0)]
Key = dict[str, str]
"""Columns of a file of published numbers, with the values that pick the lines a run replays."""

PUBLISHED_METRICS = {
    "global_accuracy": "accuracy",
    **{f"{group}_accuracy": f"accuracy_{group}" for group in ("head", "mid", "tail", "many", "medium", "few")},
}
"""Our name of a metric -> the published one."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("published", mode="before", check_fields=False)
    @classmethod
    def _as_keys(cls, given: object) -> object:
        keys = [given] if isinstance(given, Mapping) else given
        if not isinstance(keys, list) or not all(isinstance(key, Mapping) for key in keys):
            raise ValueError("published is a mapping from column to value, or a list of them")
        return tuple({str(column): str(value) for column, value in key.items()} for key in keys)


class Row(_Part):
    """One row of a suite: a method or stack, with its own settings."""

    method: str = Field(description="method or stack a+b")
    label: str = Field("", description="what the leaderboard calls it; the method by default")
    set: dict[str, Any] = Field(default_factory=dict, description="settings of this row, as in --set")
    at: dict[str, dict[str, Any]] = Field(default_factory=dict, description="further settings by scale")
    only: tuple[str, ...] = Field((), description="settings of the suite in which the row runs; all by default")
    published: tuple[Key, ...] = Field((), description="columns that pick the row's published numbers")


class Setting(_Part):
    """One of the settings every row meets: a cell of the paper's grid."""

    name: str = Field(min_length=1, description="what captions, --setting and the rows' `only` call it")
    set: dict[str, Any] = Field(default_factory=dict, description="data, scenario and training, as in --set")
    of: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="further settings, by a method the row runs"
    )
    published: tuple[Key, ...] = Field((), description="columns that pick the setting's published numbers")


class Scale(BaseModel):
    """A suite's grid at one size: the paper's, or small enough for a laptop."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    description: str = Field("", description="one sentence for --help and the plan")
    set: dict[str, Any] = Field(default_factory=dict, description="settings of all its runs, as in --set")
    of: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="further settings, by a method the row runs"
    )
    seeds: tuple[Seed, ...] = Field((), description="in place of the suite's")
    settings: tuple[Setting, ...] = Field(min_length=1, description="the grid")


class Suite(BaseModel):
    """Which methods meet which scenario, with which budget and seeds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1, description="what results are filed under")
    description: str = Field("", description="one sentence for `fedbench list suites`")
    dataset: str = Field("embedded", description="data set")
    backbone: str = Field("clip:embedded", description="backbone of rows that name none")
    scenario: str | dict[str, Any] = Field("longtail", description="a scenario's name, or {preset: name, field: value}")
    training: dict[str, Any] = Field(default_factory=dict, description="budget and optimiser, see Training")
    seeds: tuple[Seed, ...] = Field((0,), min_length=1, description="one run a row, setting and seed")
    scales: dict[str, Scale] = Field(default_factory=dict, description="the grid by scale, the default scale first")
    published: str = Field("", description="file of published numbers that the rows' keys refer to")
    published_metrics: dict[str, str] = Field(
        default_factory=lambda: dict(PUBLISHED_METRICS), description="our metric -> the published one"
    )
    baseline: str = Field("fedavg", description="row the others are compared with")
    headline: str = Field("global_accuracy", description="metric the leaderboard is sorted by and Δ is taken of")
    objective: str = Field(
        "", description="metric of the validation split that `fedbench tune` tunes for; the headline by default"
    )
    columns: tuple[str, ...] = Field((), description="leaderboard columns beside the headline")
    target: float | None = Field(
        None, ge=0, le=100, description="accuracy that rounds are counted to; by default what the baseline ends with"
    )
    rows: tuple[Row, ...] = Field(min_length=1, description="the methods")

    @property
    def setting_names(self) -> tuple[str, ...]:
        """Settings of all scales, in the order of the file."""
        return tuple(dict.fromkeys(setting.name for scale in self.scales.values() for setting in scale.settings))


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
        suite = Suite.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        path = [str(part) for part in first["loc"]]
        problem = problem_of(first, _model_at(path))
        raise FedbenchError(f"{where}, line {_line_of(node, first['loc'])}, {'.'.join(path)}: {problem}") from None
    for scale_name, scale in suite.scales.items():
        names = [setting.name for setting in scale.settings]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise FedbenchError(f"{where}, scales.{scale_name}.settings: {twice[0]!r} is the name of two settings.")
    run = {name for row in suite.rows for name in stack_names(row.method)}
    named = [scale.of for scale in suite.scales.values()]
    named += [setting.of for scale in suite.scales.values() for setting in scale.settings]
    for method in (method for of in named for method in of):
        if method not in run:
            raise unknown_name(f"method in {where}, under `of`:", method, run, "No row runs it.")
    scales = tuple(suite.scales)
    for position, row in enumerate(suite.rows):
        for field, given, known in (("only", row.only, suite.setting_names), ("at", tuple(row.at), scales)):
            for wrong in (asked for asked in given if asked not in known):
                place = f"{where}, line {_line_of(node, ('rows', position, field))}, rows.{position}.{field}:"
                hint = "A row names settings under `only` and scales under `at`."
                raise unknown_name(f"setting or scale in {place}", wrong, known, hint)
    return suite


def _model_at(path: Sequence[str]) -> type[BaseModel]:
    """The part of a suite in whose field an error at ``path`` lies."""
    if path[0] == "rows" and len(path) > 2:
        return Row
    if path[0] == "scales" and len(path) > 2:
        return Setting if path[2] == "settings" and len(path) > 4 else Scale
    return Suite


def problem_of(error: Any, model: type[BaseModel]) -> str:
    """One of pydantic's errors about ``model`` in fedbench's words: what is wrong, and what the field is."""
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
