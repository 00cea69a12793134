"""From what the runs measured to tables: medians over repeats, and ratios to the first row, pair by pair."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

COLUMNS = ("system", "version", "seconds", "times the first", "start-up s", "whole s", "CPU s", "peak MB", "accuracy")
NOTE = (
    "seconds: of a round (training and aggregation), the median over rounds 2 and later, round 1 being the warm-up of "
    "every system; of the whole command in w4. All figures are medians over the repeats; ratios are taken within a "
    "repeat, in brackets their smallest and largest; beside the peak, how many times the first row's it is."
)


@dataclass(frozen=True)
class Result:
    """One run of one row."""

    workload: str
    row: str
    repeat: int
    wall: float
    cpu: float | None
    peak: int | None
    report: dict[str, Any] | None
    """What the system told; None for a whole command."""
    problem: str = ""
    """Why there is no measurement."""

    @property
    def seconds(self) -> float | None:
        """What is compared: the median round without the first, or the whole command."""
        if self.problem:
            return None
        if self.report is None:
            return self.wall
        return float(statistics.median(self.report["rounds"][1:]))


def rows(results: Sequence[Result], order: Sequence[str]) -> list[list[str]]:
    """The cells of one workload's table, in the ``order`` of its rows."""
    by_row = {row: [result for result in results if result.row == row] for row in order}
    return [_row(row, by_row[row], by_row[order[0]]) for row in order if by_row[row]]


def _row(name: str, own: Sequence[Result], first: Sequence[Result]) -> list[str]:
    measured = [result for result in own if not result.problem]
    if len(measured) < len(own):
        problem = next(result.problem for result in own if result.problem)
        return [name, "", problem.partition(":")[0], *[""] * (len(COLUMNS) - 3)]
    reports = [result.report for result in measured if result.report is not None]
    return [
        name,
        reports[0]["version"] if reports else "",
        _number([result.seconds for result in measured]),
        ratio(measured, first),
        _number([report["startup"] for report in reports], 1),
        _number([result.wall for result in measured], 1),
        _number([result.cpu for result in measured], 1),
        _peak(measured, first),
        _number([report["accuracy"] for report in reports], 1),
    ]


def remarks(results: Sequence[Result]) -> list[str]:
    """What the table has no room for: why rows were left out, and what systems say of how they trained."""
    told = {f"{one.row}: {one.problem or _note(one)}": None for one in results if one.problem or _note(one)}
    return list(told)


def _note(result: Result) -> str:
    return "" if result.report is None else str(result.report["note"])


def ratio(own: Sequence[Result], first: Sequence[Result]) -> str:
    """How many times as long as the first row's run of the same repeat: median, smallest and largest."""
    reference = {result.repeat: result.seconds for result in first}
    pairs = [(result.seconds, reference.get(result.repeat)) for result in own]
    ratios = [one / other for one, other in pairs if one is not None and other is not None]
    if not ratios:
        return "n/a"
    return f"{statistics.median(ratios):.2f} [{min(ratios):.2f}-{max(ratios):.2f}]"


def _peak(own: Sequence[Result], first: Sequence[Result]) -> str:
    known, other = ([one.peak / 2**20 for one in results if one.peak is not None] for results in (own, first))
    if not known or not other:
        return _number(known, 0)
    return f"{_number(known, 0)} ({statistics.median(known) / statistics.median(other):.2f})"


def _number(values: Sequence[float | None], digits: int | None = None) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "n/a"
    middle = statistics.median(known)
    return f"{middle:.3g}" if digits is None else f"{middle:.{digits}f}"


def as_rich(title: str, body: Sequence[Sequence[str]]) -> Table:
    """For a terminal."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if number < 2 else "right", no_wrap=True)
    for row in body:
        table.add_row(*row)
    return table


def as_markdown(title: str, body: Sequence[Sequence[str]], below: Sequence[str]) -> str:
    """For a README."""
    lines = [f"**{title}**", "", "| " + " | ".join(COLUMNS) + " |", "|---|---" + "|---:" * (len(COLUMNS) - 2) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in body]
    return "\n".join([*lines, *(["", *(f"- {remark}" for remark in below)] if below else [])])
