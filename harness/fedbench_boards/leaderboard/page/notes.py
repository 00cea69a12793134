"""Notes on a page's table: the meaning of its marks and columns, and why a number is missing."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedbench.core.wording import OWN_MODELS, UNSEEN, heading, not_on_unseen_notes, server_data_notes
from fedbench_boards.leaderboard.failures import MARK
from fedbench_boards.leaderboard.model import Line, Table
from fedbench_boards.leaderboard.notes import INTERVAL, has_intervals
from fedbench_boards.leaderboard.page.table import MARKS, any_known, metrics_of
from fedbench_boards.leaderboard.rows import own_models, untrained
from fedbench_boards.leaderboard.rows.seeds import DIFFER, seed_counts, seeds_differ
from fedbench_boards.statistics.paired import ALPHA, BASELINE, NO_BASELINE


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
        *([f"{untrained.MARK} {untrained.NOTE}"] if any(line.untrained for line in lines) else []),
        *([f"{own_models.MARK} {own_models.NOTE}"] if any(line.one_for_all for line in lines) else []),
        *([DIFFER] if seeds_differ(lines) else []),
    ]
