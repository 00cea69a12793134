"""One cell of a suite, with the command line's settings, as a complete run spec.

Precedence, weakest first: fedbench's defaults, the suite's `training`, the scale's `set`, the setting's, the method's
`recipe` (optimiser only), what scale and setting say `of` the method, the row's `set`, its `at` of the scale, `--set`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from fedbench.core.errors import FedbenchError
from fedbench.core.method.base import AnyMethod
from fedbench.core.method.hyper import declared
from fedbench.core.scenario import Scenario
from fedbench.core.spec import MOST_SEED, RunSpec, Training
from fedbench.datasets.catalogue import same_data
from fedbench.models.names import canonical_backbone
from fedbench.plugins.assembly import find_method
from fedbench.plugins.roles import role_of
from fedbench.suites.layers import LISTS, Draft, LayerSource
from fedbench.suites.published_keys import Key
from fedbench.suites.safe_yaml import read_yaml
from fedbench.suites.suite import Row, Scale, Setting, Suite

"""Run settings that may have several values."""
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


def resolve(suite: Suite, cell: Cell, seed: int, overrides: Overrides, find: Find | None = None) -> RunSpec:
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
        return read_yaml(text, key)[1]
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
