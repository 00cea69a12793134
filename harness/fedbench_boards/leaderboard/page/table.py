"""The main table of a page, and the notes on it.

Every number is there both as readers see it and in full precision. Notes tell what marks and columns mean, and why a
number is missing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedbench.core.wording import (
    NONE,
    OWN_MODELS,
    UNSEEN,
    heading,
    megabytes,
    not_on_unseen_notes,
    server_data_notes,
    spread,
)
from fedbench_boards.leaderboard.failures import MARK
from fedbench_boards.leaderboard.model import Line, Printed, PrintedNumber, ScoreCell, Table
from fedbench_boards.leaderboard.own_models import notes_on_marks
from fedbench_boards.leaderboard.page.model import PageCell, PageColumn
from fedbench_boards.leaderboard.published import AS_PRINTED, COMPARABLE, NOT_COMPARABLE
from fedbench_boards.leaderboard.rows import (
    DIFFER,
    ON_NETWORK,
    best_of,
    may_be_best,
    seed_cells,
    seed_counts,
    seeds_differ,
)
from fedbench_boards.leaderboard.tables import INTERVAL, P_BEST, TIED, has_intervals
from fedbench_boards.statistics import ALPHA, BASELINE, NO_BASELINE, NOT_SIGNIFICANT, SIGNIFICANT

DOMAIN = "domain_accuracy/"
_APART = (DOMAIN, "class_accuracy/")
"""Prefixes of metrics of single domains and classes, which are too many for columns."""
MARKS = {SIGNIFICANT: "*", NOT_SIGNIFICANT: "n.s."}
"""Marks behind a difference; the legend explains them."""
AGREEING = {COMPARABLE: "comparable", AS_PRINTED: "comparable as far as printed", NOT_COMPARABLE: "not comparable"}
"""How far a printed number has the run's conditions, in words."""
_NBSP = "\N{NO-BREAK SPACE}"


def columns_of(table: Table) -> list[tuple[PageColumn, list[PageCell]]]:
    """The columns besides the row's name, each with a cell per row; columns that no row has are left out."""
    lines = table.lines
    columns = [_rank(lines)]
    for metric in metrics_of(table):
        explained = f"{metric}, %: mean ± standard deviation over seeds"
        columns.append((PageColumn(metric, heading(metric), explained), _measured(lines, metric)))
    if seeds_differ(lines):
        cells = [_cell(len(line.runs), text) for line, text in zip(lines, seed_cells(lines), strict=True)]
        columns.append((PageColumn("seeds", "seeds", "the row's seeds, by their number"), cells))
    if table.tells_the_best:
        cells = [_cell(line.p_best, f"{line.p_best:.2f}") for line in lines]
        columns.append((PageColumn("p_best", "P(best)", P_BEST), cells))
    if any_known([line.delta.cell.mean for line in lines]):
        columns.append(_delta(table))
    if any_known([line.milestone.rounds.mean for line in lines]):
        columns.append(_rounds(table))
    printed = [line.printed or Printed() for line in lines]
    if any_known([one.value for one in printed]):
        columns += _published(printed)
    for metric in dict.fromkeys(metric for one in printed for metric in one.metrics):
        if metric != table.headline:
            numbers = [one.metrics.get(metric, PrintedNumber()) for one in printed]
            columns += _published(numbers, metric)
    columns.append(_sent(lines))
    seconds = [line.cost("train_seconds") for line in lines]
    if any_known(seconds):
        explained = "seconds of training, mean over seeds"
        cells = [_cell(value, f"{value:,.1f}") for value in seconds]
        columns.append((PageColumn("train_seconds", f"train{_NBSP}s", explained, "ascending"), cells))
    for cost in dict.fromkeys(cost for line in lines for cost in line.costs if cost.startswith(ON_NETWORK)):
        explained = "seconds of sending, the clients of a round at the same time, two latencies a round"
        cells = [_cell(line.cost(cost), f"{line.cost(cost):,.1f}") for line in lines]
        name = f"s {cost.removeprefix('seconds ')}"
        columns.append((PageColumn(cost.replace(" ", "_"), name, explained, "ascending"), cells))
    return columns


def any_known(values: Sequence[float]) -> bool:
    """Whether any of the values is a number."""
    return not all(math.isnan(value) for value in values)


def assigned(settings: Mapping[str, Any]) -> str:
    """Settings written as ``a=1, b=2``."""
    texts = {k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for k, v in settings.items()}
    return ", ".join(f"{key}={value}" for key, value in texts.items() if value != "")


def probability(value: float) -> str:
    """A p-value as papers print it."""
    return "p < 0.001" if value < 0.001 else f"p = {value:.2g}"


def domains_of(lines: Sequence[Line]) -> list[str]:
    """The domains that any row has an accuracy of."""
    names = dict.fromkeys(name for line in lines for name in line.cells if name.startswith(DOMAIN))
    return [name.removeprefix(DOMAIN) for name in names if any_known([line.cell(name).mean for line in lines])]


def metrics_of(table: Table) -> list[str]:
    """The metrics with a column: the headline, and the shown ones as far as any row has them."""
    others = [name for name in table.shown if name != table.headline and not name.startswith(_APART)]
    return [table.headline, *(name for name in others if any_known([line.cell(name).mean for line in table.lines]))]


def _rank(lines: Sequence[Line]) -> tuple[PageColumn, list[PageCell]]:
    ranks = [line.place for line in lines]
    cells = [PageCell(NONE) if rank is None else _cell(rank, str(rank)) for rank in ranks]
    tied = "" if all(line.tied_rank is None for line in lines) else f"; rows that {TIED}"
    return PageColumn("rank", "#", f"rank by the first accuracy column{tied}", "ascending"), cells


def _cell(value: float, shown: str, **rest: Any) -> PageCell:
    return PageCell(NONE, **rest) if math.isnan(value) else PageCell(shown, value=repr(float(value)), **rest)


def _with_deviation(cell: PageCell, score: ScoreCell) -> PageCell:
    if math.isnan(score.mean) or math.isnan(score.std):
        return cell
    return replace(cell, spread=f"± {score.std:.1f}", deviation=repr(score.std))


def _measured(lines: Sequence[Line], metric: str) -> list[PageCell]:
    """Cells of ``metric`` ± its standard deviation, the best at the shown precision marked."""
    cells = [line.cell(metric) for line in lines]
    return [
        _with_deviation(_cell(cell.mean, spread(cell.mean, math.nan), best=best), cell)
        for cell, best in zip(cells, best_of(lines, metric), strict=True)
    ]


def _delta(table: Table) -> tuple[PageColumn, list[PageCell]]:
    baseline = table.baseline.partition(" · ")[0]
    cells = []
    for delta in (line.delta for line in table.lines):
        facts = [delta.significance] if delta.significance else []
        if not math.isnan(delta.p_value):
            facts.append(f"{delta.test} over {delta.seeds} seeds, {probability(delta.p_value)}")
        facts += [] if math.isnan(delta.p_adjusted) else [f"adjusted {probability(delta.p_adjusted)}"]
        shown = spread(delta.cell.mean, math.nan, "+")
        cell = _cell(delta.cell.mean, shown, mark=MARKS.get(delta.significance, ""), title=", ".join(facts))
        cells.append(_with_deviation(cell, ScoreCell(delta.cell.mean, delta.half_width)))
    explained = f"{heading(table.headline)} minus that of {baseline}, paired over the seeds both have"
    explained += f"; {INTERVAL}" if has_intervals(table.lines) else ""
    return PageColumn("delta", f"Δ{_NBSP}{baseline}", explained), cells


def _rounds(table: Table) -> tuple[PageColumn, list[PageCell]]:
    milestones = [line.milestone for line in table.lines]
    known = {round(one.target, 1) for one in milestones if not math.isnan(one.target)}
    metric = milestones[0].metric
    title = f"rounds to {next(iter(known)):g} %" if len(known) == 1 else "rounds to target"
    title += f" {heading(metric)}" if metric != table.headline else ""
    # a mean over the seeds that were fast enough is no number of the others
    everywhere = [
        may_be_best(line, metric) and one.reached == one.seeds
        for line, one in zip(table.lines, milestones, strict=True)
    ]
    whole = [one.rounds.mean for one, in_all in zip(milestones, everywhere, strict=True) if in_all]
    fewest = min((round(mean, 1) for mean in whole if not math.isnan(mean)), default=math.nan)
    cells = []
    for one, in_all in zip(milestones, everywhere, strict=True):
        mean = one.rounds.mean
        note = f"{one.reached} of {one.seeds} seeds" if one.reached != one.seeds else ""
        target = "" if math.isnan(one.target) else f"to {one.target:.1f} %"
        target += "" if math.isnan(one.bytes) else f", {megabytes(one.bytes)} MB"
        target += "" if math.isnan(one.seconds) else f", {one.seconds:.1f} s of training"
        best = in_all and round(mean, 1) == fewest and len(known) < 2 and len(milestones) > 1
        cell = _cell(mean, f"{mean:.1f}".removesuffix(".0"), note=note, title=target, best=best)
        cells.append(_with_deviation(cell, one.rounds))
    explained = "first evaluated round with the target accuracy, mean over the seeds that reach it"
    return PageColumn("rounds_to_target", title, explained, "ascending"), cells


def _published(printed: Sequence[PrintedNumber], metric: str = "") -> Iterator[tuple[PageColumn, list[PageCell]]]:
    """The paper's numbers for the headline, with a column of differences; for another ``metric`` differences are
    below."""
    cells = []
    for one in printed:
        aspects = ", ".join(difference.aspect for difference in one.differences)
        note = AGREEING.get(one.comparable, "") + (f": {aspects}" if one.comparable == NOT_COMPARABLE else "")
        if metric:
            note = "" if math.isnan(one.delta) else f"Δ{_NBSP}{spread(one.delta, math.nan, '+')}"
        title = "; ".join(text for text in (one.source, one.differs) if text)
        cells.append(_cell(one.value, f"{one.value:g}", note=note, title=title))
    name, key = (f"published {heading(metric)}", f"published_{metric}") if metric else ("published", "published")
    yield PageColumn(key, name, "what the paper prints, and whether the settings agree"), cells
    if not metric and any_known([one.delta for one in printed]):
        shown = [_cell(one.delta, spread(one.delta, math.nan, "+")) for one in printed]
        yield PageColumn("published_delta", f"Δ{_NBSP}published", "measured minus published"), shown


def sent(line: Line) -> str:
    """Traffic in words: ``1.50 MB up, 0.50 MB down``; "" if it is unknown."""
    if math.isnan(line.sent):
        return ""
    return f"{megabytes(line.cost('bytes_up'))} MB up, {megabytes(line.cost('bytes_down'))} MB down"


def _sent(lines: Sequence[Line]) -> tuple[PageColumn, list[PageCell]]:
    cells = [_cell(line.sent, megabytes(line.sent), title=sent(line)) for line in lines]
    return PageColumn("bytes", "MB", "sent up and down by all clients in all rounds, 10^6 bytes", "ascending"), cells


def notes_of(table: Table) -> list[str]:
    """The sentences below the table."""
    return [*_failures(table.lines), *(_how_to_read(table, table.measured) if table.measured else [])]


def _failures(lines: Sequence[Line]) -> list[str]:
    """Notes on failed runs of rows with a number, and on the place of the other rows' reasons."""
    notes = [f"{MARK} {line.label}: {line.status.text}." for line in lines if line.status.text and not line.has_failed]
    if any(line.has_failed for line in lines):
        notes.append("Failed: no run of the row has finished; why is under its name.")
    return notes


def _how_to_read(table: Table, lines: Sequence[Line]) -> list[str]:
    counted = seed_counts(lines)
    over = f"Mean ± sample standard deviation over {counted}. " if counted.endswith("s") else "One seed. "
    chosen = [heading(name) for name in metrics_of(table) if name.startswith("selected_")]
    other = f"; columns {', '.join(chosen)}: of the round that is best on validation data" if chosen else ""
    notes = [f"{over}Accuracies of the last round, in %{other}. Bold: the best of a column. –: not measured."]
    if any_known([line.delta.cell.mean for line in lines]):
        baseline = table.baseline.partition(" · ")[0]
        interval = f"; {INTERVAL}" if has_intervals(lines) else ""
        notes.append(
            f"Δ {baseline}: {heading(table.headline)} minus that of {baseline}, paired over the seeds both have"
            f"{interval}."
        )
    notes += _significance(lines)
    for why in dict.fromkeys(line.delta.note for line in lines if line.delta.note):
        without = dict.fromkeys(line.label for line in lines if line.delta.note == why)
        notes.append(f"No baseline for {', '.join(without)}: {why}.")
    for metric in dict.fromkeys(metric for line in lines for metric in line.incomplete):
        last = "; it has no rank" if metric == table.headline else ""
        notes.append(f"{heading(metric)}: a row of which some seed lacks it has no mean{last}.")
    notes += [f"{note[:1].upper()}{note[1:]}." for note in _facts(lines)]
    if any(line.printed is not None and not math.isnan(line.printed.value) for line in lines):
        notes.append("Published: the paper's number; what differs, or is not printed, is under the row's name.")
    notes.append("MB: sent up and down by all clients in all rounds, 10⁶ bytes.")
    notes.append("Under a row's name: its settings, tuning, single domains and run ids.")
    return notes


def _significance(lines: Sequence[Line]) -> list[str]:
    significances = [text for text in dict.fromkeys(line.delta.significance for line in lines) if text]
    marks = [mark for mark in MARKS if mark in significances]
    reasons = [text for text in significances if text not in (*MARKS, BASELINE, NO_BASELINE)]
    notes = [f"Δ without a mark was not tested ({'; '.join(reasons)})."] if reasons else []
    if marks:
        meant = ", ".join(f"{MARKS[mark]} {mark}" for mark in marks)
        notes.append(
            f"{meant} ({lines[0].delta.test}, p adjusted by Holm over the table, level {ALPHA:g}); "
            "p-values are under the rows' names."
        )
    return notes


def _facts(lines: Sequence[Line]) -> list[str]:
    labels = [line.label for line in lines]
    return [
        *server_data_notes(labels, [line.server_data for line in lines]),
        *not_on_unseen_notes(labels, [line.not_on_unseen for line in lines]),
        *([UNSEEN] if any_known([line.cell("new_accuracy").mean for line in lines]) else []),
        *([OWN_MODELS] if any_known([line.cell("personal_mean_client_accuracy").mean for line in lines]) else []),
        *notes_on_marks(lines),
        *([DIFFER] if seeds_differ(lines) else []),
    ]
