"""The gap of tuning: a study's value on validation data, on confirming seeds, and that of its runs on test data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
from mlflow.exceptions import MlflowException

from fedbench.core.errors import FedbenchError
from fedbench.core.files import csv_text, replacing
from fedbench.core.spec import BUDGET, RunSpec, untuned
from fedbench.tracking.schema import FINAL
from fedbench.tracking.tags import DEFAULTS, flat_params
from fedbench.tuning.objectives import Objective
from fedbench.tuning.results import StudyResult
from fedbench.tuning.studies import Record
from fedbench_boards.leaderboard.results import load_results


@dataclass(frozen=True)
class Gap:
    """The first objective of a study's chosen trial, in percent for accuracies; None where it is unknown."""

    study: str
    row: str
    objective: str
    trial: int
    validation: float
    """Mean on the validation split over the tuning seeds, by which the trial was chosen."""
    confirmation: float | None
    """Mean on the validation split over the confirming seeds, which chose nothing."""
    test: float | None
    """Mean on the test split over the stored runs with the trial's values."""
    seeds: tuple[int, ...] = ()
    """Seeds of the runs behind ``test``, without seeds of the study."""

    @property
    def gap(self) -> float | None:
        """Validation minus test, in points; None for costs, which are not measured on a split."""
        if self.test is None or Objective(self.objective).is_cost:
            return None
        return self.validation - self.test


def gaps(results: Sequence[StudyResult], store: str) -> list[Gap]:
    """The gap of each study; ``store`` is the tracking URI of the runs, which may have none of them."""
    frames: dict[str, pd.DataFrame] = {}
    for result in results:
        suite = result.record.suite
        if suite not in frames:
            try:
                frames[suite] = load_results(store, suite)
            except (FedbenchError, MlflowException):  # nothing is run yet, or its server does not answer
                frames[suite] = pd.DataFrame()
    return [gap_of(result, frames[result.record.suite]) for result in results]


def gap_of(result: StudyResult, runs: pd.DataFrame) -> Gap:
    """The gap of a study; ``runs`` are those of its suite, a line each, as `load_results` gives them."""
    record, (metric, *_) = result.record, result.record.budget.objectives
    known = Gap(
        record.name,
        record.title,
        metric,
        result.trial,
        result.best[0],
        None if result.confirmed is None else result.confirmed[0],
        None,
    )
    if runs.empty:
        return known
    try:
        settings = DEFAULTS | flat_params(RunSpec.model_validate(record.spec))
    except ValueError:  # of a version with other settings, whose conditions no run of today has
        return known
    chosen = runs[[_has_values(run, record, settings, result.trial) for _, run in runs.iterrows()]]
    metrics = {name.removeprefix(FINAL): 0.0 for name in map(str, runs) if name.startswith(FINAL)}
    column = Objective(metric).name_in(metrics)
    if chosen.empty or column is None:
        return known
    scores = chosen.set_index("seed")[FINAL + column].astype(float).dropna()
    seeds = tuple(sorted(int(seed) for seed in scores.index))
    return Gap(**{**asdict(known), "test": float(scores.mean()) if seeds else None, "seeds": seeds})


def _has_values(run: pd.Series, record: Record, settings: Mapping[str, str], trial: int) -> bool:
    """Whether ``run`` has the values of the study's ``trial``, under the study's ``settings``, on another seed."""
    scenario = json.loads(run["scenario_settings"])
    return bool(
        run["tuned"] == record.name
        and (run["setting"], run["scale"], run["dataset"]) == (record.setting, record.scale, settings["dataset"])
        and untuned(run["row"]) == record.row
        and json.loads(run["tuning"]).get("trial") == str(trial)
        and all(run[name] == settings[f"training.{name}"] for name in BUDGET)
        and all(value == settings.get(f"scenario.{name}") for name, value in scenario.items())
        and run["seed"] not in record.budget.every_seed
    )


def write(every: Sequence[Gap], folder: Path) -> Path:
    """Write ``gap.csv`` with one line a row into ``folder``; returns the file."""
    lines = [{**asdict(gap), "seeds": " ".join(map(str, gap.seeds)), "gap": gap.gap} for gap in every]
    with replacing(folder / "gap.csv", "table of gaps", "choose another --output") as temporary:
        temporary.write_text(csv_text(pd.DataFrame(lines)), encoding="utf-8")
    return folder / "gap.csv"
