"""What makes runs one row of a leaderboard: the columns that they agree in, the row's name, its numbers over seeds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from fedbench.leaderboard.results import BUDGET
from fedbench.tracking.store import FINAL

PROTOCOL = ("dataset", "files_hash", "scenario_settings", *BUDGET)
"""What all runs of a table agree in. They read the same files, at the sizes that their backbones or teachers take."""
ROW = ("row", "method", "backbone", "tune", "row_settings")
"""What all runs of a row agree in, beside their table's protocol; they differ in their seeds."""
_NAMED = ("setting", "scale", "dataset", "scenario", "method", "backbone", "server_data", "not_on_unseen")
"""What a line tells of its runs as they have it."""
_COSTS = ("bytes_up", "bytes_down", "train_seconds", "seconds")


def named_rows(protocol: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The rows of one protocol by their full names, each with its runs by seed."""
    rows = grouped(protocol)
    return dict(zip(names(rows), rows, strict=True))


def grouped(protocol: pd.DataFrame) -> list[pd.DataFrame]:
    """The runs of each row of one protocol, by seed."""
    return [runs.sort_values("seed") for _, runs in protocol.groupby(list(ROW), sort=False, dropna=False)]


def names(rows: Sequence[pd.DataFrame]) -> list[str]:
    """The rows' names; where two are called the same, with the settings in which they differ."""
    called = [row_of(runs) for runs in rows]
    # the method as well: two may have been given one label
    kinds = ("method", "backbone", "tune")
    settings = [{**{k: runs[k].iloc[0] for k in kinds}, **json.loads(runs["row_settings"].iloc[0])} for runs in rows]
    full = []
    for name, own in zip(called, settings, strict=True):
        namesakes = [other for n, other in zip(called, settings, strict=True) if n == name]
        keys = sorted({key for other in namesakes for key in {*own, *other} if own.get(key) != other.get(key)})
        told = ", ".join(f"{key.removeprefix('training.')}={own.get(key, '-')}" for key in keys)
        full.append(f"{name} [{told}]" if told else name)
    return full


def row_of(runs: pd.DataFrame) -> str:
    """What the runs' suite calls their row."""
    return str(runs["row"].iloc[0])


def label_of(row: str) -> str:
    """A row's name without its backbone."""
    return row.partition(" · ")[0]


def seeds_of(runs: pd.DataFrame) -> tuple[int, ...]:
    """The seeds of a row's runs, in their order."""
    return tuple(int(seed) for seed in runs["seed"])


def identity(name: str, runs: pd.DataFrame, headline: str) -> dict[str, Any]:
    """Which row it is, and every run behind it."""
    first = runs.iloc[0]
    seeds = [str(seed) for seed in runs["seed"]]
    return {
        "label": name.replace(f" · {first['backbone']}", "", 1),
        **{key: str(first[key]) for key in _NAMED},
        "tuned": bool(first["tuned"]),
        "tuning": str(first["tuning"]),
        "headline": headline,
        "runs": json.dumps(dict(zip(seeds, runs["run_id"], strict=True))),
        "mlflow_ids": json.dumps(dict(zip(seeds, runs["mlflow_id"], strict=True))),
    }


def cells(runs: pd.DataFrame, metrics: Iterable[str]) -> dict[str, Any]:
    """The row's means and standard deviations over its runs; NaN for a metric that any of them lacks."""
    found: dict[str, Any] = {"seeds": len(runs)}
    for metric in dict.fromkeys(metrics):
        found[f"{metric}_mean"] = mean_of(runs, metric)
        found[f"{metric}_std"] = runs[FINAL + metric].std(ddof=1, skipna=False)
    for cost in _COSTS:
        found[f"{cost}_mean"] = mean_of(runs, cost)
    first = runs.iloc[0]
    named = {name: str(first[name]) for name in ("backbone", "tune")} | json.loads(first["row_settings"])
    own = {key.removeprefix("training."): value for key, value in named.items() if value != ""}
    found["seed_list"] = ", ".join(str(seed) for seed in runs["seed"])
    found["settings"] = json.dumps(own, ensure_ascii=False)
    return found


def mean_of(runs: pd.DataFrame, metric: str) -> float:
    """Over all seeds: one that lacks the metric would be left out of this row's mean only, so there is none then."""
    return float(runs[FINAL + metric].mean(skipna=False)) if FINAL + metric in runs else float("nan")
