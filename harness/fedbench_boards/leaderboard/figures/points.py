"""Data of figures: a metric by method, or by values of a setting, over seeds."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from fedbench.core.errors import FedbenchError, unknown_name
from fedbench.core.spec import BUDGET
from fedbench.tracking.schema import FINAL
from fedbench_boards.leaderboard.rows.identity import label_of, scores_of


@dataclass(frozen=True)
class Point:
    """Mean and deviation (of the sample; NaN for one seed) of a metric at the values of the swept settings."""

    at: tuple[float | str, ...]
    mean: float
    std: float
    seeds: int


def settings_of(run: pd.Series) -> dict[str, str]:
    """All settings of a run, by their names for ``--set``."""
    row = {name.removeprefix("training."): str(value) for name, value in json.loads(run["row_settings"]).items()}
    scenario = {name: str(value) for name, value in json.loads(run["scenario_settings"]).items()}
    return {**scenario, **{name: str(run[name]) for name in BUDGET}, **row}


def swept(results: pd.DataFrame, keys: Sequence[str], metric: str) -> dict[str, list[Point]]:
    """The points of each method, ascending, over the values that its runs have of the settings ``keys``.

    Methods whose runs have only one value are left out; rows of one method that differ in these settings only are taken
    together. FedbenchError for a setting of which no run has several values.
    """
    frame = results.copy()
    settings = [settings_of(run) for _, run in frame.iterrows()]
    for key in keys:
        known = sorted({name for one in settings for name in one})
        if not any(key in one for one in settings):
            raise unknown_name("setting of these runs", key, known)
        frame[f"at {key}"] = [_value(one.get(key, "")) for one in settings]
    frame["apart"] = [json.dumps({k: v for k, v in one.items() if k not in keys}, sort_keys=True) for one in settings]
    at = [f"at {key}" for key in keys]
    series: dict[str, list[Point]] = {}
    for (method, _, _, _), runs in frame.groupby(["method", "backbone", "setting", "apart"], sort=False):
        runs = runs[(runs[at] != "").all(axis=1)]
        points = [_point(values, of, metric) for values, of in runs.groupby(at, sort=False)]
        if len(points) > 1:
            setting = runs["setting"].iloc[0] if frame["setting"].nunique() > 1 else ""
            name = f"{method}, {setting}" if setting else str(method)
            series[name] = sorted([*series.get(name, []), *points], key=lambda point: tuple(map(_order, point.at)))
    if not series:
        raise FedbenchError(
            f"no method has runs at several values of {' and '.join(keys)}; run some, for instance with --set "
            f"{keys[0]}=VALUE,VALUE."
        )
    return series


def named(results: pd.DataFrame) -> dict[str, str]:
    """Row -> its label; the full name if others, tuned or on another backbone, have the same label."""
    rows = [str(row) for row in results["row"].unique()]
    alike = Counter(map(label_of, rows))
    return {row: label_of(row) if alike[label_of(row)] == 1 else row for row in rows}


def by_row(results: pd.DataFrame, metrics: Sequence[str]) -> dict[str, dict[str, pd.Series]]:
    """Row, as ``named`` -> metric -> its value by seed, of the metrics that the row has."""
    rows: dict[str, dict[str, pd.Series]] = {}
    names = named(results)
    for row, runs in results.groupby("row", sort=False):
        scores = {metric: scores_of(runs, metric) for metric in metrics}
        rows[names[str(row)]] = {metric: pd.Series(own) for metric, own in scores.items() if own}
    return rows


def _point(values: Any, runs: pd.DataFrame, metric: str) -> Point:
    own = runs.drop_duplicates("seed", keep="last")[FINAL + metric]
    return Point(tuple(values), float(own.mean(skipna=False)), float(own.std(ddof=1)), len(own))


def _value(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _order(value: float | str) -> tuple[bool, float, str]:
    return (isinstance(value, str), 0.0 if isinstance(value, str) else value, str(value))
