"""Rounds, bytes and seconds until a method reaches an accuracy."""

from __future__ import annotations

import pandas as pd

from fedbench.kinds.measured import lower_is_better

_NOISE = 1e-9
"""Tolerance of a target: accuracies are means of shares, and one equal to the target must count."""


def rounds_to_target(curves: pd.DataFrame, mlflow_ids: list[str], metric: str, target: float) -> list[int | None]:
    """The first evaluated round of each run at which ``metric`` is at least ``target``; None for one that never is.

    If less is better, it is the first round at most at ``target``. ``curves`` is `leaderboard.results.load_curves`;
    runs without a curve are left out. Round 0, the model before training, counts.
    """
    sign = -1 if lower_is_better(metric) else 1
    first: list[int | None] = []
    for mlflow_id in mlflow_ids:
        curve = curves[(curves["mlflow_id"] == mlflow_id) & curves[metric].notna()]
        reached = curve.loc[sign * (curve[metric] - target) >= -_NOISE, "round"]
        if len(curve):
            first.append(int(reached.min()) if len(reached) else None)
    return first


def spent_until(curves: pd.DataFrame, mlflow_ids: list[str], rounds: list[int | None], column: str) -> list[float]:
    """``column`` (``bytes_total``, ``seconds_total``) of the runs at their ``rounds``, as `rounds_to_target` gives
    them.

    Only runs that reach the target are listed.
    """
    with_curve = [run for run in mlflow_ids if (curves["mlflow_id"] == run).any()]
    spent = []
    for run, number in zip(with_curve, rounds, strict=True):
        if number is not None:
            at = curves[(curves["mlflow_id"] == run) & (curves["round"] == number)]
            spent.append(float(at[column].iloc[0]) if column in at else float("nan"))
    return spent


def is_tracked(curves: pd.DataFrame, mlflow_ids: list[str], metric: str) -> bool:
    """Whether all runs with a curve have ``metric`` in every evaluated round.

    Round 0 is excepted, since there are no own models before it.
    """
    own = curves[curves["mlflow_id"].isin(mlflow_ids)]
    if metric not in own:
        return False
    known = own[metric].notna()
    have = set(own.loc[known, "mlflow_id"])
    return bool(have) and have == set(own["mlflow_id"]) and bool(known[own["round"] > 0].all())
