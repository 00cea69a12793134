"""What a suite says: which methods meet which settings, at which scale; and the suite of runs without a file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from fedbench.core.errors import FedbenchError, unknown_name
from fedbench.core.metric_names import GROUPS
from fedbench.core.scenario import Scenario
from fedbench.core.spec import BUDGET, MOST_SEED, RunSpec, Training, no_bool, stack_names
from fedbench.kinds.measured import column_metric, objective_metric, printed_metric, ranking_metric
from fedbench.scenarios.presets import PRESETS
from fedbench.suites.files import Lines, extended, line_of, read_yaml, suite_bytes, suite_files

LONGEST_NAME = 100
Key = dict[str, str]
"""Columns of a file of published numbers, with the values that pick the lines a run replays."""

PUBLISHED_METRICS: dict[str, Key] = {
    "global_accuracy": {"metric": "accuracy"},
    **{f"{group}_accuracy": {"metric": f"accuracy_{group}"} for group in GROUPS},
}
"""Our name of a metric -> the columns of the published one."""


def _columns_of(printed: object) -> object:
    """The columns that pick a metric's numbers; a name alone is that of the column ``metric``."""
    return {"metric": printed} if isinstance(printed, str) else printed


def _as_key(given: object) -> object:
    """A mapping's columns and values as text."""
    return {str(column): str(value) for column, value in given.items()} if isinstance(given, Mapping) else given


def _shown(name: str) -> str:
    """``name``, if it can stand in a table, a file's name and a terminal."""
    if not name.isprintable() or name != name.strip():
        raise ValueError("it must be printable, without spaces at its ends")
    if name and not any(character.isalnum() for character in name):
        raise ValueError("it must have a letter or a digit")
    if len(name.encode()) > LONGEST_NAME:
        raise ValueError(f"it must have at most {LONGEST_NAME} bytes")
    return name


def _plain(name: str) -> str:
    """``name``, if it is that of a file in a folder and leads nowhere else."""
    if name and (Path(name).name != name or name.startswith(".")):
        raise ValueError("it must be the name of a file, without folders and ending")
    return name


Name = Annotated[str, Field(max_length=LONGEST_NAME), AfterValidator(_shown)]
Seed = Annotated[int, BeforeValidator(no_bool), Field(ge=0, le=MOST_SEED)]
Accuracy = Annotated[str, AfterValidator(ranking_metric)]


@dataclass(frozen=True)
class PlaceInFile:
    """The place of a part of a suite: its file, the lines of all that is in the file, and the path to it there."""

    file: str
    lines: Lines
    path: tuple[int | str, ...] = ()


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    _place: PlaceInFile | None = PrivateAttr(None)

    def place(self, *further: int | str) -> str:
        """``mine.yaml, line 7, rows.1.set.lr: `` for what stands ``further`` in this part; "" for one of no file."""
        if self._place is None:
            return ""
        path = (*self._place.path, *further)
        return f"{self._place.file}, line {line_of(self._place.lines, path)}, {'.'.join(map(str, path))}: "


class _Replaying(_Part):
    """A part whose runs replay published numbers."""

    @field_validator("published", mode="before", check_fields=False)
    @classmethod
    def _as_keys(cls, given: object) -> object:
        keys = [given] if isinstance(given, Mapping) else given
        if not isinstance(keys, list) or not all(isinstance(key, Mapping) for key in keys):
            raise ValueError("published is a mapping from column to value, or a list of them")
        return tuple(_as_key(key) for key in keys)


class Row(_Replaying):
    """One row of a suite: a method or stack, with its own settings."""

    method: str = Field(description="method or stack a+b")
    label: Name = Field("", description="what the leaderboard calls it; the method by default")
    set: dict[str, Any] = Field(default_factory=dict, description="settings of this row, as in --set")
    at: dict[str, dict[str, Any]] = Field(default_factory=dict, description="further settings by scale")
    only: tuple[str, ...] = Field((), description="settings of the suite in which the row runs; all by default")
    published: tuple[Key, ...] = Field((), description="columns that pick the row's published numbers")

    @property
    def stack(self) -> tuple[str, ...]:
        """The names of its methods."""
        return stack_names(self.method)


class Setting(_Replaying):
    """One of the settings every row meets: a cell of the paper's grid."""

    name: Name = Field(min_length=1, description="what captions, --setting and the rows' `only` call it")
    set: dict[str, Any] = Field(default_factory=dict, description="data, scenario and training, as in --set")
    of: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="further settings, by a method the row runs"
    )
    headline: Annotated[Accuracy | None, Field(description="in place of the suite's")] = None
    published: tuple[Key, ...] = Field((), description="columns that pick the setting's published numbers")


class Mean(_Part):
    """A mean over settings, as papers print it in one more column."""

    name: Name = Field(min_length=1, description="what its table is called")
    over: tuple[str, ...] = Field(min_length=2, description="names of settings")
    published: Annotated[Key, BeforeValidator(_as_key)] = Field(
        default_factory=dict, description="columns in place of the settings', to pick its published numbers"
    )


class Scale(_Part):
    """A suite's grid at one size: the paper's, or small enough for a laptop."""

    description: str = Field("", description="one sentence for --help and the plan")
    set: dict[str, Any] = Field(default_factory=dict, description="settings of all its runs, as in --set")
    of: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="further settings, by a method the row runs"
    )
    seeds: tuple[Seed, ...] = Field((), description="in place of the suite's")
    settings: tuple[Setting, ...] = Field(min_length=1, description="the grid")


class Suite(_Part):
    """A table of methods and scenarios, with budget and seeds."""

    name: Name = Field(min_length=1, description="what results are filed under")
    description: str = Field("", description="one sentence for `fedbench list suites`")
    version: Annotated[int, BeforeValidator(no_bool)] = Field(
        1, ge=1, le=1_000_000, description="counted up when results of before are no longer to be compared with"
    )
    changes: dict[int, str] = Field(default_factory=dict, description="what is new in each version, from 2 on")
    dataset: str = Field("embedded", description="data set")
    backbone: str = Field("clip:embedded", description="backbone of rows that name none")
    scenario: str | dict[str, Any] = Field("longtail", description="a scenario's name, or {preset: name, field: value}")
    training: dict[str, Any] = Field(default_factory=dict, description="budget and optimiser, see Training")
    seeds: tuple[Seed, ...] = Field((0,), min_length=1, description="one run a row, setting and seed")
    scales: dict[Name, Scale] = Field(default_factory=dict, description="the grid by scale, the default scale first")
    means: tuple[Mean, ...] = Field((), description="means over settings, a table each")
    published: Annotated[str, AfterValidator(_plain)] = Field(
        "", description="file of published numbers that the rows' keys refer to"
    )
    published_metrics: dict[
        Annotated[str, AfterValidator(printed_metric)], Annotated[Key, BeforeValidator(_columns_of)]
    ] = Field(default_factory=lambda: dict(PUBLISHED_METRICS), description="our metric -> the published one's columns")
    baseline: str = Field("fedavg", description="row the others are compared with")
    headline: Accuracy = Field("global_accuracy", description="metric the leaderboard is sorted by and Δ is taken of")
    objective: Annotated[str, AfterValidator(objective_metric)] = Field(
        "", description="metric of the validation split that `fedbench tune` tunes for; the headline by default"
    )
    columns: tuple[Annotated[str, AfterValidator(column_metric)], ...] = Field(
        (), description="leaderboard columns beside the headline"
    )
    target: Annotated[float | None, BeforeValidator(no_bool)] = Field(
        None, ge=0, le=100, description="accuracy that rounds are counted to; by default what the baseline ends with"
    )
    rows: tuple[Row, ...] = Field(min_length=1, description="the methods")
    _text: str = PrivateAttr("")

    @field_validator("changes")
    @classmethod
    def _are_of_its_versions(cls, changes: dict[int, str], info: ValidationInfo) -> dict[int, str]:
        version = info.data.get("version", 1)
        stray = sorted(number for number in changes if not 2 <= number <= version)
        if stray:
            raise ValueError(f"version {stray[0]} is none from 2 to the suite's version, {version}")
        return changes

    @property
    def text(self) -> str:
        """The file that it was read from; "" for a suite of no file."""
        return self._text

    @property
    def text_hash(self) -> str:
        """sha256 of `text`, which every run records; "" for a suite of no file."""
        return sha256(self._text.encode()).hexdigest() if self._text else ""

    @property
    def file(self) -> str:
        """The file's name as it was given; "" for a suite of none."""
        return "" if self._place is None else self._place.file

    def seeds_of(self, scale: Scale | None) -> tuple[Seed, ...]:
        """Seeds of the runs at ``scale``: the scale's own, or else the suite's."""
        return (scale.seeds if scale is not None else ()) or self.seeds

    def ranked_by(self, metric: str) -> Suite:
        """The suite with ``metric`` for a headline, in every setting."""
        scales = {}
        for name, scale in self.scales.items():
            settings = tuple(setting.model_copy(update={"headline": None}) for setting in scale.settings)
            scales[name] = scale.model_copy(update={"settings": settings})
        return self.model_copy(update={"headline": metric, "scales": scales})

    def headline_of(self, setting: str) -> str:
        """What the runs of ``setting`` are ranked by."""
        settings = (each for scale in self.scales.values() for each in scale.settings if each.name == setting)
        return next((each.headline for each in settings if each.headline), self.headline)

    @property
    def headlines(self) -> tuple[str, ...]:
        """What tables are ranked by, each metric once."""
        return tuple(dict.fromkeys([self.headline, *map(self.headline_of, self.setting_names)]))

    @property
    def setting_names(self) -> tuple[str, ...]:
        """Settings of all scales, in the order of the file."""
        return tuple(dict.fromkeys(setting.name for scale in self.scales.values() for setting in scale.settings))


def suite_names() -> list[str]:
    """The suites of all installed packages, in alphabetical order."""
    return list(suite_files())


def load_suite(name: str) -> Suite:
    """A suite by name, or any suite file by path. FedbenchError names file, line, field and what is allowed."""
    return parse_suite(*suite_bytes(name))


def parse_suite(text: str | bytes, where: str) -> Suite:
    """The suite in ``text``; ``where`` is the file's name in errors."""
    content, lines = read_yaml(text, where)
    if not isinstance(content, dict):
        raise FedbenchError(f"{where}, line 1: a suite is a mapping with name, scenario and rows.")
    is_extended = "extends" in content
    content, rows = extended(content, where)
    lines = {_in_whole(path, rows): line for path, line in lines.items()}
    try:
        suite = Suite.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        path = [str(part) for part in first["loc"]]
        problem = problem_of(first, _model_at(path))
        raise FedbenchError(f"{where}, line {line_of(lines, first['loc'])}, {'.'.join(path)}: {problem}") from None
    _place(suite, PlaceInFile(where, lines))
    suite._text = text if isinstance(text, str) else text.decode()
    if is_extended:
        # what is recorded says it all, whatever becomes of the other file
        suite._text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    for scale in suite.scales.values():
        names = [setting.name for setting in scale.settings]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise FedbenchError(f"{scale.place('settings')}{twice[0]!r} is the name of two settings.")
    run = {name for row in suite.rows for name in row.stack}
    scaled: list[Scale | Setting] = list(suite.scales.values())
    scaled += [setting for scale in suite.scales.values() for setting in scale.settings]
    for part in scaled:
        for method in (method for method in part.of if method not in run):
            unknown = unknown_name("method under `of`", method, run, "No row runs it.")
            raise FedbenchError(f"{part.place('of', method)}{unknown}")
    _refuse_unknown_baseline(suite)
    for wrong in (name for mean in suite.means for name in mean.over if name not in suite.setting_names):
        raise FedbenchError(f"{suite.place('means')}{unknown_name('setting', wrong, suite.setting_names)}")
    scales = tuple(suite.scales)
    for row in suite.rows:
        for field, given, known in (("only", row.only, suite.setting_names), ("at", tuple(row.at), scales)):
            for wrong in (name for name in given if name not in known):
                hint = "A row names settings under `only` and scales under `at`."
                raise FedbenchError(f"{row.place(field)}{unknown_name('setting or scale', wrong, known, hint)}")
    return suite


def _in_whole(path: tuple[int | str, ...], rows: Mapping[int, int]) -> tuple[int | str, ...]:
    """``path`` in the file as it is in the whole suite, where the file's rows have other places."""
    if len(path) > 1 and path[0] == "rows" and isinstance(path[1], int):
        return ("rows", rows.get(path[1], path[1]), *path[2:])
    return path


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
    problem = error["msg"].removeprefix("Value error, ")
    return f"{problem[0].lower()}{problem[1:]}{about}."


def _place(suite: Suite, place: PlaceInFile) -> None:
    """Tell every part of ``suite`` where it stands, so that errors found later can say it as well."""
    suite._place = place
    for position, row in enumerate(suite.rows):
        row._place = replace(place, path=("rows", position))
    for name, scale in suite.scales.items():
        scale._place = replace(place, path=("scales", name))
        for position, setting in enumerate(scale.settings):
            setting._place = replace(place, path=("scales", name, "settings", position))


def _refuse_unknown_baseline(suite: Suite) -> None:
    """A baseline that was written down has to be a row: its label, its method, or all of what it is called."""
    known = {name for row in suite.rows for name in (row.label, row.method, "+".join(row.stack)) if name}
    if "baseline" in suite.model_fields_set and suite.baseline.partition(" · ")[0] not in known:
        raise FedbenchError(f"{suite.place('baseline')}{unknown_name('row', suite.baseline, known)}")


ADHOC = "adhoc"
"""The suite of all runs without a suite file, and what the names of its groups begin with: ``adhoc/label-skew``."""


def single(scenario: str | None = None, dataset: str | None = None, backbone: str | None = None) -> Suite:
    """The suite of a run without a suite file: the methods come from the command line."""
    given: dict[str, Any] = {"dataset": dataset, "backbone": backbone, "scenario": scenario}
    return Suite(name=ADHOC, rows=(Row(method="fedavg"),), **{k: v for k, v in given.items() if v is not None})


def group_of(spec: RunSpec) -> str:
    """What a run without a suite file is filed under: ``adhoc/label-skew/embedded/dirichlet_alpha=0.1,rounds=5``.

    The scenario nearest to the run's, the data set, and in what the run differs from that scenario and the usual
    budget: what runs of one table share. Other methods, backbones, optimisers and seeds are of the same group.
    """
    head = _head(spec.scenario.partition)
    near = [name for name, preset in PRESETS.items() if _head(preset.partition) == head] or ["iid"]
    differing = {name: _differing(spec.scenario, PRESETS[name]) for name in near}
    scenario = min(near, key=lambda name: (len(differing[name]), _foreign(PRESETS[name], differing[name])))
    budget = {name: value for name, value in _differing(spec.training, Training()).items() if name in BUDGET}
    settings = ",".join(f"{name}={_text(value)}" for name, value in (differing[scenario] | budget).items())
    return "/".join(filter(None, [ADHOC, scenario, spec.dataset, settings]))


def asked_for(suite: str, specs: Iterable[RunSpec]) -> str:
    """The name by which its runs are read again: its own, or what the groups of runs without a suite file share."""
    if suite != ADHOC:
        return suite
    return "/".join(os.path.commonprefix([group_of(spec).split("/") for spec in specs])) or ADHOC


def may_hold(experiment: str, suite: str | None) -> bool:
    """Whether runs that are read as ``suite`` (None: all) may be among those filed under ``experiment``."""
    return suite is None or suite == experiment or (experiment == ADHOC and _is_group(suite))


def is_read_as(name: str, suite: str | None) -> bool:
    """Whether what is called ``name`` is read as ``suite``: it is so called, or is a group in it."""
    return suite in (None, name) or (suite == ADHOC or _is_group(suite)) and name.startswith(f"{suite}/")


def _is_group(suite: str | None) -> bool:
    return suite is not None and suite.startswith(f"{ADHOC}/")


def _differing(one: BaseModel, other: BaseModel) -> dict[str, Any]:
    return {name: value for name, value in one if value != getattr(other, name)}


def _head(partition: str) -> str:
    return partition.partition("?")[0].partition(":")[0]


def _foreign(preset: Scenario, differing: Iterable[str]) -> int:
    """How many of the fields the preset leaves at their defaults: other ``label_noise`` is nearer to noisy-labels."""
    return len(set(differing) - set(_differing(preset, Scenario())))


def _text(value: object) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
