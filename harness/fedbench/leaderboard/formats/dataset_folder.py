"""Stored runs as a data set: a folder that ``datasets.load_dataset`` reads, or CSV files."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pandas as pd

from fedbench.core.errors import FedbenchError
from fedbench.core.wording import counted
from fedbench.leaderboard.results import load_results, load_rounds
from fedbench.tracking.schema import FINAL

Format = Literal["parquet", "csv"]
_BESIDE = ("bytes_up", "bytes_down", "seconds", "train_loss")
"""What is recorded of every round beside its metrics."""


def export(uri: str, suite: str | None, folder: Path, how: Format) -> str:
    """Write the finished runs of ``suite`` (None: of all suites) into ``folder``; what was written, in words.

    ``runs`` has a row per run: the suite's and the run's description, hashes of code, data and weights, and the final
    metrics as columns ``final/...``. ``rounds`` has a row per run and round with a metric, joined by ``mlflow_id``.
    Parquet comes with a README.md that names both as configurations. FedbenchError where the store has none, and for a
    folder that has files in it.
    """
    if folder.is_dir() and any(folder.iterdir()):
        raise FedbenchError(f"{str(folder)!r} has files in it; name an empty folder, or one that does not exist.")
    runs = load_results(uri, suite)
    metrics = [str(column).removeprefix(FINAL) for column in runs if str(column).startswith(FINAL)]
    rounds = load_rounds(uri, runs, list(dict.fromkeys([*metrics, *_BESIDE])))
    rounds.insert(1, "run_id", rounds["mlflow_id"].map(dict(zip(runs["mlflow_id"], runs["run_id"], strict=True))))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, frame in (("runs", runs), ("rounds", rounds)):
            if how == "csv":
                frame.to_csv(folder / f"{name}.csv", index=False)
            else:
                frame.to_parquet(folder / f"{name}.parquet", index=False)
        if how == "parquet":
            (folder / "README.md").write_text(_card(suite, runs), encoding="utf-8")
    except OSError as error:
        raise FedbenchError(f"{str(folder)!r} can't be written ({error.strerror}); name another folder.") from None
    return f"{counted(len(runs), 'run')} and {counted(len(rounds), 'round')}"


def _card(suite: str | None, runs: pd.DataFrame) -> str:
    suites = [suite] if suite else sorted(runs["suite"].unique())
    return f"""---
configs:
- config_name: runs
  data_files: runs.parquet
  default: true
- config_name: rounds
  data_files: rounds.parquet
---
# Runs of fedbench: {", ".join(suites)}

{counted(len(runs), "run")} of {counted(runs["method"].nunique(), "method")}. `runs` has a row per run with its final
metrics in percent (`final/...`), `rounds` a row per run and evaluated round; `mlflow_id` joins them.
"""
