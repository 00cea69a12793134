"""Means over settings, which papers print as the average of several columns."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

import pandas as pd

from fedbench.core.spec import BUDGET
from fedbench.suites.suite import Mean, Suite
from fedbench.tracking.schema import FINAL
from fedbench_boards.leaderboard.rows.identity import ROW


def with_means(results: pd.DataFrame, suite: Suite) -> pd.DataFrame:
    """``results`` with a line for every row and seed that has a run in all settings of one of the suite's means."""
    lines = [line for mean in suite.means for line in _of(results, mean)]
    return pd.concat([results, pd.DataFrame(lines)], ignore_index=True) if lines else results


def _of(results: pd.DataFrame, mean: Mean) -> Iterator[pd.Series]:
    among = results[results["setting"].isin(mean.over)].sort_values("started", kind="stable")
    for _, runs in among.groupby(["dataset", "files_hash", *ROW, *BUDGET, "seed"], sort=False, dropna=False):
        newest = runs.drop_duplicates("setting", keep="last").set_index("setting", drop=False)
        if set(newest.index) == set(mean.over):
            yield _line(newest.loc[list(mean.over)], mean)


def _line(runs: pd.DataFrame, mean: Mean) -> pd.Series:
    """One line for the ``runs`` of a seed: means of what was measured, everything else the first run's."""
    line = runs.iloc[0].copy()
    measured = [str(name) for name in runs if str(name).startswith(FINAL)]
    line[measured] = runs[measured].mean(skipna=False)
    keys = [{**key, **mean.published} for key in json.loads(line["published"])] if mean.published else []
    known = "".join(sorted(runs["run_id"]))
    line["setting"], line["started"] = mean.name, runs["started"].max()
    line["scenario"] = f"mean over {', '.join(mean.over)}"
    # a table of its own, beside those of its settings
    line["scenario_settings"] = json.dumps(json.loads(line["scenario_settings"]) | {"mean over": list(mean.over)})
    line["published"] = json.dumps([key for at, key in enumerate(keys) if key not in keys[:at]])
    line["run_id"] = line["mlflow_id"] = f"mean {hashlib.sha256(known.encode()).hexdigest()[:16]}"
    return line
