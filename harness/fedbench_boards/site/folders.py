"""The result folders that a site is made of, as their files tell: tables of rows, runs, findings, figures."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from fedbench.core.errors import FedbenchError
from fedbench.core.files import expanded
from fedbench.core.spec import stack_names
from fedbench.core.wording import NONE, heading, ranks_shown, spread
from fedbench.suites.suite import Suite, load_suite, suite_names
from fedbench_boards.exchange.folder import BOARD, MANIFEST, RESULTS, read_manifest, table_file, texts
from fedbench_boards.site.text import seeds_shown, slug

_OF_BOARD = (
    *(
        "block",
        "caption",
        "baseline",
        "rank",
        "rank_low",
        "rank_high",
        "row",
        "label",
        "setting",
        "dataset",
        "method",
        "backbone",
    ),
    *("tuned", "headline", "runs", "seed_list", "delta_mean", "delta_low", "delta_high", "significance", "failure"),
)
"""The columns that every leaderboard.csv.gz has."""
_OF_RUNS = ("suite", "seed", "run_id", "started")
PICTURES = (".png", ".svg")


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
    """Rank by what the table is ranked by; None for a row without it."""
    rank_low: int | None
    rank_high: int | None
    """The ranks that it may have by its seeds; None if the folder does not say."""
    mean: float
    score: str
    """``mean ± std`` of what the table is ranked by, in %."""
    delta: str
    """Difference to the table's baseline, in points."""
    seeds: str
    tuned: bool
    failure: str

    @property
    def shown_rank(self) -> str:
        """The interval of its rank if it is known, else the rank."""
        return ranks_shown(self.rank_low or self.rank, self.rank_high) or NONE


@dataclass(frozen=True)
class BoardTable:
    """One table of a leaderboard."""

    number: int
    title: str
    baseline: str
    metric: str
    """Heading of what it is ranked by."""
    scenario: str
    """The board's words for the scenario; "" if the folder has none."""
    entries: tuple[BoardLine, ...]

    @property
    def anchor(self) -> str:
        """The table's anchor in the folder's own page."""
        return f"table-{self.number}"

    @property
    def leader(self) -> BoardLine | None:
        """The row of rank 1."""
        return next((entry for entry in self.entries if entry.rank == 1), None)

    @property
    def as_good(self) -> str:
        """The number of other rows that may have the first rank; a dash if the folder does not say."""
        known = [entry.rank_low for entry in self.entries if entry.rank_low]
        return str(known.count(1) - 1) if known else NONE


@dataclass(frozen=True)
class ResultsOf:
    """One folder of published results."""

    path: Path
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
        return own_text(self.path / "index.html")

    def mean_ranks(self) -> dict[str, float]:
        """Label -> mean rank, best first, of the rows that every table ranks; empty for fewer than two of both."""
        ranked = [{entry.row: entry.rank for entry in table.entries if entry.rank} for table in self.tables]
        common = set.intersection(*map(set, ranked)) if ranked else set()
        if len(ranked) < 2 or len(common) < 2:
            return {}
        totals = dict.fromkeys(common, 0)
        for ranks in ranked:
            for rank, row in enumerate(sorted(common, key=lambda row: (ranks[row], row)), start=1):
                totals[row] += rank
        labels = {entry.row: entry.label for _, entry in self.entries}
        several = len({labels[row] for row in common}) < len(common)
        best = sorted(common, key=lambda row: (totals[row], row))
        return {row if several else labels[row]: totals[row] / len(ranked) for row in best}

    def led(self) -> tuple[list[str], int]:
        """The rows that lead the most tables, and how many each of them leads; by label unless two have the same."""
        leaders = [table.leader for table in self.tables if table.leader is not None]
        counts = Counter((leader.label, leader.backbone) for leader in leaders)
        most = max(counts.values(), default=0)
        rows = {(leader.label, leader.backbone): leader.row for leader in leaders}
        several = len({label for label, _ in rows}) < len(rows)
        return [rows[key] if several else key[0] for key, count in counts.items() if count == most], most


def read_folders(given: Path) -> list[ResultsOf]:
    """The result folders below ``given``, by name; FedbenchError where there is none, or one that can't be read."""
    folder = expanded(given, "--results")
    if not folder.is_dir():
        raise FedbenchError(f"--results {str(given)!r} is no folder; give one that `fedbench publish` wrote into.")
    paths = sorted(folder.iterdir())
    folders = [path for path in paths if all(is_own(table_file(path, name)) for name in (RESULTS, BOARD))]
    if not folders:
        raise FedbenchError(
            f"--results {str(given)!r} has no folder with {BOARD} and {RESULTS}; "
            "write one with `fedbench publish --suite NAME`."
        )
    return [_read(path) for path in folders]


def is_own(file: Path) -> bool:
    """Whether it is a file and no link: a link may lead to a private file of this machine."""
    return file.is_file() and not file.is_symlink()


def own_text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if is_own(file) else ""


def _read(path: Path) -> ResultsOf:
    results = texts(table_file(path, RESULTS), _OF_RUNS).to_dict("records")
    try:
        tables = _tables(texts(table_file(path, BOARD), _OF_BOARD).to_dict("records"))
        commands = [command for line in results for command in json.loads(line.get("made_by") or "[]")]
    except (ValueError, AttributeError, TypeError) as error:
        raise FedbenchError(f"{str(path)!r} can't be read: {error}.") from None
    names = {line["suite"] for line in results if line["suite"]}
    name = names.pop() if len(names) == 1 else ""
    return ResultsOf(
        path=path,
        tables=tables,
        runs=len(results),
        seeds=tuple(sorted({line["seed"] for line in results}, key=lambda text: (len(text), text))),
        date=max((line["started"][:10] for line in results), default=""),
        commits=tuple(dict.fromkeys(line["commit"][:7] for line in results if line.get("commit"))),
        commands=tuple(dict.fromkeys(map(str, commands))),
        licence=read_manifest(path).licence if is_own(path / MANIFEST) else "",
        findings=own_text(path / "findings.md"),
        figures=_pictures(path / "figures"),
        suite=load_suite(name) if name in suite_names() else None,
    )


def _pictures(folder: Path) -> tuple[Path, ...]:
    """Each picture of ``folder`` once: as SVG if there are both formats."""
    if not folder.is_dir() or folder.is_symlink():
        return ()
    files = [file for file in sorted(folder.iterdir()) if file.suffix in PICTURES and is_own(file)]
    drawn = {file.stem for file in files if file.suffix == ".svg"}
    return tuple(file for file in files if file.suffix == ".svg" or file.stem not in drawn)


def _tables(lines: Sequence[Mapping[Any, Any]]) -> tuple[BoardTable, ...]:
    """The tables, in the order of the file; titles are made different from one another."""
    tables: list[BoardTable] = []
    titles: Counter[str] = Counter()
    for number, (_, group) in enumerate(groupby(lines, key=lambda line: line["block"]), start=1):
        block = list(group)
        # a caption begins with the settings where the suite names some, with the data set elsewhere
        settings = " / ".join(filter(None, dict.fromkeys(line["setting"] for line in block)))
        title = settings or " · ".join(block[0]["caption"].split(" · ")[:2]).partition(" (data")[0]
        titles[title] += 1
        title += f" ({titles[title]})" if titles[title] > 1 else ""
        headline = block[0]["headline"]
        entries = tuple(_entry(line, headline) for line in block)
        scenario = block[0].get("scenario", "")
        tables.append(BoardTable(number, title, block[0]["baseline"], heading(headline), scenario, entries))
    return tuple(tables)


def _entry(line: Mapping[Any, Any], headline: str) -> BoardLine:
    names = ("rank", "rank_low", "rank_high", f"{headline}_mean")
    rank, first, last, mean = (_number(line.get(name, "")) for name in names)
    low, high = _number(line["delta_low"]), _number(line["delta_high"])
    delta = spread(_number(line["delta_mean"]), (high - low) / 2, "+")
    return BoardLine(
        row=line["row"],
        label=line["label"],
        methods=stack_names(line["method"]),
        backbone=line["backbone"],
        dataset=line["dataset"],
        setting=line["setting"],
        rank=None if math.isnan(rank) or math.isnan(mean) else int(rank),
        rank_low=None if math.isnan(first) or math.isnan(mean) else int(first),
        rank_high=None if math.isnan(last) or math.isnan(mean) else int(last),
        mean=mean,
        score=spread(mean, _number(line.get(f"{headline}_std", ""))),
        delta=f"{delta} *" if line["significance"] == "significant" else delta,
        seeds=seeds_shown(line["seed_list"].split(", ")),
        tuned=line["tuned"] == "True",
        failure=line["failure"],
    )


def _number(text: str) -> float:
    """The number of a CSV's cell; NaN for an empty one."""
    return float(text or "nan")
