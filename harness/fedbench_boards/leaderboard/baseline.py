"""The baseline of a row: the baseline's runs on the row's own backbone, tuned like the row."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from fedbench.tracking.schema import FINAL
from fedbench_boards.leaderboard.model import Delta, ScoreCell
from fedbench_boards.leaderboard.rows.identity import label_of, row_of
from fedbench_boards.leaderboard.rows.versions import newest_version
from fedbench_boards.statistics.paired import BASELINE, NO_BASELINE, Test, interval, paired

_KINDS = ("backbone", "tune", "tuned")
"""Properties that a row shares with its baseline; without such a baseline a row has none."""


@dataclass(frozen=True, eq=False)
class Baseline:
    """The runs that a row is compared with, or the reason why there are none."""

    runs: pd.DataFrame | None
    why: str = ""


def baseline_of(runs: pd.DataFrame, rows: Mapping[str, pd.DataFrame], baseline: str) -> Baseline:
    """The baseline of ``runs``: the row of that full name, else one of that label or method that is of their kind."""
    # a tuned row's name means that row; another name stands for its tuned twin as well
    called_by = str if _untuned(baseline) != baseline else _untuned
    whole = [other for name, other in rows.items() if baseline in (called_by(name), called_by(row_of(other)))]
    if whole:
        return _one_of(runs, whole, _KINDS, baseline)
    called = [other for other in rows.values() if baseline in (label_of(row_of(other)), other["method"].iloc[0])]
    words = [baseline]
    for key in _KINDS:
        alike = [other for other in called if _alike(other, runs, key)]
        if len(alike) < len(called):
            words = _narrowed(words, key, runs)
        called = alike
    if not called:
        return Baseline(None, f"no {' '.join(words)}")
    labelled = [other for other in called if baseline == label_of(row_of(other))]
    return _one_of(runs, labelled or called, (), baseline)


def _one_of(runs: pd.DataFrame, rows: list[pd.DataFrame], kinds: Sequence[str], baseline: str) -> Baseline:
    """Choose the one of ``rows`` most like ``runs``: of the same kind, then with the same settings, as far as any
    is."""
    for key in (*kinds, "row_settings"):
        rows = [other for other in rows if _alike(other, runs, key)] or rows
    rows = newest_version(rows)
    if len(rows) > 1:
        return Baseline(None, f"{len(rows)} rows are called {baseline}; give --baseline ROW")
    return Baseline(rows[0])


def _narrowed(words: list[str], key: str, runs: pd.DataFrame) -> list[str]:
    """The description of a baseline, extended by what a row requires of it."""
    value = runs[key].iloc[0]
    if key == "tuned":
        return ["tuned" if value else "untuned", *words]
    return [*words, f"on {value}" if key == "backbone" else f"({value})"]


def _alike(one: pd.DataFrame, other: pd.DataFrame, key: str) -> bool:
    values = one[key].iloc[0], other[key].iloc[0]
    if key == "row_settings":
        return _shared(values[0]) == _shared(values[1])
    if key == "tuned":
        # every method has a study of its own; what counts is whether there was one, where anything can be tuned
        untunable = not int(one["trainable_parameters"].iloc[0])
        return untunable or bool(values[0]) == bool(values[1])
    return bool(values[0] == values[1])


def _shared(row_settings: str) -> dict[str, str]:
    """The settings in which rows of two methods can agree: neither a method's own, nor its study."""
    settings = dict(json.loads(row_settings))
    return {k: v for k, v in settings.items() if ("." not in k or k.startswith("training.")) and k != "tuned"}


def _untuned(row: str) -> str:
    return row.replace(", tuned)", ")").replace(" (tuned)", "")


def delta_of(runs: pd.DataFrame, baseline: Baseline, headline: str, test: Test) -> Delta:
    """The difference to the baseline over common seeds, with its test."""
    base = baseline.runs
    if base is None or base is runs:
        return Delta(significance=NO_BASELINE if base is None else BASELINE, test=test.title, note=baseline.why)
    column = FINAL + headline
    pairs = pd.concat([runs.set_index("seed")[column], base.set_index("seed")[column]], axis=1, keys=["ours", "theirs"])
    pairs = pairs.dropna()
    difference = pairs["ours"] - pairs["theirs"]
    outcome = paired(list(pairs["ours"]), list(pairs["theirs"]), test)
    low, high = interval(list(difference))
    return Delta(
        cell=ScoreCell(float(difference.mean()), float(difference.std(ddof=1))),
        low=low,
        high=high,
        seeds=len(difference),
        p_value=outcome.p_value,
        significance=outcome.reason if len(difference) else _unpaired(runs, base, headline),
        test=test.title,
        note=baseline.why,
    )


def _unpaired(runs: pd.DataFrame, base: pd.DataFrame, headline: str) -> str:
    """The reason why a row and its baseline have no pair."""
    common = set(runs["seed"]) & set(base["seed"])
    return f"no {headline}" if common else "no seed in common with the baseline"
