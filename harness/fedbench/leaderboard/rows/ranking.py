"""What takes all rows of a table: their ranks, the correction of their tests, and whose numbers may be its best."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from fedbench.leaderboard.failures import FAILED
from fedbench.leaderboard.rows.significance import holm, verdict
from fedbench.leaderboard.untrained import is_of_global_model

_DIGITS = 9
"""Means of percentages that agree to so many digits share a rank."""


def compared(lines: Sequence[Mapping[str, Any]], headline: str) -> list[dict[str, Any]]:
    """The lines of one table in order, with ``rank``, ``whole``, ``p_adjusted`` and the verdict on the difference.

    ``whole`` is a line that lost no seed which another one finished. Rank 1 has the best ``headline``; equal means
    share the smaller rank. It is None for a line without a mean, one that is not whole, and the accuracy of a global
    model that is never trained.
    """
    finished = {seed for line in lines for seed in json.loads(line["runs"])}
    whole = [line["status"] != FAILED and not _lost(line) & finished for line in lines]
    eligible = [
        is_whole and not (line["untrained"] and is_of_global_model(headline))
        for line, is_whole in zip(lines, whole, strict=True)
    ]
    means = [line[f"{headline}_mean"] if may else math.nan for line, may in zip(lines, eligible, strict=True)]
    ranks = pd.Series(means, dtype=float).round(_DIGITS).rank(method="min", ascending=False)
    tested = [number for number, line in enumerate(lines) if not math.isnan(line["p_value"])]
    adjusted = dict(zip(tested, holm([lines[number]["p_value"] for number in tested]), strict=True))
    made: list[dict[str, Any]] = []
    for number, (line, rank, is_whole) in enumerate(zip(lines, ranks, whole, strict=True)):
        said = verdict(adjusted[number]) if number in adjusted else line["significance"]
        rest = {"p_adjusted": adjusted.get(number, math.nan), "significance": said, "whole": is_whole}
        made.append({"rank": None if math.isnan(rank) else int(rank), **line, **rest})
    return sorted(made, key=lambda line: (line["rank"] or len(lines) + 1, -line["seeds"]))


def may_be_best(block: pd.DataFrame, metric: str) -> pd.Series[bool]:
    """Which rows of a table may have its best ``metric``; the ranked ones in a board of an older version."""
    if "whole" in block:
        untrained = block["untrained"].astype(bool) & is_of_global_model(metric)
        return block["whole"].astype(bool) & ~untrained
    return block["rank"].notna() if "rank" in block else pd.Series(True, index=block.index)


def _lost(line: Mapping[str, Any]) -> set[str]:
    """Seeds of which a run failed and none finished."""
    return {str(one["seed"]) for one in json.loads(line["failures"])} - set(json.loads(line["runs"]))
