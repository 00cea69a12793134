"""Methods on the site: from their classes if they are installed, with their ranks in all result folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedbench.core.errors import FedbenchError
from fedbench.kinds.registry import METHOD, installed
from fedbench.plugins.description import Description, Descriptions
from fedbench_boards.site.model import BoardLine, BoardTable, ResultsOf
from fedbench_boards.site.names import slug, source_of
from fedbench_boards.site.text import Told, told


@dataclass(frozen=True)
class RankedRow:
    """A row of a table of a folder."""

    results: ResultsOf
    table: BoardTable
    entry: BoardLine

    @property
    def anchor(self) -> str:
        """Anchor of the row, on the suite's page and in the folder's own."""
        return f"{self.table.anchor}-row-{self.table.entries.index(self.entry)}"


@dataclass(frozen=True)
class Parameter:
    """A hyper-parameter described in words."""

    name: str
    symbol: str
    default: str
    bounds: str
    searched: str
    neutral: str
    source: str


@dataclass(frozen=True)
class MethodOf:
    """A method of the site."""

    name: str
    description: Description | None
    """None if the method is not installed here, or can't be used."""
    told: Told | None
    parameters: tuple[Parameter, ...]
    source: str
    """Path of the method's module."""
    is_ours: bool
    """Whether ``source`` is a path in fedbench's repository."""
    places: tuple[RankedRow, ...]

    @property
    def slug(self) -> str:
        return slug(self.name)

    @property
    def first(self) -> int:
        """The number of tables in which one of its rows has rank 1."""
        return sum(place.entry.rank == 1 for place in self.places)


def methods_of(folders: Sequence[ResultsOf]) -> list[MethodOf]:
    """The installed methods and those that only results have, by name."""
    places: dict[str, list[RankedRow]] = {}
    for results in folders:
        for table, entry in results.entries:
            for name in entry.methods:
                places.setdefault(name, []).append(RankedRow(results, table, entry))
    modules = {point.name: point.value.partition(":")[0] for point in installed(METHOD)}
    known = Descriptions()
    methods = []
    for name in sorted({*modules, *places}):
        source, is_ours = source_of(modules[name]) if name in modules else ("", False)
        description = _described(known, name) if name in modules else None
        methods.append(
            MethodOf(
                name=name,
                description=description,
                told=told(description.text) if description else None,
                parameters=_parameters(description) if description else (),
                source=source,
                is_ours=is_ours,
                places=tuple(places.get(name, ())),
            )
        )
    return methods


def _described(known: Descriptions, name: str) -> Description | None:
    try:
        return known.of(name)
    except FedbenchError:  # a page that says so is of more use than no site
        return None


def _parameters(description: Description) -> tuple[Parameter, ...]:
    return tuple(map(_parameter, description.parameters, description.searched))


def _parameter(row: Sequence[str], searched: str) -> Parameter:
    name, symbol, _, default, bounds, neutral, source = row
    return Parameter(name, symbol, default, bounds.partition(", tuned ")[0], searched or "no", neutral, source)
