"""What the site says of a method: of its class where it is installed, and its ranks in all result folders."""

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
        """Of the row, on the suite's page and in the folder's own."""
        return f"{self.table.anchor}-row-{self.table.entries.index(self.entry)}"


@dataclass(frozen=True)
class Parameter:
    """A hyper-parameter in words."""

    name: str
    symbol: str
    default: str
    bounds: str
    searched: str
    neutral: str
    source: str


@dataclass(frozen=True)
class MethodOf:
    """One method."""

    name: str
    description: Description | None
    """None where it is not installed here, or can't be used."""
    told: Told | None
    parameters: tuple[Parameter, ...]
    source: str
    """Path of its module."""
    is_ours: bool
    """Whether that is a path in fedbench's repository."""
    places: tuple[RankedRow, ...]

    @property
    def slug(self) -> str:
        """Of its page."""
        return slug(self.name)

    @property
    def first(self) -> int:
        """In how many tables a row of it has rank 1."""
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
    found = []
    for name in sorted({*modules, *places}):
        source, is_ours = source_of(modules[name]) if name in modules else ("", False)
        description = _described(known, name) if name in modules else None
        found.append(
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
    return found


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
