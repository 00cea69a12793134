"""What a store is called and what stands in it, without MLflow: addresses, experiments, tags, a run as it is read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlparse
from urllib.request import url2pathname

from fedbench.core.errors import FedbenchError
from fedbench.core.files import usable_folder
from fedbench.suites.suite import ADHOC
from fedbench.tracking.databases import checked_uri

if TYPE_CHECKING:
    from mlflow.entities import Run

DEFAULT_FOLDER = "fedbench-store"
EXPERIMENT = "fedbench/"
"""An experiment is called this and the suite's name."""
TUNING = "fedbench-tuning/"
"""The same for trials of tuning: no leaderboard reads them."""
FINAL = "final/"
"""Prefix of the metrics of a finished run, which leaderboards read."""
KIND = "fedbench.kind"
"""The tag that says what an MLflow run is."""
RUN_ID = "fedbench.run_id"
"""The tag with the id that fedbench gave the run."""
SUITE = "fedbench.suite"
"""The tag with the suite's name; of a run without a suite file, that of its group (`fedbench.suites.suite`)."""
FAILURE = "fedbench.failure"
"""The tag that says why a run failed, in one line."""
HARNESS = "fedbench.harness_hash"
"""The tag with the hash of the code that all runs share."""
METHOD_CODE = "fedbench.method_code"
"""The tag with, of each method of the run, name and hash of its code, and where a third party's comes from."""
RUN, INVOCATION = "run", "invocation"
"""A run of one spec, and the parent of all runs of a command."""
SQLITE = "sqlite:///"


@dataclass(frozen=True)
class StoredInfo:
    """When and where a run was made."""

    run_id: str
    """MLflow's, as the next."""
    experiment_id: str
    status: str
    start_time: int
    """Milliseconds since the epoch."""
    end_time: int | None
    """The same; None for a run that goes on."""


@dataclass(frozen=True)
class StoredData:
    """What was recorded of a run."""

    params: dict[str, str]
    tags: dict[str, str]
    metrics: dict[str, float]
    """The last value of each."""


@dataclass(frozen=True)
class StoredRun:
    """A run as it is read; of MLflow's own `Run` what readers need, under the same names."""

    info: StoredInfo
    data: StoredData


def filed_as(experiment: str, tags: Mapping[str, str]) -> str:
    """The suite of a run with these ``tags`` in the experiment of the suite ``experiment``, or its group there."""
    return tags.get(SUITE, ADHOC) if experiment == ADHOC else experiment


def store_uri(store: str | None, *, to_write: bool = True) -> str:
    """The MLflow tracking URI of ``--store``: a folder (a SQLite file in it), or a tracking URI as it is.

    None is ``MLFLOW_TRACKING_URI`` where that is set, else the folder ``fedbench-store`` here. Nothing is created yet;
    a place that cannot become a store raises FedbenchError. Without ``to_write`` it need not be writable.
    """
    if store is None:
        from_environment = os.environ.get("MLFLOW_TRACKING_URI", "")
        if from_environment:
            return checked_uri(from_environment, "MLFLOW_TRACKING_URI")
    given = DEFAULT_FOLDER if store is None else store
    if "://" in given or given.startswith("file:") or given == "databricks":
        return checked_uri(given, "--store")
    if not given.strip():
        raise FedbenchError("--store '' is empty; give a folder or an MLflow tracking URI.")
    folder = usable_folder(given, "--store", to_write=to_write)
    if any(character in str(folder) for character in "?#%"):
        raise FedbenchError(f"--store {given!r}: a store's path cannot hold ?, # or %; choose another folder.")
    return f"{SQLITE}{folder.as_posix()}/mlflow.db"


def database_of(uri: str) -> Path | None:
    """The store's SQLite file; None for a store of another kind."""
    return Path(uri.removeprefix(SQLITE)).absolute() if uri.startswith(SQLITE) else None


def folder_at(address: str) -> Path | None:
    """The folder on this disk that MLflow records as ``address``; None for a place elsewhere."""
    parts = urlparse(address)
    if parts.scheme not in ("", "file"):
        return None
    return Path(url2pathname(parts.path) if parts.scheme else address)


def local_artifacts(uri: str, run: Run) -> Path | None:
    """The folder of the run's artifacts on this disk; None where they are elsewhere, for the client to download.

    MLflow records where they were written. Of a store that was moved or copied since, they are where `experiment_of`
    puts them, beside the database. Raises FedbenchError where they are neither there nor where they were.
    """
    was = folder_at(run.info.artifact_uri)
    if was is None:
        return None
    database = database_of(uri)
    # <folder of the experiment>/<run>/artifacts
    beside = None if database is None else database.parent.joinpath("artifacts", *was.parts[-3:])
    for place in (was, beside):
        if place is not None and place.is_dir():
            return place
    here = "" if beside is None else f", nor in {str(beside)!r}"
    raise FedbenchError(
        f"the artifacts of run {run.info.run_id} are not in {str(was)!r}, where they were written{here}; bring the "
        "store's folder artifacts along with its database."
    )
