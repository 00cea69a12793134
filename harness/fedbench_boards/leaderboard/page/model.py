"""The content of a page for its template: sections with tables and charts, an overview, how to make it again."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from fedbench_boards.leaderboard.page.charts import HeatMap


@dataclass(frozen=True)
class PageColumn:
    """A column: ``first`` is the direction of the first sort, "ascending" or "descending"."""

    key: str
    heading: str
    explained: str = ""
    first: str = "descending"


@dataclass(frozen=True)
class PageCell:
    """``shown`` and ``spread`` for readers; ``value`` and ``deviation`` in full, "" where there is none."""

    shown: str
    value: str = ""
    spread: str = ""
    deviation: str = ""
    best: bool = False
    mark: str = ""
    note: str = ""
    title: str = ""


@dataclass(frozen=True)
class PageRow:
    """A row of a table; ``details`` are shown when it is opened, as (term, text)."""

    anchor: str
    name: str
    backbone: str
    style: int
    sign: Markup
    setting: str
    tuned: bool
    shown: bool
    """Whether the charts show it at first."""
    failed: str
    """The text ``failed: reason``, shortened, for a row without a number; "" for others."""
    mark: str
    """Mark behind the name of a row with a failed run, or whose global model is never trained."""
    searched: str
    cells: list[PageCell]
    details: list[tuple[str, str]]

    @property
    def title(self) -> str:
        """Name and backbone, as in legends."""
        return f"{self.name} · {self.backbone}" if self.backbone else self.name


@dataclass(frozen=True)
class Chart:
    """A figure: its heading, a sentence on how to read it, the drawing."""

    heading: str
    read: str
    picture: Markup


@dataclass(frozen=True)
class Section:
    """A table with its charts."""

    anchor: str
    title: str
    facts: list[str]
    columns: list[PageColumn]
    rows: list[PageRow]
    notes: list[str]
    shared: str
    charts: list[Chart]
    clients: HeatMap | None
    clients_of: str
    legend: bool
    """Whether a chart draws one series per row."""


@dataclass(frozen=True)
class Overview:
    """The headline of every row in every section."""

    rows: list[tuple[str, str, Markup, list[PageCell]]]
    """Name, backbone ("" where all have the same one), sign, cells."""

    @property
    def has_marks(self) -> bool:
        """Whether any number has a mark."""
        return any(cell.mark for *_, cells in self.rows for cell in cells)


@dataclass(frozen=True)
class MapCell:
    """A place on the map: ``anchor`` is its table, ``shade`` from 0 to 1, "" for none."""

    anchor: str
    words: list[str]
    shade: str = ""
    hatched: bool = False
    sign: Markup = Markup()


@dataclass(frozen=True)
class MapView:
    """One way to look at the map: rows of cells, the last value of the second axis first."""

    name: str
    read: str
    rows: list[tuple[str, list[MapCell]]]


@dataclass(frozen=True)
class MapSection:
    """The map, with the names and values of its axes."""

    across: str
    down: str
    columns: list[str]
    views: list[MapView]


@dataclass(frozen=True)
class Ranking:
    """The ranking of rows over all settings."""

    caption: str
    columns: list[PageColumn]
    rows: list[tuple[str, Markup, list[PageCell]]]
    notes: list[str]
    diagram: Markup


@dataclass(frozen=True)
class Reproduction:
    """How the numbers were made: ``states`` are (what, its full hashes or commits), ``runs`` one line per run."""

    command: str
    versions: dict[str, str]
    states: list[tuple[str, list[str]]]
    seeds: str
    runs: list[dict[str, str]]


@dataclass(frozen=True)
class Page:
    """The whole content of a page."""

    suite: str
    description: str
    facts: list[tuple[str, str]]
    sections: list[Section]
    overview: Overview | None
    ranking: Ranking | None
    map: MapSection | None
    settings: list[str]
    kinds: bool
    """Whether there are both tuned rows and rows with default parameters."""
    most_curves: int
    reproduction: Reproduction
