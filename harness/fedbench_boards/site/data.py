"""The data sets of all result folders, each by the name that its card has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fedbench.core.errors import FedbenchError
from fedbench.datasets.catalogue import DataCard, card_of, plain_name
from fedbench.models import pretraining_of
from fedbench_boards.site.model import BoardTable, ResultsOf
from fedbench_boards.site.names import slug


@dataclass(frozen=True)
class DataOf:
    """A data set in the results."""

    name: str
    card: DataCard | None
    """The card of a listed data set; None for others."""
    typed: tuple[str, ...]
    """The names that runs have for it, with options."""
    places: tuple[tuple[ResultsOf, BoardTable], ...]

    @property
    def slug(self) -> str:
        return slug(self.name)

    @property
    def suites(self) -> list[ResultsOf]:
        """The result folders with a row on it."""
        return list({results.name: results for results, _ in self.places}.values())


def name_of(dataset: str) -> str:
    """The data set's name: that of its card, else the runs' name without options."""
    card = card_of(dataset)
    return card.title if card is not None else plain_name(dataset)


def data_of(folders: Sequence[ResultsOf]) -> list[DataOf]:
    """The data sets, by name."""
    typed: dict[str, dict[str, None]] = {}
    places: dict[str, dict[tuple[str, int], tuple[ResultsOf, BoardTable]]] = {}
    for results in folders:
        for table, entry in results.entries:
            if entry.dataset:
                name = name_of(entry.dataset)
                typed.setdefault(name, {})[entry.dataset] = None
                places.setdefault(name, {})[results.name, table.number] = (results, table)
    return [
        DataOf(name, card_of(next(iter(typed[name]))), tuple(typed[name]), tuple(places[name].values()))
        for name in sorted(places, key=str.lower)
    ]


def seen_in(table: BoardTable) -> Iterator[str]:
    """A sentence for each backbone of the table that was trained on data of the kind that it is tested on."""
    for backbone, dataset in dict.fromkeys((entry.backbone, entry.dataset) for entry in table.entries):
        try:
            known = pretraining_of(backbone) if backbone else None
        except FedbenchError:  # of a package that is not installed here
            known = None
        if known is not None and name_of(dataset) in known.datasets:
            yield f"{backbone} saw data of this kind in pretraining: {known.text}"
