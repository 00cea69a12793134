"""What stands above and below a leaderboard's tables: the shared protocol, what marks mean, what is missing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from statistics import median, multimode

import pandas as pd

from fedbench.core.wording import (
    OWN_MODELS,
    UNSEEN,
    counted,
    heading,
    not_on_unseen_notes,
    server_data_notes,
)
from fedbench.suites.suite import ADHOC, is_read_as
from fedbench_boards.leaderboard import own_models
from fedbench_boards.leaderboard.model import Line, Table
from fedbench_boards.leaderboard.published import published_notes
from fedbench_boards.leaderboard.rows import DIFFER, seeds_differ, seeds_named
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
RANKS = "the ranks that a row may have by its seeds at 95 %, by paired tests with Holm's correction"
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
    """Explains intervals of ranks, and the probability to be the best."""
    if any(line.rank_low is not None for line in table.lines):
        yield f"#: {RANKS}"
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
