"""The main table of a page: columns and cells, every number both as readers see it and in full precision."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from fedbench.core.wording import NONE, heading, megabytes, spread
from fedbench.leaderboard.failures import FAILED
from fedbench.leaderboard.published import AS_PRINTED, COMPARABLE, NOT_COMPARABLE
from fedbench.leaderboard.rows.ranking import may_be_best
from fedbench.leaderboard.rows.seeds import seed_cells, seeds_differ
from fedbench.leaderboard.rows.significance import NOT_SIGNIFICANT, SIGNIFICANT

_NOT_METRICS = ("delta", "rounds_to_target", "bytes_up", "bytes_down", "train_seconds", "seconds")
_APART = ("domain_accuracy/", "class_accuracy/")
"""Metrics of single domains and classes: too many for columns."""
MARKS = {SIGNIFICANT: "*", NOT_SIGNIFICANT: "n.s."}
"""What stands after a difference; the legend says it in words."""
AGREEING = {COMPARABLE: "comparable", AS_PRINTED: "comparable as far as printed", NOT_COMPARABLE: "not comparable"}
"""How far a printed number is of the run's conditions, in words."""


@dataclass(frozen=True)
class Column:
    """A column: ``first`` is the direction of the first sort, "ascending" or "descending"."""

    key: str
    heading: str
    explained: str = ""
    first: str = "descending"


@dataclass(frozen=True)
class Cell:
    """``shown`` and ``spread`` for readers; ``value`` and ``deviation`` in full, "" where there is none."""

    shown: str
    value: str = ""
    spread: str = ""
    deviation: str = ""
    best: bool = False
    mark: str = ""
    note: str = ""
    title: str = ""


def metrics_of(block: pd.DataFrame, headline: str) -> list[str]:
    """The metrics with a column, the headline first: those the board says tables show, as far as any row has them."""
    named = [str(name).removesuffix("_mean") for name in block if str(name).endswith("_mean")]
    said = texts(block, "shown")[0]
    named = [name for name in (headline, *json.loads(said)) if name in named] if said else named
    kept = [name for name in dict.fromkeys(named) if name not in _NOT_METRICS and not name.startswith(_APART)]
    # whatever rows are ranked by has a column
    kept = [name for name in kept if name != headline and block[f"{name}_mean"].notna().any()]
    return ([headline] if headline in named else []) + kept


def columns_of(block: pd.DataFrame, headline: str) -> list[tuple[Column, list[Cell]]]:
    """The columns beside the row's name, each with a cell a row; what the board lacks has none."""
    made = [_rank(block)] if "rank" in block else []
    for metric in metrics_of(block, headline):
        told = f"{metric}, %: mean ± standard deviation over seeds"
        made.append((Column(metric, heading(metric), told), _measured(block, metric)))
    if seeds_differ(block):
        cells = [_cell(n, cell) for n, cell in zip(numbers(block, "seeds"), seed_cells(block), strict=True)]
        made.append((Column("seeds", "seeds", "the row's seeds, by their number"), cells))
    if has(block, "delta_mean"):
        made.append(_delta(block, headline))
    if has(block, "rounds_to_target_mean"):
        made.append(_rounds(block, headline))
    if has(block, "published"):
        made += _published(block)
    made.append(_sent(block))
    if has(block, "train_seconds_mean"):
        cells = [_cell(value, f"{value:,.1f}") for value in numbers(block, "train_seconds_mean")]
        made.append(
            (
                Column(
                    "train_seconds", "train\N{NO-BREAK SPACE}s", "seconds of training, mean over seeds", "ascending"
                ),
                cells,
            )
        )
    return made


def has(block: pd.DataFrame, name: str) -> bool:
    """Whether any row has a value in the column."""
    return name in block and bool(block[name].notna().any())


def numbers(block: pd.DataFrame, name: str) -> list[float]:
    """A column's values; NaN for all where the board has no such column."""
    if name not in block:
        return [math.nan] * len(block)
    return [float(value) for value in pd.to_numeric(block[name], errors="coerce").astype(float)]


def texts(block: pd.DataFrame, name: str) -> list[str]:
    """A column's values as text; "" where a value or the column is missing."""
    if name not in block:
        return [""] * len(block)
    return ["" if pd.isna(value) else str(value) for value in block[name]]


def without_numbers(block: pd.DataFrame) -> list[bool]:
    """Of which rows no run has finished."""
    return [status == FAILED for status in texts(block, "status")]


def mappings(block: pd.DataFrame, name: str) -> list[dict[str, Any]]:
    """A column of JSON objects; empty ones where a value or the column is missing."""
    return [json.loads(text) if text else {} for text in texts(block, name)]


def assigned(settings: Mapping[str, Any]) -> str:
    """``a=1, b=2``."""
    said = {k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for k, v in settings.items()}
    return ", ".join(f"{key}={value}" for key, value in said.items() if value != "")


def probability(value: float) -> str:
    """A p-value as papers print it."""
    return "p < 0.001" if value < 0.001 else f"p = {value:.2g}"


def domains_of(block: pd.DataFrame) -> list[str]:
    """The domains that any row has an accuracy of."""
    head, tail = "domain_accuracy/", "_mean"
    named = [str(name) for name in block if str(name).startswith(head) and str(name).endswith(tail)]
    return [name[len(head) : -len(tail)] for name in named if block[name].notna().any()]


def _rank(block: pd.DataFrame) -> tuple[Column, list[Cell]]:
    cells = [_cell(value, f"{value:g}") for value in numbers(block, "rank")]
    return Column("rank", "#", "rank by the first accuracy column", "ascending"), cells


def _cell(value: float, shown: str, **rest: Any) -> Cell:
    return Cell(NONE, **rest) if math.isnan(value) else Cell(shown, value=repr(value), **rest)


def _measured(block: pd.DataFrame, name: str, *, signed: bool = False) -> list[Cell]:
    """Cells of ``name`` ± its standard deviation, the best at the shown precision marked."""
    means, deviations = numbers(block, f"{name}_mean"), numbers(block, f"{name}_std")
    shown = [spread(mean, math.nan, "+" if signed else "") for mean in means]
    whole = may_be_best(block, name)
    found = (round(mean, 1) for mean, is_whole in zip(means, whole, strict=True) if is_whole and not math.isnan(mean))
    best = max(found, default=math.nan)
    cells = []
    for mean, std, text, is_whole in zip(means, deviations, shown, whole, strict=True):
        known = not math.isnan(mean) and not math.isnan(std)
        deviation = {"spread": f"± {std:.1f}", "deviation": repr(std)} if known else {}
        is_best = not signed and is_whole and round(mean, 1) == best and len(block) > 1
        cells.append(_cell(mean, text, best=is_best, **deviation))
    return cells


def _delta(block: pd.DataFrame, headline: str) -> tuple[Column, list[Cell]]:
    baseline = (texts(block, "baseline") or [""])[0].partition(" · ")[0]
    facts = zip(
        _measured(block, "delta", signed=True),
        *(texts(block, name) for name in ("significance", "test", "delta_seeds")),
        *(numbers(block, name) for name in ("p_value", "p_adjusted")),
        strict=True,
    )
    cells = []
    for cell, said, test, seeds, raw, adjusted in facts:
        told = [said] if said else []
        told += [f"{test} over {seeds} seeds, {probability(raw)}"] if not math.isnan(raw) else []
        told += [f"adjusted {probability(adjusted)}"] if not math.isnan(adjusted) else []
        cells.append(replace(cell, mark=MARKS.get(said, ""), title=", ".join(told)))
    told_once = f"{heading(headline)} minus that of {baseline}, paired over the seeds both have"
    return Column("delta", f"Δ\N{NO-BREAK SPACE}{baseline}", told_once), cells


def _rounds(block: pd.DataFrame, headline: str) -> tuple[Column, list[Cell]]:
    targets = numbers(block, "target")
    known = {round(target, 1) for target in targets if not math.isnan(target)}
    metric = texts(block, "target_metric")[0] or headline
    title = f"rounds to {next(iter(known)):g} %" if len(known) == 1 else "rounds to target"
    title += f" {heading(metric)}" if metric != headline else ""
    means, deviations = numbers(block, "rounds_to_target_mean"), numbers(block, "rounds_to_target_std")
    counts = [text.partition("/") for text in texts(block, "target_reached")]
    ranks = may_be_best(block, metric)
    # a mean over the seeds that were fast enough says nothing of the others
    everywhere = [has_all and of == seeds for has_all, (of, _, seeds) in zip(ranks, counts, strict=True)]
    whole = [round(mean, 1) for mean, in_all in zip(means, everywhere, strict=True) if in_all]
    fewest = min((mean for mean in whole if not math.isnan(mean)), default=math.nan)
    cells = []
    for mean, std, target, (of, _, seeds), in_all in zip(means, deviations, targets, counts, everywhere, strict=True):
        note = f"{of} of {seeds} seeds" if seeds and of != seeds else ""
        told = "" if math.isnan(target) else f"to {target:.1f} %"
        cell = _cell(mean, f"{mean:.1f}".removesuffix(".0"), note=note, title=told)
        best = in_all and round(mean, 1) == fewest and len(known) < 2 and len(block) > 1
        deviation = {} if math.isnan(std) else {"spread": f"± {std:.1f}", "deviation": repr(std)}
        cells.append(replace(cell, best=best, **deviation))
    explained = "first evaluated round with the target accuracy, mean over the seeds that reach it"
    return Column("rounds_to_target", title, explained, "ascending"), cells


def _published(block: pd.DataFrame) -> Iterator[tuple[Column, list[Cell]]]:
    values, deltas = numbers(block, "published"), numbers(block, "published_delta")
    facts = [texts(block, name) for name in ("comparable", "differs", "differences", "published_source")]
    cells = []
    for value, flag, differs, pairs, source in zip(values, *facts, strict=True):
        # an older board says only in words what differs
        aspects = ", ".join(aspect for aspect, *_ in json.loads(pairs)) if pairs else differs
        note = AGREEING.get(flag, "") + (f": {aspects}" if flag == NOT_COMPARABLE else "")
        title = "; ".join(text for text in (source, differs) if text)
        cells.append(_cell(value, f"{value:g}", note=note, title=title))
    yield Column("published", "published", "what the paper prints, and whether the settings agree"), cells
    if has(block, "published_delta"):
        shown = [_cell(value, spread(value, math.nan, "+")) for value in deltas]
        yield Column("published_delta", "Δ\N{NO-BREAK SPACE}published", "measured minus published"), shown


def _sent(block: pd.DataFrame) -> tuple[Column, list[Cell]]:
    cells = []
    for up, down in zip(numbers(block, "bytes_up_mean"), numbers(block, "bytes_down_mean"), strict=True):
        told = "" if math.isnan(up + down) else f"{megabytes(up)} MB up, {megabytes(down)} MB down"
        cells.append(_cell(up + down, megabytes(up + down), title=told))
    return Column("bytes", "MB", "sent up and down by all clients in all rounds, 10^6 bytes", "ascending"), cells


def shared_settings(settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all rows were run with; a method's own parameters (with a dot) stay with their row."""
    first = settings[0] if settings else {}
    return {k: v for k, v in first.items() if "." not in k and all(other.get(k) == v for other in settings)}
