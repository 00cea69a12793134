"""Measured settings that advice is drawn from: a line for every run, with the measures of its federation."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from importlib import resources
from pathlib import Path

import numpy as np
import pandas as pd
from pandas.api.types import is_numeric_dtype

from fedbench.core.errors import FedbenchError
from fedbench.core.files import csv_text, replacing
from fedbench.core.wording import MEGA
from fedbench.tracking.schema import FINAL
from fedbench_boards.advice.measures import Measures, measures_of
from fedbench_boards.leaderboard.results import load_federations
from fedbench_boards.leaderboard.rows.own_models import with_global_models

GLOBAL, PERSONAL = "global", "personal"
"""The models that the user needs: one for all clients, or each client's own."""
_SCORES = {GLOBAL: "global_accuracy", PERSONAL: "personal_mean_client_accuracy"}
_COLUMNS = ("suite", "setting", "seed", "row", "label", "method", "backbone", "dataset", "run_id", "commit")
_NUMBERS = ("megabytes", *_SCORES)
_WHAT = ("labels", "server_data", "trains")
"""Columns: labels visible or hidden, the server data that a method reads, and whether the run has anything to train."""
SHIPPED = "evidence.csv"


@dataclass(frozen=True, eq=False)
class Evidence:
    """Runs with columns `_COLUMNS`, `_NUMBERS`, `_WHAT` and those of `Measures`."""

    runs: pd.DataFrame

    @cached_property
    def places(self) -> dict[str, Measures]:
        """Setting -> the means of its federations' measures over seeds."""
        names = [field.name for field in fields(Measures)]
        means = self.runs.drop_duplicates(["setting", "seed"]).groupby("setting", sort=False)[names].mean()
        return {str(setting): Measures(**dict(row)) for setting, row in means.iterrows()}

    def without(self, setting: str) -> Evidence:
        """The evidence without one setting."""
        return Evidence(self.runs[self.runs["setting"] != setting])


def evidence_of(uri: str, results: pd.DataFrame) -> Evidence:
    """The evidence of finished runs in the store at ``uri``. FedbenchError where no federation is recorded."""
    results = with_global_models(results, (_SCORES[PERSONAL],))
    first = results.drop_duplicates(["setting", "seed"])
    federations = load_federations(uri, first)
    measures = {}
    for run in first.to_dict("records"):
        if run["mlflow_id"] in federations:
            counts = np.asarray(federations[run["mlflow_id"]]["class_counts"], dtype=np.int64)
            counts = counts[counts.sum(axis=1) > 0]
            measured = measures_of(counts, run["cohort_size"] / run["num_clients"])
            measures[run["setting"], run["seed"]] = measured
    if not measures:
        raise FedbenchError("no run of these results has its federation recorded; run the suite again.")
    lines = []
    for run in results.to_dict("records"):
        if (run["setting"], run["seed"]) not in measures:
            continue
        sent = run.get(f"{FINAL}bytes_up", np.nan) + run.get(f"{FINAL}bytes_down", np.nan)
        scores = {name: run.get(FINAL + metric, np.nan) for name, metric in _SCORES.items()}
        if run["untrained"]:
            scores[GLOBAL] = np.nan
        what = {"labels": json.loads(run["row_settings"])["labels"], "server_data": run["server_data"] or ""}
        what["trains"] = bool(int(run["trainable_parameters"]))
        line = {name: run[name] for name in _COLUMNS if name != "label"}
        line["label"] = run["row"].replace(f" · {run['backbone']}", "", 1)
        lines.append(line | scores | what | {"megabytes": sent / MEGA} | asdict(measures[run["setting"], run["seed"]]))
    order = [*_COLUMNS, *_NUMBERS, *_WHAT, *(field.name for field in fields(Measures))]
    return Evidence(pd.DataFrame(lines)[order])


def write_evidence(evidence: Evidence, file: Path) -> None:
    """Write the evidence atomically as CSV."""
    with replacing(file, "evidence", "choose another --output") as temporary:
        temporary.write_text(csv_text(evidence.runs), encoding="utf-8")


def read_evidence(file: Path | None) -> Evidence:
    """Read the evidence that `write_evidence` wrote; None: that which ships with the suites. FedbenchError for other
    files."""
    place = Path(str(resources.files("fedbench_suites"))) / SHIPPED if file is None else file
    try:
        runs = pd.read_csv(place, dtype={"run_id": str}, float_precision="round_trip")
    except (OSError, ValueError, pd.errors.ParserError):
        raise FedbenchError(f"there is no evidence in {str(place)!r}; fedbench map writes {SHIPPED}.") from None
    lacking = [name for name in (*_COLUMNS, *_NUMBERS, *_WHAT, *(f.name for f in fields(Measures))) if name not in runs]
    if lacking:
        raise FedbenchError(f"{str(place)!r} is no evidence: it lacks the columns {', '.join(lacking)}.")
    runs["server_data"] = runs["server_data"].fillna("")
    measured = runs[["megabytes", *(field.name for field in fields(Measures))]]
    if runs.empty or not all(map(is_numeric_dtype, measured.dtypes)) or measured.isna().to_numpy().any():
        needed = ", ".join(map(str, measured))
        raise FedbenchError(f"{str(place)!r} is no evidence: every run needs numbers for {needed}.")
    return Evidence(runs)
