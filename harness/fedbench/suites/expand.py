"""From a suite and the command line to its runs: rows of methods, crossed with settings and seeds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product

from fedbench.core.errors import FedbenchError, unknown_name
from fedbench.core.method.hyper import declared
from fedbench.core.spec import RunSpec, stack_names
from fedbench.datasets.catalogue import same_data
from fedbench.kinds.files import plugins_everywhere
from fedbench.suites.added import added_rows
from fedbench.suites.layers import READ_BY_SOME, LayerSource, reads, section_of
from fedbench.suites.resolve import Cell, Find, Overrides, checked_seed, finder, resolve
from fedbench.suites.suite import Row, Scale, Setting, Suite
from fedbench.suites.sweeps import combinations, named, swept


def expand(suite: Suite, overrides: Overrides) -> list[RunSpec]:
    """All runs of ``suite`` by setting, row, then seed. ``--method`` picks the suite's rows of that name, or adds some.

    A setting with several values stands for as many rows (`fedbench.suites.sweeps`). A data set in ``overrides`` picks
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
            rows.extend(chosen or (one.row for one in added_rows(suite, "+".join(wanted), narrowed(suite, overrides))))
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


def _cells(suite: Suite, rows: Sequence[Row], overrides: Overrides) -> Iterator[Cell]:
    scale = _scale(suite, overrides.scale)
    if scale is None:
        if overrides.settings:
            raise FedbenchError(f"suite {suite.name!r} has no settings to choose from; leave --setting out.")
        yield from (Cell(row) for row in rows)
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
                    yield Cell(row, setting, scale, row.at.get(name))


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
