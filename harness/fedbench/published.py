"""Numbers that papers print, as facts to set measured ones beside; the files stand in ``leaderboards/published``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from fedbench.errors import FedbenchError, unknown_name
from fedbench.suite import Key


def load_published(name: str, folder: Path) -> pd.DataFrame:
    """The facts of one paper, a line a printed number, every column as text. FedbenchError for an unknown name."""
    file = folder / f"{name}.csv"
    if not file.is_file():
        raise unknown_name(
            f"file of published numbers in {folder}:", name, sorted(p.stem for p in folder.glob("*.csv"))
        )
    return pd.read_csv(file, dtype=str, keep_default_na=False)


def matching(facts: pd.DataFrame, key: Key) -> pd.DataFrame:
    """The lines of ``facts`` that ``key`` picks: all its columns agree. FedbenchError for a column they don't have."""
    lines = facts
    for column, value in key.items():
        if column not in facts:
            raise unknown_name("column of published numbers", column, [str(c) for c in facts.columns])
        lines = lines[lines[column] == value]
    return lines


def published_value(facts: pd.DataFrame, key: Key, metric: str, metrics: Mapping[str, str]) -> float | None:
    """What the paper prints for our ``metric`` where ``key`` points; None where it prints nothing.

    ``metrics`` translates our names into the paper's. Raises FedbenchError if the key leaves more than one number.
    """
    if metric not in metrics:
        return None
    lines = matching(facts, {**key, "metric": metrics[metric]})
    values = sorted({float(value) for value in lines["value"]})
    if len(values) > 1:
        raise FedbenchError(f"published key {key} picks {len(values)} numbers of {metrics[metric]!r}: {values[:4]}.")
    return values[0] if values else None
