"""Result folders as plain records, without pandas and without a store."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from fedbench.core.wording import NONE
from fedbench_boards.site.text import slug

if TYPE_CHECKING:
    from fedbench.suites.suite import Suite


@dataclass(frozen=True)
class BoardLine:
    """A row of a table. Numbers are texts as readers see them."""

    row: str
    label: str
    methods: tuple[str, ...]
    """The methods of the row's stack."""
    backbone: str
    dataset: str
    setting: str
    rank: int | None
    """Rank by the table's first accuracy; None for a row without it."""
    tied_rank: int | None
    """The rank of the first row that its seeds can't tell it from; None if the folder does not say."""
    scores: tuple[str, ...]
    """``mean ± std`` of each of the table's metrics, in %."""
    delta: str
    """Difference to the table's baseline, in points."""
    megabytes: str
    seconds: str
    seeds: str
    runs: tuple[str, ...]
    """Run ids, in the order of the seeds."""
    tuned: bool
    failure: str

    @property
    def shown_rank(self) -> str:
        """The tied rank if it is known, else the rank."""
        known = self.tied_rank or self.rank
        return NONE if known is None else str(known)


@dataclass(frozen=True)
class BoardTable:
    """One table of a leaderboard."""

    number: int
    title: str
    facts: tuple[str, ...]
    baseline: str
    metrics: tuple[str, ...]
    """Headings of metrics, that of the ranking first."""
    has_ties: bool
    entries: tuple[BoardLine, ...]

    @property
    def anchor(self) -> str:
        """The table's anchor, the same as in the folder's own page."""
        return f"table-{self.number}"

    @property
    def has_deltas(self) -> bool:
        """Whether any row is compared with the baseline."""
        return any(entry.delta != NONE for entry in self.entries)

    @property
    def leader(self) -> BoardLine | None:
        """The row of rank 1."""
        return next((entry for entry in self.entries if entry.rank == 1), None)


@dataclass(frozen=True)
class ResultsOf:
    """One folder of published results."""

    path: Path
    suite_names: tuple[str, ...]
    """Names of the suites that its runs are filed under."""
    tables: tuple[BoardTable, ...]
    runs: int
    seeds: tuple[str, ...]
    date: str
    """Date of the last run, YYYY-MM-DD."""
    commits: tuple[str, ...]
    commands: tuple[str, ...]
    licence: str
    findings: str
    """The folder's findings in Markdown; "" for none."""
    figures: tuple[Path, ...]
    suite: Suite | None = field(repr=False)
    """The suite; None if it is not installed."""

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def slug(self) -> str:
        return slug(self.name)

    @property
    def description(self) -> str:
        """The suite's description; "" if it is not installed."""
        return self.suite.description if self.suite else ""

    @property
    def entries(self) -> Iterator[tuple[BoardTable, BoardLine]]:
        """Every row with its table."""
        return ((table, entry) for table in self.tables for entry in table.entries)

    @property
    def rows(self) -> int:
        """The number of different rows in its tables."""
        return len({entry.row for _, entry in self.entries})

    @cached_property
    def page(self) -> str:
        """The content of the folder's own page; "" if it has none."""
        file = self.path / "index.html"
        return file.read_text(encoding="utf-8", errors="replace") if is_own(file) else ""

    def mean_ranks(self) -> dict[str, float]:
        """Label -> mean rank, best first, of the rows that every table ranks; empty for fewer than two of both."""
        ranked = [{entry.row: entry.rank for entry in table.entries if entry.rank} for table in self.tables]
        common = set.intersection(*map(set, ranked)) if ranked else set()
        if len(ranked) < 2 or len(common) < 2:
            return {}
        totals = dict.fromkeys(common, 0)
        for ranks in ranked:
            for place, row in enumerate(sorted(common, key=lambda row: (ranks[row], row)), start=1):
                totals[row] += place
        labels = {entry.row: entry.label for _, entry in self.entries}
        several = len(set(map(labels.__getitem__, common))) < len(common)
        best = sorted(common, key=lambda row: (totals[row], row))
        return {row if several else labels[row]: totals[row] / len(ranked) for row in best}

    def led(self) -> tuple[list[str], int]:
        """The rows that lead the most tables, by label, and how many each of them leads."""
        counts: dict[str, int] = {}
        for table in self.tables:
            if table.leader is not None:
                counts[table.leader.label] = counts.get(table.leader.label, 0) + 1
        most = max(counts.values(), default=0)
        return [label for label, count in counts.items() if count == most], most


def is_own(file: Path) -> bool:
    """Whether it is a file and no link: a link may lead to a private file of this machine."""
    return file.is_file() and not file.is_symlink()


def number(text: str) -> float:
    """The number of a CSV's cell; NaN for an empty one."""
    try:
        return float(text or "nan")
    except ValueError:
        return math.nan
