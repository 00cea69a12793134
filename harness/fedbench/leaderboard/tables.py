"""A leaderboard's tables as text, whatever they are then written in: columns of cells, and the lines below them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field

import pandas as pd

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
from fedbench.leaderboard import untrained
from fedbench.leaderboard.failures import FAILED, MARK, PARTLY, reasons
from fedbench.leaderboard.published import AS_PRINTED, NOT_COMPARABLE, published_notes
from fedbench.leaderboard.rows.ranking import may_be_best
from fedbench.leaderboard.rows.seeds import DIFFER, seed_cells, seed_counts, seeds_differ
from fedbench.leaderboard.rows.significance import ALPHA, BASELINE, NO_BASELINE, SIGNIFICANT

_OWN = "personal_mean_client_accuracy"
_NEW = "new_accuracy"
STATUS = "status"
"""Heading of the column that says which rows failed."""
SIGN = "*"
"""Stands after a significant difference."""
_MARKS = {NOT_COMPARABLE: "≠", AS_PRINTED: "≈"}
"""Stands before a printed number that is not, or not wholly, known to be of the same conditions."""


@dataclass(frozen=True)
class Column:
    """One column: ``best`` are its bold cells, ``signs`` what stands after them."""

    heading: str
    cells: list[str]
    best: list[bool] = field(default_factory=list)
    signs: list[str] = field(default_factory=list)

    def is_best(self, line: int) -> bool:
        """Whether the cell is set bold."""
        return bool(self.best) and self.best[line]

    def sign(self, line: int) -> str:
        """What stands after the cell; "" for most."""
        return self.signs[line] if self.signs else ""


@dataclass(frozen=True)
class Described:
    """A row as the list below a table has it."""

    name: str
    seeds: str
    settings: dict[str, str]
    """Those of its own."""
    runs: list[str]
    """Run ids, in the order of the seeds."""
    tuning: dict[str, str]
    failure: str = ""
    """What became of the runs that failed; empty where none did."""


@dataclass(frozen=True)
class Shown:
    """One table. ``names`` are the rows' columns in full, ``short`` the same with letters for backbones."""

    caption: str
    rank: Column
    names: list[Column]
    short: list[Column]
    letters: str
    """The line that says what the letters stand for; empty where one backbone is all rows'."""
    scores: list[Column]
    status: list[Column]
    """``failed: reason`` of the rows without a number, in full; no column where there is no such row."""
    further: list[Column]
    """Published numbers, costs, rounds to the target: what may stand in a second table where one is too wide."""
    notes: list[str]
    failures: list[str]
    """What became of the runs that failed, of rows that have a number, or lost seeds for several reasons."""
    common: dict[str, str]
    """Settings of all rows."""
    rows: list[Described]


def tables(board: pd.DataFrame) -> Iterator[Shown]:
    """The tables of a board, in its order."""
    if board.empty:
        return
    for _, block in board.groupby("block"):
        yield _shown(block)


def _shown(block: pd.DataFrame) -> Shown:
    backbones = list(dict.fromkeys(block["backbone"]))
    shared = backbones[0] if len(backbones) == 1 else ""
    labels = [str(label) for label in block["label"]]
    marks = list(_marks(block))
    called = labels if shared else [str(row) for row in block["row"]]
    names = [Column("method" if shared else "row", called, signs=marks)]
    measured = block[block["status"] != FAILED]
    letters = dict(zip(backbones, map(_letter, range(len(backbones))), strict=True))
    legend = ", ".join(f"{letter} = {backbone}" for backbone, letter in letters.items())
    caption = f"{block['caption'].iloc[0]}" + (f" · {shared}" if shared else "")
    counted = seed_counts(block)
    told = f"{counted}, mean ± sample std" if counted.endswith("s") else counted or "no run has finished"
    common, rows = _described(block, names[0].cells)
    scores = list(_scores(block))
    own = list(measured["label"])
    return Shown(
        caption=f"{caption} · {told}; MB up and down",
        rank=Column("#", [NONE if pd.isna(rank) else str(rank) for rank in block["rank"]]),
        names=names,
        short=names
        if shared
        else [Column("method", labels, signs=marks), Column("on", [letters[b] for b in block["backbone"]])],
        letters="" if shared else f"on: {legend}",
        scores=[*scores, *_seeds(block), *_difference(block)],
        status=list(_status(block)),
        further=[*_published(block), *(_costs(block) if len(measured) else [])],
        notes=[
            *_significance(measured),
            *_without_baseline(measured),
            *_incomplete(measured),
            *server_data_notes(own, list(measured["server_data"])),
            *not_on_unseen_notes(own, list(measured["not_on_unseen"])),
            *([UNSEEN] if any(column.heading == heading(_NEW) for column in scores) else []),
            *([OWN_MODELS] if any(column.heading == heading(_OWN) for column in scores) else []),
            *([f"{untrained.MARK} {untrained.NOTE}"] if block["untrained"].any() else []),
            *([DIFFER] if seeds_differ(block) else []),
            *published_notes(block),
            *_tuned(block, labels),
            *_to_target(block),
        ],
        failures=list(_failures(block, names[0].cells)),
        common=common,
        rows=rows,
    )


def _scores(block: pd.DataFrame) -> Iterator[Column]:
    for metric in json.loads(block["shown"].iloc[0]):
        means = block[f"{metric}_mean"]
        if means.notna().any():
            # all that look best at the shown precision, of those with all the seeds
            rounded = means.where(may_be_best(block, metric)).round(1)
            best = (rounded == rounded.max()).tolist() if len(block) > 1 else []
            yield Column(heading(metric), [spread(*pair) for pair in _pairs(block, metric)], best)


def _marks(block: pd.DataFrame) -> Iterator[str]:
    for (status, failure), is_untrained in zip(_outcomes(block), block["untrained"], strict=True):
        yield (MARK if status != FAILED and failure else "") + (untrained.MARK if is_untrained else "")


def _seeds(block: pd.DataFrame) -> Iterator[Column]:
    if seeds_differ(block):
        yield Column("seeds", [cell or NONE for cell in seed_cells(block)])


def _difference(block: pd.DataFrame) -> Iterator[Column]:
    if (block["delta_seeds"] > 0).any():
        cells = [spread(*pair, sign="+") for pair in _pairs(block, "delta")]
        signs = [SIGN if said == SIGNIFICANT else "" for said in block["significance"]]
        yield Column(f"Δ {block['baseline'].iloc[0].partition(' · ')[0]}", cells, signs=signs)


def _status(block: pd.DataFrame) -> Iterator[Column]:
    if (block["status"] == FAILED).any():
        lines = zip(_outcomes(block), block["failures"], strict=True)
        yield Column(STATUS, [_outcome(*outcome, text) for outcome, text in lines])


def _outcome(status: str, failure: str, failures: str) -> str:
    """``failed: reason``, ``2 of 3 seeds``, or nothing of a row with all its seeds."""
    if status == FAILED:
        return reasons(failures)
    return failure.partition(";")[0] if status == PARTLY else ""


def _failures(block: pd.DataFrame, names: list[str]) -> Iterator[str]:
    for name, (status, failure), text in zip(names, _outcomes(block), block["failures"], strict=True):
        if failure and (status != FAILED or len({one["reason"] for one in json.loads(text)}) > 1):
            yield f"{MARK + ' ' if status != FAILED else ''}{name}: {failure}"


def _outcomes(block: pd.DataFrame) -> Iterator[tuple[str, str]]:
    return zip(block["status"].tolist(), block["failure"].tolist(), strict=True)


def _published(block: pd.DataFrame) -> Iterator[Column]:
    if "published" not in block or not (block["comparable"] != "").any():
        return
    cells = []
    for value, several, comparable in zip(
        block["published"], block["published_several"], block["comparable"], strict=True
    ):
        number = f"{value:.1f}" if pd.notna(value) else "several" if json.loads(several) else NONE
        cells.append(f"{_MARKS[comparable]} {number}" if comparable in _MARKS else number)
    yield Column("paper", cells)
    if block["published_delta"].notna().any():
        yield Column("Δ paper", [spread(delta, float("nan"), sign="+") for delta in block["published_delta"]])


def _costs(block: pd.DataFrame) -> Iterator[Column]:
    yield Column("MB", [megabytes(n) for n in block["bytes_up_mean"] + block["bytes_down_mean"]])
    yield Column("train s", [NONE if pd.isna(s) else f"{s:.1f}" for s in block["train_seconds_mean"]])
    if (block["target_reached"] != "").any():
        means = zip(block["rounds_to_target_mean"], block["target_reached"], strict=True)
        yield Column("rounds", [_rounds(mean, reached) for mean, reached in means])


def _rounds(mean: float, reached: str) -> str:
    """``12``, ``8.5 (2/3)`` where a seed never reaches the target, ``never`` where none does."""
    if not reached:
        return NONE
    if pd.isna(mean):
        return "never"
    some, _, all_seeds = reached.partition("/")
    return f"{mean:.1f}".removesuffix(".0") + ("" if some == all_seeds else f" ({reached})")


def _significance(block: pd.DataFrame) -> Iterator[str]:
    """What the sign after a difference means; why there is none."""
    asked = block[~block["significance"].isin([BASELINE, NO_BASELINE])]
    if asked.empty:
        return
    tested = asked[asked["p_value"].notna()]
    without = asked[asked["p_value"].isna()]
    if len(tested):
        counts = sorted(set(tested["delta_seeds"]))
        pairs = f"{counts[0]} seeds" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds"
        holm = f"Holm over {len(tested)} rows" if len(tested) > 1 else "one row, not corrected"
        test = f"{tested['test'].iloc[0]} over {pairs}, {holm}"
        any_found = (tested["significance"] == SIGNIFICANT).any()
        yield f"{SIGN} p < {ALPHA}, {test}" if any_found else f"no difference is significant at {ALPHA}: {test}"
    for reason, rows in without.groupby("significance", sort=False):
        which = f" ({', '.join(dict.fromkeys(rows['label']))})" if len(tested) or len(without) > len(rows) else ""
        yield f"significance not tested{which}: {reason}"


def _without_baseline(block: pd.DataFrame) -> Iterator[str]:
    """Which rows are compared with nothing, and why."""
    without = block[block["baseline_note"] != ""]
    for why, rows in without.groupby("baseline_note", sort=False):
        which = f" for {', '.join(dict.fromkeys(rows['label']))}" if len(rows) < len(block) else ""
        yield f"no baseline{which}: {why}"


def _incomplete(block: pd.DataFrame) -> Iterator[str]:
    """Where a mean is missing since a seed is."""
    lacking: dict[str, list[str]] = {}
    for label, text in zip(block["label"], block["incomplete"], strict=True):
        for metric in json.loads(text):
            lacking.setdefault(metric, []).append(label)
    for metric, labels in lacking.items():
        last = ", without a rank" if metric == block["headline"].iloc[0] else ""
        yield f"no mean of {heading(metric)} for {', '.join(labels)}, which some seed lacks{last}"


def _tuned(block: pd.DataFrame, labels: list[str]) -> Iterator[str]:
    """What tuning spent, a line for every budget."""
    budgets: dict[str, list[str]] = {}
    for label, tuned, text in zip(labels, block["tuned"], block["tuning"], strict=True):
        if tuned:
            budget = {key: value for key, value in json.loads(text).items() if key not in ("study", "trial")}
            budgets.setdefault(", ".join(f"{key} {value}" for key, value in budget.items()), []).append(label)
    for spent, rows in budgets.items():
        yield f"tuned with {spent or 'a budget that is not recorded'}: {', '.join(rows)}"


def _to_target(block: pd.DataFrame) -> Iterator[str]:
    if (block["target_reached"] != "").any():
        yield "rounds: first evaluated round at the target, mean over the seeds that reach it"


def _described(block: pd.DataFrame, names: list[str]) -> tuple[dict[str, str], list[Described]]:
    """Settings that all rows share, and each row with what is its own."""
    settings = [dict(json.loads(text)) for text in block["settings"]]
    # a dot: a method's parameter, the row's own even where the table has no other row
    common = {k: v for k, v in settings[0].items() if "." not in k and all(o.get(k) == v for o in settings)}
    rows = []
    for position, line in enumerate(block.to_dict("records")):
        own = {key: value for key, value in settings[position].items() if key not in common}
        seeds = f"seed{'s' if ',' in line['seed_list'] else ''} {line['seed_list']}"
        tuning = dict(json.loads(line["tuning"])) if line["tuned"] else {}
        runs = list(json.loads(line["runs"]).values())
        rows.append(Described(names[position], seeds, own, runs, tuning, line["failure"]))
    return common, rows


def _letter(number: int) -> str:
    return chr(ord("A") + number) if number < 26 else str(number + 1)


def _pairs(block: pd.DataFrame, name: str) -> Iterator[tuple[float, float]]:
    return zip(block[f"{name}_mean"].tolist(), block[f"{name}_std"].tolist(), strict=True)
