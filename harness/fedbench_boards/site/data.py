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
    """One data set."""

    name: str
    card: DataCard | None
    """Of a data set that is listed."""
    typed: tuple[str, ...]
    """As runs name it, with options."""
    places: tuple[tuple[ResultsOf, BoardTable], ...]

    @property
    def slug(self) -> str:
        """Of its page."""
        return slug(self.name)

    @property
    def suites(self) -> list[ResultsOf]:
        """Whose tables have a row on it."""
        return list({results.name: results for results, _ in self.places}.values())


def name_of(dataset: str) -> str:
    """What the data set is called: by its card, else as runs name it, without options."""
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
    """Which backbones of the table learned from data of the kind that it tests on, a sentence each."""
    for backbone, dataset in dict.fromkeys((entry.backbone, entry.dataset) for entry in table.entries):
        try:
            known = pretraining_of(backbone) if backbone else None
        except FedbenchError:  # of a package that is not installed here
            known = None
        if known is not None and name_of(dataset) in known.datasets:
            yield f"{backbone} saw data of this kind in pretraining: {known.text}"
