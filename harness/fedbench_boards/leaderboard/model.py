"""A leaderboard as values: a board of tables, a table of lines, a line of cells. Every writer reads these."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from fedbench.core.wording import ranks_shown
from fedbench_boards.leaderboard.comparable import Difference
from fedbench_boards.statistics import Across

NAN = float("nan")
FINISHED, PARTLY, FAILED = "finished", "partly failed", "failed"
"""Status of a row: all its seeds finished, some did, or none did."""


@dataclass(frozen=True)
class ScoreCell:
    """A metric over a row's seeds. Both are NaN if a seed lacks it; ``std`` (sample) is NaN for one seed."""

    mean: float = NAN
    std: float = NAN


@dataclass(frozen=True)
class Delta:
    """The headline minus that of the baseline, paired over the ``seeds`` that both have."""

    cell: ScoreCell = ScoreCell()
    seeds: int = 0
    p_value: float = NAN
    p_adjusted: float = NAN
    """The p-value corrected by Holm over all tests of the table."""
    significance: str = ""
    test: str = ""
    note: str = ""
    """The reason why the row has no baseline; "" if it has one."""
    low: float = NAN
    high: float = NAN
    """The ends of the mean's 95 % interval."""

    @property
    def half_width(self) -> float:
        """Half the width of the interval, which is symmetric."""
        return (self.high - self.low) / 2


@dataclass(frozen=True)
class Milestone:
    """The first evaluated round at which ``metric`` is at least ``target``, over the seeds that reach it."""

    rounds: ScoreCell = ScoreCell()
    target: float = NAN
    metric: str = ""
    reached: int = 0
    seeds: int = 0
    """The number of seeds with a curve."""
    bytes: float = NAN
    """Bytes sent both ways until then, mean over the seeds that reach the target."""
    seconds: float = NAN
    """Seconds of training until then, mean over the same seeds."""

    @property
    def text(self) -> str:
        """The share of seeds that reach the target, as ``2/3``; "" without curves or target."""
        return f"{self.reached}/{self.seeds}" if self.seeds else ""


@dataclass(frozen=True)
class PrintedNumber:
    """The number that the suite's paper prints for one metric of a row."""

    value: float = NAN
    delta: float = NAN
    """The measured minus the printed value."""
    source: str = ""
    """Paper and table: ``FedGLCL table 2``."""
    several: tuple[tuple[str, float], ...] = ()
    """Source and value of each number if the keys pick different ones; ``value`` is then NaN."""
    also: tuple[tuple[str, float], ...] = ()
    """Source and value of numbers that the paper prints elsewhere, as part of an ablation, for the same run."""
    comparable: str = ""
    """"yes", "no", "yes, as far as printed" where the paper gives part of what it ran, "" where nothing is printed."""
    differs: str = ""
    """A description of what differs, or is not printed."""
    differences: tuple[Difference, ...] = ()
    not_printed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Printed(PrintedNumber):
    """The numbers that the suite's paper prints for a row: for the headline, and for all metrics with a number."""

    keys: tuple[Mapping[str, str], ...] = ()
    """Columns and values that pick the printed numbers."""
    metrics: Mapping[str, PrintedNumber] = field(default_factory=dict)
    """The printed numbers by our name of the metric."""


@dataclass(frozen=True)
class Failure:
    """A failed run of a row."""

    seed: int
    reason: str
    run_id: str
    mlflow_id: str
    code: str
    """Beginning of the hash of its code, if that differs from the code of the row's other runs; else ""."""


@dataclass(frozen=True)
class RowStatus:
    """The outcome of a row's runs."""

    status: str = FINISHED
    text: str = ""
    """A description of the failures."""
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Line:
    """A row of a table."""

    row: str
    """The row's name in full."""
    label: str
    """The name without its backbone."""
    setting: str = ""
    scale: str = ""
    dataset: str = ""
    scenario: str = ""
    method: str = ""
    backbone: str = ""
    precision: str = ""
    server_data: str = ""
    """The samples at the server that the row's method learns from (unlabelled, labelled), or ""."""
    not_on_unseen: str = ""
    """The reason why the row has no accuracy on the scenario's unseen classes; "" if it has, or there are none."""
    tuned: bool = False
    tuning: Mapping[str, str] = field(default_factory=dict)
    runs: Mapping[int, str] = field(default_factory=dict)
    """Seed -> run id of the finished runs."""
    mlflow_ids: Mapping[int, str] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()
    """Seeds of ``runs``; if no run has finished, the seeds that failed."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings that are not part of the table's protocol."""
    cells: Mapping[str, ScoreCell] = field(default_factory=dict)
    costs: Mapping[str, float] = field(default_factory=dict)
    """Means of bytes and seconds."""
    delta: Delta = Delta()
    milestone: Milestone = Milestone()
    printed: Printed | None = None
    """Published numbers for the row; None if none are read."""
    status: RowStatus = RowStatus()
    untrained: bool = False
    """Whether its global model is never trained."""
    one_for_all: bool = False
    """Whether its numbers in columns of own models are those of its global model, see `own_models`."""
    incomplete: tuple[str, ...] = ()
    """Shown metrics that only some seeds have."""
    scores: Mapping[int, float] = field(default_factory=dict)
    """Seed -> the headline of its run, where the run has it."""
    rank: int | None = None
    """Rank by the headline in the table, 1 is best; see `fedbench_boards.leaderboard.rows.compared`."""
    rank_low: int | None = None
    rank_high: int | None = None
    """The ranks from low to high that the row may have by its seeds, see `fedbench_boards.statistics.rank_intervals`;
    None in a table whose seeds are too few for a test."""
    p_best: float = NAN
    """The bootstrap probability that the row is best, see `fedbench_boards.statistics.probability_best`."""
    whole: bool = True
    """Whether the row lost no seed that another row finished."""

    @property
    def shown_rank(self) -> str:
        """The rank that tables show: ``1-3``; "" for none."""
        return ranks_shown(self.rank if self.rank_low is None else self.rank_low, self.rank_high)

    @property
    def has_failed(self) -> bool:
        """Whether no run of the row has finished."""
        return self.status.status == FAILED

    def cell(self, metric: str) -> ScoreCell:
        """The row's cell of ``metric``; NaN where it has none."""
        return self.cells.get(metric, ScoreCell())

    def cost(self, name: str) -> float:
        """The mean of ``bytes_up``, ``bytes_down``, ``train_seconds`` or ``seconds``; NaN where it is unknown."""
        return self.costs.get(name, NAN)

    @property
    def sent(self) -> float:
        """Bytes sent up and down."""
        return self.cost("bytes_up") + self.cost("bytes_down")


@dataclass(frozen=True)
class Table:
    """Rows that agree in data, scenario and budget, best headline first."""

    caption: str
    baseline: str
    headline: str
    """The metric by which the rows are ranked."""
    shown: tuple[str, ...]
    """The metrics that writers show, the headline first."""
    lines: tuple[Line, ...]

    @property
    def measured(self) -> tuple[Line, ...]:
        """The rows with a finished run."""
        return tuple(line for line in self.lines if not line.has_failed)

    @property
    def tells_the_best(self) -> bool:
        """Whether seeds suffice for `Line.p_best`."""
        return not all(math.isnan(line.p_best) for line in self.lines)

    @property
    def shared_settings(self) -> dict[str, str]:
        """Settings shared by all rows. A method's own (with a dot) stay with their row, also if it is the only one."""
        first = self.lines[0].settings
        return {
            k: v for k, v in first.items() if "." not in k and all(line.settings.get(k) == v for line in self.lines)
        }

    def own_settings(self, line: Line) -> dict[str, str]:
        """The settings of the row that are not shared."""
        shared = self.shared_settings
        return {name: value for name, value in line.settings.items() if name not in shared}


MOST_TABLES = 24


@dataclass(frozen=True)
class Board:
    """The tables, those of the suite's settings first, then the newest first."""

    tables: tuple[Table, ...]
    across: Across | None = None
    """The rows over all settings, where there are three or more."""

    @property
    def has_many_tables(self) -> bool:
        """Whether a folder shows what its tables come to over settings in their place; the CSV file has them."""
        return len(self.tables) > MOST_TABLES

    @property
    def lines(self) -> tuple[Line, ...]:
        """The rows of all tables."""
        return tuple(line for table in self.tables for line in table.lines)
