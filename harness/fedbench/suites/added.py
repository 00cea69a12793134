"""Rows for a method that a suite has none for (``--method mine``): on which backbones, and with whose settings.

It runs on the suite's own backbone with the suite's settings, and on every other backbone that the suite's baseline
runs on with the baseline's settings there, so that its numbers stand beside the baseline's. What the method's own
recipe sets comes before either.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedbench.core.errors import FedbenchError
from fedbench.core.spec import stack_names
from fedbench.kinds.registry import find_method
from fedbench.models.names import canonical_backbone
from fedbench.suites.layers import READ_BY_SOME, LayerSource, section_of
from fedbench.suites.resolve import Overrides
from fedbench.suites.suite import Row, Suite


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
        return [one for one in further if canonical_backbone(given) in one.backbones][:1] or [mine]
    return [mine, *further] if uses_own or not further else further


def text_of_added(suite: Suite, overrides: Overrides) -> Iterator[str]:
    """A line for each method of ``overrides`` without a row in ``suite``, where backbones had to be chosen."""
    grid = _Grid.of(suite, overrides)
    named = {backbone for row in grid.rows if (backbone := grid.backbone(row)) is not None}
    for method in overrides.methods if named - {*grid.own.values()} else ():
        if is_added(suite, method):
            rows = added_rows(suite, method, overrides)
            parts = [f"on {', '.join(one.backbones)} with {_inherited(one, grid.scale)}" for one in rows]
            left = sorted(named - {backbone for one in rows for backbone in one.backbones})
            beside = f"; not on {', '.join(left)} (--backbone chooses one)" if left else ""
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
        chosen = [one for one in scale.settings if not overrides.settings or one.name in overrides.settings]
        of_scale = scale.set.get("backbone", suite.backbone)
        own = {one.name: canonical_backbone(str(one.set.get("backbone", of_scale))) for one in chosen}
        return cls(name, own, tuple(row for row in suite.rows if not row.only or set(row.only) & set(own)))

    def backbone(self, row: Row) -> str | None:
        """The one that ``row`` names itself."""
        named = row.at.get(self.scale, {}).get("backbone", row.set.get("backbone"))
        return None if named is None else canonical_backbone(str(named))


def _references(rows: Sequence[Row], suite: Suite) -> list[Row]:
    """Of ``rows`` the baseline's; where there is none, those of the method that stands first."""
    name = suite.baseline.partition(" · ")[0]
    found = [row for row in rows if name in (row.label, row.method, "+".join(row.stack))]
    return found or [row for row in rows if row.method == rows[0].method]


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
    """Of a row's settings those of the run, its data and its training that nobody has ``decided``."""
    found = {}
    for key, value in source.settings.items():
        try:
            section, name = section_of(key, ())
        except FedbenchError as error:
            raise FedbenchError(f"{source.place(key)}{error}") from None
        if section != "other-method" and name not in {*READ_BY_SOME, *decided}:
            found[key] = value
    return found


def _inherited(one: Added, scale: str) -> str:
    settings = {**one.row.set, **one.row.at.get(scale, {})}
    values = ", ".join(f"{key}={value}" for key, value in settings.items() if key != "backbone")
    return f"{values} from the row {one.like}" if values else "the suite's settings"
