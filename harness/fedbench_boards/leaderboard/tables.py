"""A leaderboard's tables as text, independent of the format: captions, columns of cells, and the notes below them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, multimode

import pandas as pd

from fedbench.core.wording import (
    NONE,
    OWN_MODELS,
    UNSEEN,
    counted,
    heading,
    megabytes,
    not_on_unseen_notes,
    server_data_notes,
    spread,
)
from fedbench.suites.suite import ADHOC, is_read_as
from fedbench_boards.leaderboard import own_models
from fedbench_boards.leaderboard.failures import MARK, reasons
from fedbench_boards.leaderboard.model import PARTLY, Board, Line, Milestone, Printed, PrintedNumber, Table
from fedbench_boards.leaderboard.published import AS_PRINTED, NOT_COMPARABLE, published_notes
from fedbench_boards.leaderboard.rows import (
    DIFFER,
    ON_NETWORK,
    best_of,
    seed_cells,
    seed_counts,
    seeds_differ,
    seeds_named,
)
from fedbench_boards.leaderboard.rows import remarks as version_remarks
from fedbench_boards.statistics import ALPHA, BASELINE, NO_BASELINE, SIGNIFICANT, Test, detectable, seeds_for

_UNUSUAL = {"weighting": "samples", "augment": "none"}
"""Budget fields that a caption names only if they differ from these values."""
_SIZES = "images are decoded at the size that each row's backbone or teacher takes"
_SPENT = ("trials", "seeds", "run-off seeds", "pruner", "objective")
"""Parts of the tuning budget that must be equal for tuned rows to be compared."""


def caption(runs: pd.DataFrame, seeds: tuple[int, ...], remarks: Sequence[str] = ()) -> str:
    """The protocol that all ``runs`` of a table share, and ``remarks`` on how the table was made."""
    first = runs.iloc[0]
    # a run that failed before it read its data has no hash of them, but may have its table's of the files
    data = sorted({text[:8] for text in runs["data_hash"] if text}) or [first["files_hash"][:8] or "unknown"]
    epochs, steps = counted(int(first["local_epochs"]), "local epoch"), first["local_steps"]
    local = epochs if steps == "none" else counted(int(steps), "local step")
    parts = [
        *filter(None, [" / ".join(dict.fromkeys(runs["setting"])), _group(runs)]),
        f"{first['dataset']} (data {', '.join(data)})",
        *([_SIZES] if len(data) > 1 else []),
        str(first["scenario"]),
        # a run that failed before its data were partitioned knows no number of clients
        counted(clients, "client") if (clients := int(runs["num_clients"].max())) else "an unknown number of clients",
        f"{counted(int(first['rounds']), 'round')} of {local}, batch {first['batch_size']}",
        *(f"{name} {first[name]}" for name, usual in _UNUSUAL.items() if first[name] != usual),
        seeds_named(seeds),
        "commit " + ", ".join(sorted(set(_code(runs)))),
        *(["several code states"] if runs["harness_hash"].nunique() > 1 else []),
        *version_remarks(runs),
        *_suite(runs),
        *(["tuned with unequal budgets"] if _unequal(runs) else []),
        *remarks,
    ]
    return " · ".join(parts)


def _unequal(runs: pd.DataFrame) -> bool:
    tunings = [json.loads(text) for text in runs.loc[runs["tuned"] != "", "tuning"].unique()]
    return len({tuple(tuning.get(name, "") for name in _SPENT) for tuning in tunings}) > 1


def _group(runs: pd.DataFrame) -> str:
    """The name under which runs without a suite file are filed; "" for those of a suite."""
    return " / ".join(name for name in dict.fromkeys(runs["suite"]) if is_read_as(name, ADHOC) and name != ADHOC)


def _suite(runs: pd.DataFrame) -> Iterator[str]:
    """The suite's version if it is not the first, and the hash of its text, which tells files of one name apart."""
    versions = sorted(runs["suite_version"].unique()) if "suite_version" in runs else []
    if any(version > 1 for version in versions):
        yield f"suite version {', '.join(map(str, versions))}"
    hashes = sorted({text[:8] for text in runs["suite_hash"] if text})
    if hashes:
        yield f"suite {', '.join(hashes)}"


def _code(runs: pd.DataFrame) -> Iterator[str]:
    for commit, code in zip(runs["commit"], runs["harness_hash"], strict=True):
        revision, dirty, _ = str(commit).partition("+dirty")
        # two states of a work tree with changes are distinguished by their code
        yield revision[:7] if revision and not dirty else f"{revision[:7] or 'none'}{dirty} (code {str(code)[:8]})"


_OWN = "personal_mean_client_accuracy"
_NEW = "new_accuracy"
TIED = "share a rank can't be told from its first, down to one that can, by paired tests with Holm's correction"
INTERVAL = "± is half of its 95 % interval, not corrected"
P_BEST = "P(best): how often the row has the best mean when the seeds that all rows share are drawn again"
SIGN = "*"
"""Mark behind a significant difference."""


def notes_of(table: Table, headings: Sequence[str]) -> Iterator[str]:
    """The lines below a table with columns of these ``headings``."""
    lines, measured = table.lines, table.measured
    own = [line.label for line in measured]
    yield from _ties(table)
    yield from _significance(measured)
    yield from _power(measured)
    yield from _without_baseline(measured)
    yield from _incomplete(table)
    yield from server_data_notes(own, [line.server_data for line in measured])
    yield from not_on_unseen_notes(own, [line.not_on_unseen for line in measured])
    yield from [UNSEEN] if heading(_NEW) in headings else []
    yield from [OWN_MODELS] if heading(_OWN) in headings else []
    yield from own_models.notes_on_marks(lines)
    yield from [DIFFER] if seeds_differ(lines) else []
    yield from published_notes(lines)
    yield from _tuned(lines)
    yield from _to_target(lines)


def _significance(lines: Sequence[Line]) -> Iterator[str]:
    """Explains the sign behind a difference, or why there is none."""
    compared = [line for line in lines if line.delta.significance not in (BASELINE, NO_BASELINE)]
    tested = [line.delta for line in compared if not math.isnan(line.delta.p_value)]
    without = [line for line in compared if math.isnan(line.delta.p_value)]
    if has_intervals(compared):
        yield f"Δ: {INTERVAL}, paired over the seeds both have"
    if tested:
        counts = sorted({delta.seeds for delta in tested})
        pairs = f"{counts[0]} seeds" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds"
        holm = f"Holm over {len(tested)} rows" if len(tested) > 1 else "one row, not corrected"
        test = f"{tested[0].test} over {pairs}, {holm}"
        any_found = any(delta.significance == SIGNIFICANT for delta in tested)
        yield f"{SIGN} p < {ALPHA}, {test}" if any_found else f"no difference is significant at {ALPHA}: {test}"
    for reason, labels in _labels_by([(line.delta.significance, line.label) for line in without]):
        which = f" ({', '.join(dict.fromkeys(labels))})" if tested or len(without) > len(labels) else ""
        yield f"significance not tested{which}: {reason}"


def _ties(table: Table) -> Iterator[str]:
    """Explains shared ranks, and the probability to be the best."""
    ranks = [line.tied_rank for line in table.lines if line.tied_rank is not None]
    if len(ranks) > len(set(ranks)):
        yield f"#: rows that {TIED}"
    if table.tells_the_best:
        yield P_BEST


def has_intervals(lines: Sequence[Line]) -> bool:
    """Whether any difference has an interval."""
    return any(not math.isnan(line.delta.low) for line in lines)


def _power(lines: Sequence[Line]) -> Iterator[str]:
    """The difference that a t-test over so many seeds detects, and the seeds that half of it needs."""
    tested = [line.delta for line in lines if not math.isnan(line.delta.p_value) and line.delta.test == Test.t.title]
    if not tested:
        return
    seeds = multimode(delta.seeds for delta in tested)[0]
    usual = median(delta.cell.std for delta in tested if delta.seeds == seeds)
    least = detectable(usual, seeds)
    if round(least / 2, 1) > 0:
        more = seeds_for(least / 2, usual)
        further = f"; {least / 2:.1f} needs {more} seeds" if more else ""
        sentence = f"a {Test.t.title} over {seeds} seeds finds a difference of {least:.1f} four times in five"
        yield f"{sentence} (spread {usual:.1f}, not corrected){further}"


def _without_baseline(lines: Sequence[Line]) -> Iterator[str]:
    """The rows without a baseline, with reasons."""
    for why, labels in _labels_by([(line.delta.note, line.label) for line in lines if line.delta.note]):
        which = f" for {', '.join(dict.fromkeys(labels))}" if len(labels) < len(lines) else ""
        yield f"no baseline{which}: {why}"


def _incomplete(table: Table) -> Iterator[str]:
    """The metrics without a mean because a seed lacks them."""
    lacking = [(metric, line.label) for line in table.measured for metric in line.incomplete]
    for metric, labels in _labels_by(lacking):
        last = ", without a rank" if metric == table.headline else ""
        yield f"no mean of {heading(metric)} for {', '.join(labels)}, which some seed lacks{last}"


def _tuned(lines: Sequence[Line]) -> Iterator[str]:
    """The budgets of tuning, one line each."""
    budgets = []
    for line in lines:
        budget = {key: value for key, value in line.tuning.items() if key not in ("study", "trial")}
        budgets += [(", ".join(f"{key} {value}" for key, value in budget.items()), line.label)] if line.tuned else []
    for spent, labels in _labels_by(budgets):
        yield f"tuned with {spent or 'a budget that is not recorded'}: {', '.join(labels)}"


def _to_target(lines: Sequence[Line]) -> Iterator[str]:
    if any(line.milestone.seeds for line in lines):
        yield "rounds: first evaluated round at the target, and MB sent until then, means over the seeds that reach it"


def _labels_by(pairs: Sequence[tuple[str, str]]) -> Iterator[tuple[str, list[str]]]:
    """Each first of the (reason, label) ``pairs`` once, with its labels."""
    for reason in dict.fromkeys(reason for reason, _ in pairs):
        yield reason, [label for other, label in pairs if other == reason]


STATUS = "status"
"""Heading of the column that marks failed rows."""
_PRINTED = {
    "p_value": "p",
    "train_seconds": "train s",
    "seconds_a_round": "s a round",
    "oracle_round": "best round",
}
"""Headings of printed numbers other than accuracies."""
_MARKS = {NOT_COMPARABLE: "≠", AS_PRINTED: "≈"}
"""Marks in front of a printed number whose conditions differ, or are not fully known to agree."""


@dataclass(frozen=True)
class TextColumn:
    """One column: ``best`` tells which cells are bold, ``signs`` follow the cells."""

    heading: str
    cells: list[str]
    best: list[bool] = field(default_factory=list)
    signs: list[str] = field(default_factory=list)

    def is_best(self, line: int) -> bool:
        """Whether the cell is bold."""
        return bool(self.best) and self.best[line]

    def sign(self, line: int) -> str:
        """The sign behind the cell; "" for most cells."""
        return self.signs[line] if self.signs else ""


@dataclass(frozen=True)
class TextRow:
    """A row in the list below a table."""

    name: str
    seeds: str
    settings: Mapping[str, str]
    """The settings of this row alone."""
    runs: list[str]
    """Run ids, in the order of the seeds."""
    tuning: Mapping[str, str]
    failure: str = ""
    """The outcome of failed runs; empty if none failed."""


@dataclass(frozen=True)
class TextTable:
    """One table. ``names`` are the rows' columns in full, ``short`` the same with letters for backbones."""

    caption: str
    rank: TextColumn
    names: list[TextColumn]
    short: list[TextColumn]
    letters: str
    """The legend of the letters; empty if all rows have one backbone."""
    scores: list[TextColumn]
    status: list[TextColumn]
    """The column with ``failed: reason`` of rows without a number, in full; empty if there is no such row."""
    further: list[TextColumn]
    """Published numbers, costs and rounds to the target, which may form a second table if one would be too wide."""
    notes: list[str]
    failures: list[str]
    """Notes on failed runs of rows that have a number, or that lost seeds for several reasons."""
    common: Mapping[str, str]
    """The settings that all rows share."""
    rows: list[TextRow]


def text_tables(board: Board) -> Iterator[TextTable]:
    """The tables of a board, in its order."""
    return (_text_table(table) for table in board.tables)


def _text_table(table: Table) -> TextTable:
    lines, measured = table.lines, table.measured
    backbones = list(dict.fromkeys(line.backbone for line in lines))
    shared = backbones[0] if len(backbones) == 1 else ""
    labels = [line.label for line in lines]
    marks = [marks_of(line) for line in lines]
    names = [TextColumn("method" if shared else "row", labels if shared else [line.row for line in lines], signs=marks)]
    letters = dict(zip(backbones, map(_letter, range(len(backbones))), strict=True))
    legend = ", ".join(f"{letter} = {backbone}" for backbone, letter in letters.items())
    caption = table.caption + (f" · {shared}" if shared else "")
    counted = seed_counts(lines)
    over = f"{counted}, mean ± sample std" if counted.endswith("s") else counted or "no run has finished"
    scores = list(_scores(table))
    return TextTable(
        caption=f"{caption} · {over}; MB up and down",
        rank=TextColumn("#", [NONE if line.place is None else str(line.place) for line in lines]),
        names=names,
        short=names
        if shared
        else [TextColumn("method", labels, signs=marks), TextColumn("on", [letters[line.backbone] for line in lines])],
        letters="" if shared else f"on: {legend}",
        scores=[*scores, *_seeds(lines), *_best(table), *_difference(table)],
        status=list(_status(lines)),
        further=[*_published(table), *(_costs(lines) if measured else [])],
        notes=list(notes_of(table, [column.heading for column in scores])),
        failures=list(_failures(lines, names[0].cells)),
        common=table.shared_settings,
        rows=[_row(table, line, name) for line, name in zip(lines, names[0].cells, strict=True)],
    )


def _scores(table: Table) -> Iterator[TextColumn]:
    for metric in table.shown:
        cells = [line.cell(metric) for line in table.lines]
        if not all(math.isnan(cell.mean) for cell in cells):
            texts = [spread(cell.mean, cell.std) for cell in cells]
            yield TextColumn(heading(metric), texts, best_of(table.lines, metric))


def marks_of(line: Line) -> str:
    """The marks behind the row's name."""
    lost = MARK if not line.has_failed and line.status.text else ""
    return (
        lost
        + (own_models.UNTRAINED_MARK if line.untrained else "")
        + (own_models.ONE_FOR_ALL_MARK if line.one_for_all else "")
    )


def _seeds(lines: Sequence[Line]) -> Iterator[TextColumn]:
    if seeds_differ(lines):
        yield TextColumn("seeds", [cell or NONE for cell in seed_cells(lines)])


def _best(table: Table) -> Iterator[TextColumn]:
    if table.tells_the_best:
        texts = [NONE if math.isnan(line.p_best) else f"{line.p_best:.2f}" for line in table.lines]
        yield TextColumn("P(best)", texts)


def _difference(table: Table) -> Iterator[TextColumn]:
    deltas = [line.delta for line in table.lines]
    if any(delta.seeds for delta in deltas):
        cells = [spread(delta.cell.mean, delta.half_width, sign="+") for delta in deltas]
        signs = [SIGN if delta.significance == SIGNIFICANT else "" for delta in deltas]
        yield TextColumn(f"Δ {table.baseline.partition(' · ')[0]}", cells, signs=signs)


def _status(lines: Sequence[Line]) -> Iterator[TextColumn]:
    if any(line.has_failed for line in lines):
        yield TextColumn(STATUS, [_outcome(line) for line in lines])


def _outcome(line: Line) -> str:
    """The outcome of a row: ``failed: reason``, ``2 of 3 seeds``, or nothing if it has all its seeds."""
    if line.has_failed:
        return reasons(line.status.failures)
    return line.status.text.partition(";")[0] if line.status.status == PARTLY else ""


def _failures(lines: Sequence[Line], names: Sequence[str]) -> Iterator[str]:
    for name, line in zip(names, lines, strict=True):
        several = len({failure.reason for failure in line.status.failures}) > 1
        if line.status.text and (several or not line.has_failed):
            yield f"{'' if line.has_failed else MARK + ' '}{name}: {line.status.text}"


def _published(table: Table) -> Iterator[TextColumn]:
    """Columns of the paper's numbers: the headline with a column of differences, other metrics with those in
    brackets."""
    printed = [line.printed or Printed() for line in table.lines]
    if any(one.comparable for one in printed):
        spreads = [one.metrics.get("std", PrintedNumber()).value for one in printed]
        yield TextColumn("paper", [_number(one, std) for one, std in zip(printed, spreads, strict=True)])
        if not all(math.isnan(one.delta) for one in printed):
            yield TextColumn("Δ paper", [spread(one.delta, math.nan, sign="+") for one in printed])
    for metric in dict.fromkeys(metric for one in printed for metric in one.metrics):
        if metric not in (table.headline, "std"):
            numbers = [one.metrics.get(metric, PrintedNumber()) for one in printed]
            cells = [_as_printed(one) if metric in _PRINTED else _with_delta(one) for one in numbers]
            yield TextColumn(f"paper {_PRINTED.get(metric, heading(metric))}", cells)


def _number(one: PrintedNumber, std: float = math.nan) -> str:
    return _marked(one, "several" if one.several else spread(one.value, std))


def _as_printed(one: PrintedNumber) -> str:
    return _marked(one, NONE if math.isnan(one.value) else f"{one.value:g}")


def _marked(one: PrintedNumber, number: str) -> str:
    return f"{_MARKS[one.comparable]} {number}" if one.comparable in _MARKS else number


def _with_delta(one: PrintedNumber) -> str:
    """A number and its difference, as ``98.1 (-0.4)``."""
    return _number(one) + ("" if math.isnan(one.delta) else f" ({spread(one.delta, math.nan, sign='+')})")


def _costs(lines: Sequence[Line]) -> Iterator[TextColumn]:
    yield TextColumn("MB", [megabytes(line.sent) for line in lines])
    seconds = [line.cost("train_seconds") for line in lines]
    yield TextColumn("train s", [NONE if math.isnan(s) else f"{s:.1f}" for s in seconds])
    for cost in dict.fromkeys(cost for line in lines for cost in line.costs if cost.startswith(ON_NETWORK)):
        sending = [line.cost(cost) for line in lines]
        yield TextColumn(f"s {cost.removeprefix('seconds ')}", [NONE if math.isnan(s) else f"{s:.1f}" for s in sending])
    if any(line.milestone.seeds for line in lines):
        yield TextColumn("rounds", [_rounds(line.milestone) for line in lines])
        yield TextColumn("MB to it", [megabytes(line.milestone.bytes) for line in lines])


def _rounds(milestone: Milestone) -> str:
    """Rounds to the target: ``12``; ``8.5 (2/3)`` if a seed never reaches it; ``never`` if none does."""
    if not milestone.seeds:
        return NONE
    if not milestone.reached:
        return "never"
    everywhere = milestone.reached == milestone.seeds
    return f"{milestone.rounds.mean:.1f}".removesuffix(".0") + ("" if everywhere else f" ({milestone.text})")


def _row(table: Table, line: Line, name: str) -> TextRow:
    seeds = seeds_named(line.seeds)
    tuning = line.tuning if line.tuned else {}
    return TextRow(name, seeds, table.own_settings(line), list(line.runs.values()), tuning, line.status.text)


def _letter(number: int) -> str:
    return chr(ord("A") + number) if number < 26 else str(number + 1)
