"""Notes below a table: why a difference has no sign, which rows lack a mean, what the columns mean."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median, multimode

from fedbench.core.wording import OWN_MODELS, UNSEEN, heading, not_on_unseen_notes, server_data_notes
from fedbench_boards.leaderboard.model import Line, Table
from fedbench_boards.leaderboard.published import published_notes
from fedbench_boards.leaderboard.rows import own_models, untrained
from fedbench_boards.leaderboard.rows.seeds import DIFFER, seeds_differ
from fedbench_boards.statistics.paired import ALPHA, BASELINE, NO_BASELINE, SIGNIFICANT, Test
from fedbench_boards.statistics.power import detectable, seeds_for

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
    yield from [f"{untrained.MARK} {untrained.NOTE}"] if any(line.untrained for line in lines) else []
    yield from [f"{own_models.MARK} {own_models.NOTE}"] if any(line.one_for_all for line in lines) else []
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
