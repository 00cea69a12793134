"""The identity of rows: the columns in which runs of a row agree, the row's name, its numbers over seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence

import pandas as pd

from fedbench.core.spec import BUDGET
from fedbench.tracking.schema import FINAL
from fedbench_boards.leaderboard.model import Line, ScoreCell

PROTOCOL = ("dataset", "files_hash", "scenario_settings", *BUDGET)
"""Columns in which all runs of a table agree. The runs read the same files, at the sizes of their backbones or
teachers."""
ROW = ("row", "method", "backbone", "tune", "row_settings")
"""Columns in which all runs of a row agree, besides their table's protocol; the runs differ in their seeds."""
_COSTS = ("bytes_up", "bytes_down", "train_seconds", "seconds")
ON_NETWORK = "seconds at "
"""Prefix of the cost on a given network, see `fedbench_boards.leaderboard.network`."""


def named_rows(protocol: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The rows of one protocol by their full names, each with its runs by seed."""
    rows = grouped(protocol)
    return dict(zip(names(rows), rows, strict=True))


def grouped(protocol: pd.DataFrame) -> list[pd.DataFrame]:
    """The runs of each row of one protocol, by seed."""
    return [runs.sort_values("seed") for _, runs in protocol.groupby(list(ROW), sort=False, dropna=False)]


def names(rows: Sequence[pd.DataFrame]) -> list[str]:
    """The rows' names; if two have the same, the settings in which they differ are added."""
    called = [row_of(runs) for runs in rows]
    # the method as well: two may have been given one label
    kinds = ("method", "backbone", "tune")
    settings = [{**{k: runs[k].iloc[0] for k in kinds}, **json.loads(runs["row_settings"].iloc[0])} for runs in rows]
    full = []
    for name, own in zip(called, settings, strict=True):
        namesakes = [other for n, other in zip(called, settings, strict=True) if n == name]
        keys = sorted({key for other in namesakes for key in {*own, *other} if own.get(key) != other.get(key)})
        differing = ", ".join(f"{key.removeprefix('training.')}={own.get(key, '-')}" for key in keys)
        full.append(f"{name} [{differing}]" if differing else name)
    return full


def row_of(runs: pd.DataFrame) -> str:
    """The row's name in the runs' suite."""
    return str(runs["row"].iloc[0])


def label_of(row: str) -> str:
    """A row's name without its backbone."""
    return row.partition(" · ")[0]


def seeds_of(runs: pd.DataFrame) -> tuple[int, ...]:
    """The seeds of a row's runs, in their order."""
    return tuple(int(seed) for seed in runs["seed"])


def scores_of(runs: pd.DataFrame, metric: str) -> dict[int, float]:
    """Seed -> ``metric`` of its run, where the run has it."""
    if FINAL + metric not in runs:
        return {}
    pairs = zip(seeds_of(runs), map(float, runs[FINAL + metric]), strict=True)
    return {seed: score for seed, score in pairs if not math.isnan(score)}


def line_of(name: str, runs: pd.DataFrame, metrics: Iterable[str], *, has_failed: bool) -> Line:
    """The line of the row called ``name``: its settings, and its ``metrics`` over ``runs`` (none finished, or all).

    A mean is NaN for a metric that any of the runs lacks.
    """
    first = runs.iloc[0]
    seeds = seeds_of(runs)
    settings = {key: str(first[key]) for key in ("backbone", "tune")} | json.loads(first["row_settings"])
    return Line(
        row=name,
        label=name.replace(f" · {first['backbone']}", "", 1),
        setting=str(first["setting"]),
        scale=str(first["scale"]),
        dataset=str(first["dataset"]),
        scenario=str(first["scenario"]),
        method=str(first["method"]),
        backbone=str(first["backbone"]),
        server_data=str(first["server_data"]),
        not_on_unseen=str(first["not_on_unseen"]),
        tuned=bool(first["tuned"]),
        tuning=json.loads(first["tuning"]),
        runs={} if has_failed else dict(zip(seeds, runs["run_id"], strict=True)),
        mlflow_ids={} if has_failed else dict(zip(seeds, runs["mlflow_id"], strict=True)),
        seeds=seeds,
        settings={key.removeprefix("training."): value for key, value in settings.items() if value != ""},
        cells={metric: _cell(runs, metric) for metric in dict.fromkeys(metrics)},
        costs={cost: mean_of(runs, cost) for cost in costs_of(runs)},
    )


def costs_of(runs: pd.DataFrame) -> list[str]:
    """Names of the runs' costs, including those computed for a given network."""
    stated = [name for name in map(str, runs) if name.startswith(FINAL + ON_NETWORK)]
    return [*_COSTS, *(name.removeprefix(FINAL) for name in stated)]


def _cell(runs: pd.DataFrame, metric: str) -> ScoreCell:
    if FINAL + metric not in runs:
        return ScoreCell()
    return ScoreCell(mean_of(runs, metric), float(runs[FINAL + metric].std(ddof=1, skipna=False)))


def mean_of(runs: pd.DataFrame, metric: str) -> float:
    """The mean over all seeds; NaN if one lacks the metric, since a mean over other seeds would not be comparable."""
    return float(runs[FINAL + metric].mean(skipna=False)) if FINAL + metric in runs else float("nan")


def times(line: Line, runs: pd.DataFrame) -> dict[str, float]:
    """Times that papers print: seconds in all, and a round."""
    seconds, rounds = line.cost("train_seconds"), int(runs["rounds"].iloc[0])
    return {"train_seconds": seconds, "seconds_a_round": seconds / rounds if rounds else float("nan")}
