"""Runs of a folder that diverged: an outcome of their values, which its board shows and results.csv has no line of.

Whatever else ended a run, such as too little memory, says nothing of its values: a folder with such a run is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pandas as pd

from fedbench.core.errors import DIVERGED, FedbenchError
from fedbench.tracking.schema import FINAL
from fedbench_boards.exchange.folder import ResultFolder, named


def diverged_runs(folder: ResultFolder) -> pd.DataFrame:
    """A line each, as `fedbench_boards.leaderboard.results.StoredResults.failed` has them.

    What such a run does not record is taken from its row's finished runs.

    FedbenchError, which names the row, where a run failed otherwise or was run with other code, where none of its row
    has finished, and where a seed has both finished and failed.
    """
    results = folder.results
    metrics = [name for name in results if str(name).startswith(FINAL)]
    lines = [line for row in folder.board.to_dict("records") for line in _of_row(row, results)]
    found = pd.DataFrame(lines).astype(results.dtypes) if lines else results.iloc[:0].assign(failure="")
    return found.drop(columns=metrics)


def _of_row(row: dict[Any, Any], results: pd.DataFrame) -> Iterator[dict[Any, Any]]:
    failures = json.loads(row["failures"] or "[]")
    if not failures:
        return
    finished = results[results["run_id"].isin(json.loads(row["runs"]).values())]
    for one in failures:
        title = f"{named(row)}: seed {one['seed']}"
        if one["seed"] in set(finished["seed"]):
            raise FedbenchError(f"{title} has finished and failed; keep one of the two runs.")
        if not one["reason"].startswith(DIVERGED):
            raise FedbenchError(f"{title} failed: {one['reason'].removesuffix('.')}; run it again.")
        if one["code"]:
            raise FedbenchError(f"{title} diverged with other code ({one['code']}) than the row's; run it again.")
        if finished.empty:
            raise FedbenchError(f"{title} diverged, as all of its row; there is no run to tell its values by.")
        of_run = {name: one[name] for name in ("seed", "run_id", "mlflow_id")}
        yield finished.iloc[0].to_dict() | of_run | {"failure": one["reason"]}
