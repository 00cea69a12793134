"""From a suite and the command line to its runs: rows of methods, crossed with settings and seeds.

Sweeps: a setting with several values makes a row of each, and two such settings a row of every pair.

A method that a suite has no row for (``--method mine``) runs on the suite's own backbone with the suite's settings, and
on every other backbone that the suite's baseline runs on with the baseline's settings there, so that its numbers stand
beside the baseline's. What the method's own recipe sets comes before either.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from fedbench.core.errors import FedbenchError, unknown_name
from fedbench.core.method.hyper import declared
from fedbench.core.spec import RunSpec, stack_names
from fedbench.datasets.catalogue import same_data
from fedbench.kinds.registry import find_method, plugins_everywhere
from fedbench.models.names import canonical_backbone
from fedbench.suites.resolve import (
    READ_BY_SOME,
    Find,
    GridCell,
    LayerSource,
    Overrides,
    checked_seed,
    finder,
    reads,
    resolve,
    section_of,
)
from fedbench.suites.suite import Row, Scale, Setting, Suite

_ONE_VALUE = ("dataset", "backbone", "text_encoder", "teacher", "templates", "device", "scenario", "metrics")
"""Settings whose value may hold a comma, or is itself a list."""
_MOST = 1000
"""Combinations of one sweep; more is a slip of the keyboard."""


def expand(suite: Suite, overrides: Overrides) -> list[RunSpec]:
    """All runs of ``suite`` by setting, row, then seed. ``--method`` picks the suite's rows of that name, or adds some.

    A setting with several values stands for as many rows (`swept`). A data set in ``overrides`` picks
    settings where it can, see `narrowed`.
    Cells that come to the same run give one spec, which carries the published keys of all of them.
    """
    with plugins_everywhere(overrides.plugin_files):
        return _expanded(suite, overrides)


def _expanded(suite: Suite, overrides: Overrides) -> list[RunSpec]:
    rows: list[Row] = list(suite.rows)
    if overrides.methods:
        rows = []
        for method in overrides.methods:
            wanted = _stack_of(method)
            chosen = [row for row in suite.rows if row.stack == wanted]
            rows += chosen or [added.row for added in added_rows(suite, "+".join(wanted), narrowed(suite, overrides))]
    find = finder(overrides)
    _refuse_stray_keys(suite, rows, overrides, find)
    overrides = narrowed(suite, overrides)
    specs: dict[str, RunSpec] = {}
    scale = _scale(suite, overrides.scale)
    backbones: set[str] = set()
    seeds = overrides.seeds or suite.seeds_of(scale)
    cells = _cells(suite, list(swept(rows)), overrides)
    for cell, (sets, values) in product(cells, combinations(overrides.sets)):
        cell = replace(cell, row=named(cell.row, values))
        first = resolve(suite, cell, seeds[0], replace(overrides, sets=sets), find)
        backbones.add(first.backbone)
        if overrides.on and first.backbone not in overrides.on:
            continue
        for seed in seeds:
            spec = first.model_copy(update={"seed": checked_seed(seed)})
            run_id = spec.run_id
            twin = specs.get(run_id)
            if twin is not None:
                further = tuple(key for key in spec.published if key not in twin.published)
                spec = twin.model_copy(update={"published": twin.published + further})
            specs[run_id] = spec
    for backbone in overrides.on:
        if backbone not in backbones:
            raise unknown_name("backbone of the chosen rows", backbone, sorted(backbones))
    if not specs:
        methods = ", ".join(row.method for row in rows)
        raise FedbenchError(
            f"nothing to run: in suite {suite.name!r} {methods} runs in none of the chosen settings; "
            "see its rows' `only`, or choose another --scale or --setting."
        )
    return list(specs.values())


def _stack_of(method: str) -> tuple[str, ...]:
    """The methods of a stack that is asked for, where each is named once."""
    names = [part.strip() for part in method.split("+")]
    twice = next((name for name in names if name and names.count(name) > 1), None)
    if twice is not None:
        raise FedbenchError(f"method {method!r} names {twice!r} twice; a stack has each method once, so leave one out.")
    return stack_names(method)


def narrowed(suite: Suite, overrides: Overrides) -> Overrides:
    """``overrides`` with the settings that ``--set dataset=D`` picks, and their scale.

    Those of the requested scale that are on D, else, where no scale was requested, those of the first scale that has
    any. Settings requested by name are taken as they are. Where no setting is on D, nothing is picked: D then takes the
    place of every setting's own data.
    """
    dataset = dict(overrides.sets).get("dataset")
    if dataset is None:
        return overrides
    for name, scale in suite.scales.items():
        if overrides.scale in ("", name):
            on = tuple(
                setting.name for setting in scale.settings if same_data(dataset, _data_of(suite, scale, setting))
            )
            if overrides.settings and set(overrides.settings) <= set(on):
                return replace(overrides, scale=name)
            if on and not overrides.settings:
                return replace(overrides, scale=name, settings=on)
    return overrides


def _data_of(suite: Suite, scale: Scale, setting: Setting) -> str:
    """The data set of ``setting``, before what rows may say."""
    return str(setting.set.get("dataset", scale.set.get("dataset", suite.dataset)))


def _cells(suite: Suite, rows: Sequence[Row], overrides: Overrides) -> Iterator[GridCell]:
    scale = _scale(suite, overrides.scale)
    if scale is None:
        if overrides.settings:
            raise FedbenchError(f"suite {suite.name!r} has no settings to choose from; leave --setting out.")
        yield from (GridCell(row) for row in rows)
        return
    name = overrides.scale or next(iter(suite.scales))
    known = [setting.name for setting in scale.settings]
    for wanted in overrides.settings:
        if wanted not in known:
            raise unknown_name(f"setting of suite {suite.name!r} at scale {name!r}", wanted, known)
    for setting in scale.settings:
        if not overrides.settings or setting.name in overrides.settings:
            for row in rows:
                if not row.only or setting.name in row.only:
                    yield GridCell(row, setting, scale, row.at.get(name))


def _scale(suite: Suite, name: str) -> Scale | None:
    if not suite.scales:
        if name:
            raise FedbenchError(f"suite {suite.name!r} has one scale only; leave --scale out.")
        return None
    if name and name not in suite.scales:
        raise unknown_name(f"scale of suite {suite.name!r}", name, suite.scales)
    return suite.scales[name or next(iter(suite.scales))]


def _refuse_stray_keys(suite: Suite, rows: Iterable[Row], overrides: Overrides, find: Find) -> None:
    """A setting of the grid or of ``--set`` that no row of the suite would read is a mistake, not a no-op."""
    everywhere = _methods(suite.rows)
    for scale_name, scale in suite.scales.items():
        where = f"suite {suite.name!r}, scale {scale_name!r}:"
        _refuse_stray(LayerSource(where, scale.set, scale, ("set",)), everywhere, find)
        for setting in scale.settings:
            where = f"suite {suite.name!r}, setting {setting.name!r}:"
            _refuse_stray(LayerSource(where, setting.set, setting, ("set",)), everywhere, find)
    stacks = _methods(rows)
    _refuse_stray(LayerSource("--set", dict(overrides.sets)), stacks, find)


def _methods(rows: Iterable[Row]) -> list[str]:
    """The methods that ``rows`` run, each once."""
    return list(dict.fromkeys(name for row in rows for name in row.stack))


def _refuse_stray(source: LayerSource, stacks: Sequence[str], find: Find) -> None:
    for key in source.settings:
        try:
            _refuse_unread(key, stacks, source.described, find)
        except FedbenchError as error:
            raise FedbenchError(f"{source.place(key)}{error}") from None


def _refuse_unread(key: str, stacks: Sequence[str], where: str, find: Find) -> None:
    """FedbenchError for a setting that there is not, or that none of the methods reads."""
    section, name = section_of(key, stacks)
    if section == "run" and name in READ_BY_SOME and not reads(map(find, stacks), name):
        raise FedbenchError(f"{where} {key}: none of the methods reads it ({', '.join(sorted(stacks))}).")
    if section == "other-method":
        head = key.partition(".")[0]
        try:
            cls = find(head)
        except FedbenchError as error:
            raise FedbenchError(f"{where} {key}: {error}") from None
        if name not in declared(cls.Params):
            raise unknown_name(f"hyper-parameter of {head}", name, declared(cls.Params))
        raise FedbenchError(f"{where} {key}: no row runs {head}; rows run {', '.join(sorted(stacks))}.")


# --- sweeps


def combinations(sets: Sequence[tuple[str, str]]) -> list[tuple[tuple[tuple[str, str], ...], dict[str, str]]]:
    """Every choice of one value a key from ``sets``, whose values are separated by commas: ``fedprox.mu=0.1,0.01``.

    With each the part of it that has several values. FedbenchError for an empty value, one that stands twice, and too
    many combinations.
    """
    values = {key: _values(key, text) for key, text in sets}
    several = [key for key, given in values.items() if len(given) > 1]
    return [(tuple(choice.items()), {key: choice[key] for key in several}) for choice in _choices(values)]


def swept(rows: Sequence[Row]) -> Iterator[Row]:
    """``rows``, of those whose ``set`` has lists a row for every combination of their values, named by them."""
    for row in rows:
        lists = {key: value for key, value in row.set.items() if isinstance(value, list) and _may_sweep(key)}
        try:
            choices = _choices(lists)
        except FedbenchError as error:
            raise FedbenchError(f"{row.place('set')}{error}") from None
        yield from (named(row.model_copy(update={"set": row.set | choice}), choice) for choice in choices)


def named(row: Row, values: Mapping[str, Any]) -> Row:
    """``row``, whose label says which of a sweep's ``values`` it has: ``fedprox, mu=0.1``."""
    heads = {"training", "scenario", *row.stack}
    own = [(key, value) for key, value in values.items() if "." not in key or key.partition(".")[0] in heads]
    words = [f"{key.rpartition('.')[2]}={value}" for key, value in own]
    return row.model_copy(update={"label": ", ".join([row.label or row.method, *words])}) if words else row


def _choices(values: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    for key, given in values.items():
        if not given or any(given.count(value) > 1 for value in given):
            raise FedbenchError(
                f"{key}={','.join(map(str, given))}: a sweep's values must differ, and there must be some."
            )
    count = 1
    for given in values.values():
        count *= len(given)
    if count > _MOST:
        raise FedbenchError(f"the sweeps over {', '.join(values)} have {count} combinations; at most {_MOST} are run.")
    return [dict(zip(values, choice, strict=True)) for choice in product(*values.values())]


def _values(key: str, text: Any) -> list[Any]:
    # code may set a value itself; what is typed is text
    if not _may_sweep(key) or not isinstance(text, str):
        return [text]
    parts = [part.strip() for part in text.split(",")]
    if "" in parts and len(parts) > 1:
        raise FedbenchError(f"--set {key}={text}: there is an empty value between its commas.")
    return parts


def _may_sweep(key: str) -> bool:
    return key.rpartition(".")[2] not in _ONE_VALUE and not key.startswith("backbone.")


# --- rows for methods that a suite has none for


@dataclass(frozen=True)
class Added:
    """A row that the command line adds to a suite."""

    row: Row
    backbones: tuple[str, ...]
    """One, or those of the grid's settings."""
    like: str = ""
    """What the suite calls the row whose settings it has; empty for the suite's own settings."""


def added_rows(suite: Suite, method: str, overrides: Overrides) -> list[Added]:
    """The rows of ``method``, which has none in ``suite``; where a backbone is given, the one row that fits it."""
    grid = _Grid.of(suite, overrides)
    mine = Added(Row(method=method), tuple(dict.fromkeys(grid.own.values())))
    uses_own = any(grid.backbone(row) is None for row in grid.rows)
    further = list(_beside(_references(grid.rows, suite), method, grid, uses_own, _decided(method, overrides)))
    given = dict(overrides.sets).get("backbone")
    if given is not None:
        return [added for added in further if canonical_backbone(given) in added.backbones][:1] or [mine]
    return [mine, *further] if uses_own or not further else further


def text_of_added(suite: Suite, overrides: Overrides) -> Iterator[str]:
    """A line for each method of ``overrides`` without a row in ``suite``, where backbones had to be chosen."""
    grid = _Grid.of(suite, overrides)
    named = {backbone for row in grid.rows if (backbone := grid.backbone(row)) is not None}
    for method in overrides.methods if named - {*grid.own.values()} else ():
        if is_added(suite, method):
            rows = added_rows(suite, method, overrides)
            parts = [f"on {', '.join(added.backbones)} with {_inherited(added, grid.scale)}" for added in rows]
            left = sorted(named - {backbone for added in rows for backbone in added.backbones})
            beside = f"; not on {', '.join(left)} (--set backbone=NAME chooses one)" if left else ""
            yield f"{method} has no row in suite {suite.name}; it runs {' and '.join(parts)}{beside}"


def is_added(suite: Suite, method: str) -> bool:
    """Whether no row of ``suite`` runs the stack ``method``."""
    return stack_names(method) not in {row.stack for row in suite.rows}


@dataclass(frozen=True)
class _Grid:
    """The part of a suite that is run."""

    scale: str
    own: Mapping[str, str]
    """The backbone of rows that name none, by setting; by no name in a suite without a grid."""
    rows: tuple[Row, ...]

    @classmethod
    def of(cls, suite: Suite, overrides: Overrides) -> _Grid:
        name = overrides.scale or next(iter(suite.scales), "")
        scale = suite.scales.get(name)
        if scale is None:  # an unknown one is refused when the suite is expanded
            return cls(name, {"": canonical_backbone(suite.backbone)}, suite.rows)
        chosen = [setting for setting in scale.settings if not overrides.settings or setting.name in overrides.settings]
        of_scale = scale.set.get("backbone", suite.backbone)
        own = {setting.name: canonical_backbone(str(setting.set.get("backbone", of_scale))) for setting in chosen}
        return cls(name, own, tuple(row for row in suite.rows if not row.only or set(row.only) & set(own)))

    def backbone(self, row: Row) -> str | None:
        """The one that ``row`` names itself."""
        named = row.at.get(self.scale, {}).get("backbone", row.set.get("backbone"))
        return None if named is None else canonical_backbone(str(named))


def _references(rows: Sequence[Row], suite: Suite) -> list[Row]:
    """The rows of the baseline; if it has none, those of the first method."""
    name = suite.baseline.partition(" · ")[0]
    baselines = [row for row in rows if name in (row.label, row.method, "+".join(row.stack))]
    return baselines or [row for row in rows if row.method == rows[0].method]


def _beside(
    references: Iterable[Row], method: str, grid: _Grid, uses_own: bool, decided: Collection[str]
) -> Iterator[Added]:
    """A row for each backbone that a reference names, in the settings in which the method has it from no other row."""
    taken = {(name, backbone) for name, backbone in grid.own.items() if uses_own}
    for row in references:
        backbone = grid.backbone(row)
        names = [name for name in grid.own if not row.only or name in row.only]
        free = [name for name in names if (name, backbone) not in taken]
        if backbone is not None and free:
            taken |= {(name, backbone) for name in free}
            made = Row(
                method=method,
                set=_shared(LayerSource("", row.set, row, ("set",)), decided),
                at={name: _shared(LayerSource("", own, row, ("at", name)), decided) for name, own in row.at.items()},
                only=() if len(free) == len(grid.own) else tuple(free),
            )
            yield Added(made, (backbone,), row.label or row.method)


def _decided(method: str, overrides: Overrides) -> set[str]:
    """Names of the settings that the stack's recipes or the command line set."""
    recipes = [find_method(name, overrides.plugin_files).recipe for name in stack_names(method)]
    given = {key.removeprefix("training.").removeprefix("scenario.") for key, _ in overrides.sets}
    return given.union(*recipes)


def _shared(source: LayerSource, decided: Collection[str]) -> dict[str, Any]:
    """A row's settings of run, data and training that nobody has ``decided``."""
    shared = {}
    for key, value in source.settings.items():
        try:
            section, name = section_of(key, ())
        except FedbenchError as error:
            raise FedbenchError(f"{source.place(key)}{error}") from None
        if section != "other-method" and name not in {*READ_BY_SOME, *decided}:
            shared[key] = value
    return shared


def _inherited(one: Added, scale: str) -> str:
    settings = {**one.row.set, **one.row.at.get(scale, {})}
    values = ", ".join(f"{key}={value}" for key, value in settings.items() if key != "backbone")
    return f"{values} from the row {one.like}" if values else "the suite's settings"
