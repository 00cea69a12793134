"""What the tracking store holds: a line per finished or failed run, its curve by round, its federation."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from fedbench.core.errors import FedbenchError, unknown_name
from fedbench.core.spec import BUDGET
from fedbench.scenarios.presets import scenario_summary
from fedbench.suites.suite import suite_names
from fedbench.tracking.databases import shown
from fedbench.tracking.read import REQUESTS, Reader, open_reader
from fedbench.tracking.schema import FAILURE, FINAL, StoredRun
from fedbench.tracking.tags import DEFAULTS, RunTags
from fedbench_boards.leaderboard.own_models import is_untrained, of_global_model, with_global_curves

_ELSEWHERE = ("dataset", "method", "backbone", "tune", "seed", "training.eval_every", "training.own_every")
"""Parameters with a column of their own, or without influence on the final model."""
EVALUATED = ("eval_every", "own_every")
"""Settings of the training without influence on the final model that are part of a run's identity."""
_HASHES = ("code_hash", "data_hash", "weights_hash", "suite_hash")
_TAGS = ("commit", *_HASHES, "method_code", "server_data", "not_on_unseen")
_COUNTS = ("num_clients", "cohort_size", "num_train", "num_test", "trainable_parameters")
GROUPS = tuple(f"{group}_accuracy" for group in ("head", "mid", "tail", "many", "medium", "few"))
_OVERALL = "global_accuracy"
_TRAFFIC = ("bytes_up_total", "bytes_down_total")
_SECONDS = "seconds"
_FEDERATION = "federation.json"


@dataclass(frozen=True, eq=False)
class StoredResults:
    """The runs of a suite that ended, one line each, oldest first; of several with one run id the newest."""

    finished: pd.DataFrame
    """Metrics are the columns ``final/...``."""
    failed: pd.DataFrame
    """The same columns without metrics, and ``failure``: the reason, on one line."""


def load_runs(uri: str, suite: str | None = None) -> StoredResults:
    """The runs of ``suite`` (None: of all suites) that finished and those that failed, whatever code made them.

    A run id may be among both. Raises FedbenchError where there are neither, with the command that fills the store.
    """
    stored, held = _read_store(uri, suite)
    if stored is None:
        raise _nothing(uri, suite, held)
    return stored


def load_results(uri: str, suite: str | None = None) -> pd.DataFrame:
    """The finished runs of ``suite`` (None: of all suites), one line each, oldest first.

    Metrics are the columns ``final/...``. Of several runs with one run id, whatever code made them, the newest counts.
    Raises FedbenchError where there is nothing to show, with the command that fills the store.
    """
    stored, held = _read_store(uri, suite)
    if stored is None or stored.finished.empty:
        raise _nothing(uri, suite, held)
    return stored.finished


def _read_store(uri: str, suite: str | None) -> tuple[StoredResults | None, int]:
    """What the store has of the suite, None for nothing that ended; and how many runs have not finished."""
    reader = _reader(uri, suite)
    finished, failed, unfinished = [], [], 0
    for name, run in reader.runs(suite):
        if "seed" not in run.data.params:
            continue  # no run of a spec
        if run.info.status == "FINISHED":
            finished.append(_line(name, run))
            continue
        unfinished += 1
        if run.info.status == "FAILED":
            line = {key: value for key, value in _line(name, run).items() if not key.startswith(FINAL)}
            failed.append({**line, "failure": reason_of(run.data.tags.get(FAILURE, ""))})
    if not finished and not failed:
        return None, unfinished
    parts = [_newest(reader, lines) for lines in (finished, failed)]
    done = parts[0] if finished else parts[1].drop(columns="failure").iloc[:0]
    lost = parts[1] if failed else done.iloc[:0].assign(failure="")
    return StoredResults(done, lost), unfinished


def _newest(reader: Reader, lines: list[dict[str, Any]]) -> pd.DataFrame:
    if not lines:
        return pd.DataFrame()
    frame = pd.DataFrame(lines).sort_values("started", kind="stable")
    frame["made_by"] = _commands(reader, frame)
    return frame.drop_duplicates("run_id", keep="last").reset_index(drop=True)


def _reader(uri: str, suite: str | None) -> Reader:
    reader = open_reader(uri)
    if reader is None:
        raise FedbenchError(f"there is no store at {shown(uri)}; name yours with --store.{_remedy(suite)}")
    return reader


def _nothing(uri: str, suite: str | None, unfinished: int) -> FedbenchError:
    """Why there is nothing to show of the suite, and the command that changes it."""
    reader = _reader(uri, suite)
    known = sorted({*reader.suites(), *(name for name, _ in reader.runs(None))})
    if suite is not None and known and suite not in known:
        return unknown_name("suite in this store", suite, known, _remedy(suite).strip())
    held = f"unfinished runs ({unfinished})" if unfinished else "no runs"
    of = f" of the suite {suite!r}" if suite is not None else ""
    return FedbenchError(f"the store {shown(uri)} has {held}{of} and no finished one.{_remedy(suite)}")


def _commands(reader: Reader, frame: pd.DataFrame) -> list[str]:
    """What made each run, as JSON: the command that tuned its values, where one did, and the one that ran it."""
    parents = {parent: reader.tags(parent) for parent in frame["parent"].unique() if parent}
    ran = [parents.get(parent, {}).get("fedbench.command", "") for parent in frame["parent"]]
    pairs = zip(frame["tuned_by"], ran, strict=True)
    return [json.dumps([command for command in pair if command], ensure_ascii=False) for pair in pairs]


def load_curves(uri: str, results: pd.DataFrame, *headlines: str) -> pd.DataFrame:
    """Metrics by evaluated round of the runs in ``results``, one line a run and round, rounds in order.

    Columns: ``mlflow_id``, ``run_id``, ``round``, ``global_accuracy``, the ``headlines`` and the groups' accuracies
    where some run has them by round (all in %), ``bytes_total`` (both ways) and ``seconds_total`` (of training) since
    the start. Headlines of own models are the global model's for runs without own ones (`own_models`). A run
    without a curve has no line. Raises FedbenchError for a store that cannot be reached.
    """
    reader = open_reader(uri)
    wanted = list(dict.fromkeys([_OVERALL, *headlines, *GROUPS]))
    read = [name for name in dict.fromkeys([*wanted, *map(of_global_model, headlines)]) if FINAL + name in results]
    run_ids = dict(zip(results["mlflow_id"], results["run_id"], strict=True))
    curves = _by_round(reader, list(run_ids), [*read, *_TRAFFIC, _SECONDS])
    curves = with_global_curves(curves, results, headlines)
    tracked = [name for name in wanted if name in curves]
    curves["bytes_total"] = sum(curves.get(name, float("nan")) for name in _TRAFFIC)
    # every round has its own, evaluated or not
    curves["seconds_total"] = curves[_SECONDS].groupby("mlflow_id").cumsum() if _SECONDS in curves else float("nan")
    curves = curves.reindex(columns=list(dict.fromkeys([_OVERALL, *tracked, "bytes_total", "seconds_total"])))
    curves = curves[curves[[_OVERALL, *tracked]].notna().any(axis=1)].reset_index().rename_axis(columns=None)
    curves.insert(1, "run_id", curves["mlflow_id"].map(run_ids))
    return curves


def load_rounds(uri: str, results: pd.DataFrame, metrics: Sequence[str]) -> pd.DataFrame:
    """Any metrics that runs log by round, also those that no result has: ``mlflow_id``, ``round``, a column each.

    What no run in ``results`` has logged has no column. FedbenchError for a store that cannot be reached.
    """
    return _by_round(open_reader(uri), list(results["mlflow_id"]), metrics).reset_index().rename_axis(columns=None)


def load_measured(uri: str, results: pd.DataFrame, prefix: str) -> pd.DataFrame:
    """The last values of the metrics that begin with ``prefix``: a line a run of ``results``, a column a metric.

    Columns are in order of their names; FedbenchError for a store that cannot be reached.
    """
    reader = open_reader(uri)
    read = [] if reader is None else [run for suite in results["suite"].unique() for _, run in reader.runs(suite)]
    measured = {run.info.run_id: run.data.metrics for run in read}
    lines = [{k: v for k, v in measured.get(run, {}).items() if k.startswith(prefix)} for run in results["mlflow_id"]]
    return pd.DataFrame(lines, index=results.index).sort_index(axis=1)


def _by_round(reader: Reader | None, runs: Sequence[str], metrics: Sequence[str]) -> pd.DataFrame:
    points = [] if reader is None else reader.values(runs, metrics)
    frame = pd.DataFrame(points, columns=["mlflow_id", "round", "metric", "value"])
    return frame.pivot_table(index=["mlflow_id", "round"], columns="metric", values="value", aggfunc="last")


def load_federations(uri: str, results: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """How the data of the runs in ``results`` were partitioned, by MLflow id: their artifact ``federation.json``.

    ``classnames``, ``class_counts`` (clients x classes), ``groups`` (name -> class indices) and, where the counts are
    those of the first clients only, the number of all ``clients``. Runs that lack the file are left out.
    """
    reader = open_reader(uri)
    if reader is None:
        return {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(REQUESTS) as pool:
        runs = list(dict.fromkeys(results["mlflow_id"]))
        read = list(pool.map(lambda run: _federation(reader, run, Path(folder)), runs))
    return {run: federation for run, federation in zip(runs, read, strict=True) if federation is not None}


def _federation(reader: Reader, run: str, folder: Path) -> dict[str, Any] | None:
    try:
        file = reader.artifact(run, _FEDERATION, folder)
    except FedbenchError:
        return None
    try:
        return None if file is None else dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise FedbenchError(f"{_FEDERATION} of run {run} can't be read: {error}; delete it, or the run.") from None


def _remedy(suite: str | None) -> str:
    """What to run to fill the store; "" for a name that no shipped suite has."""
    wanted = suite or "longtail"
    return f" Run `fedbench run --suite {wanted}` to fill it." if wanted in suite_names() else ""


def _line(suite: str, run: StoredRun) -> dict[str, Any]:
    tags, params = RunTags(run.data.tags), DEFAULTS | run.data.params
    scenario = {key.removeprefix("scenario."): v for key, v in params.items() if key.startswith("scenario.")}
    # methods with and without labels meet in one table, as in the papers; the row's name and settings tell
    labels = scenario.pop("labels")
    budget = {name: params[f"training.{name}"] for name in BUDGET}
    apart = {f"training.{name}" for name in BUDGET} | set(_ELSEWHERE)
    settings = {k: v for k, v in params.items() if k not in apart and not k.startswith("scenario.")}
    # other weights under the same backbone's name are another row
    settings["labels"] = labels
    settings["weights"] = tags.text("weights_hash")[:8]
    tuning = tags.parsed("tuning", dict)
    return {
        "suite": suite,
        "row": tags.text("row"),
        "setting": tags.text("setting"),
        **{name: params[name] for name in ("method", "backbone", "tune", "dataset")},
        "scenario": scenario_summary(scenario),
        "seed": int(params["seed"]),
        **budget,
        "run_id": tags.run_id,
        "mlflow_id": run.info.run_id,
        "scale": tags.text("scale"),
        "tuned": params["tuned"],
        "tuned_by": tuning.pop("command", ""),
        "tuning": json.dumps(tuning, ensure_ascii=False),
        "parent": tags.raw.get("mlflow.parentRunId", ""),
        **{name: tags.text(name) for name in _TAGS},
        "suite_version": tags.suite_version,
        **{name: params[f"training.{name}"] for name in EVALUATED},
        "files_hash": tags.files_hash,
        "harness_hash": tags.harness_hash,
        **{name: tags.number(name) for name in _COUNTS},
        "started": pd.to_datetime(run.info.start_time, unit="ms", utc=True),
        "scenario_settings": json.dumps(scenario, sort_keys=True),
        "published": json.dumps(tags.parsed("published", list), ensure_ascii=False),
        "row_settings": json.dumps(settings, sort_keys=True),
        "untrained": is_untrained(params["method"], tags, run.data.metrics),
        **{key: v for key, v in run.data.metrics.items() if key.startswith(FINAL)},
    }


def reason_of(recorded: str) -> str:
    """The reason of a failure on one line, without what would move a terminal's cursor."""
    printable = "".join(character if character.isprintable() else " " for character in recorded)
    return " ".join(printable.split()) or "no reason was recorded"
