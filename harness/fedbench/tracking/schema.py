"""What a store is called and what stands in it, without MLflow: addresses, experiments, tags, the files of a run.

A stored run is read by two files: ``run.json``, all but its curves, and ``rounds.csv``, its curves. A finished run has
a seal in the first: a digest of all that counts, the digest of the second among it, so that a number that changed on a
disk, or was changed by hand, is noticed. In MLflow the seal is a tag of the run, and is checked there too.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlparse
from urllib.request import url2pathname

from fedbench.core.errors import FedbenchError
from fedbench.core.files import read_bytes, usable_folder
from fedbench.suites.suite import ADHOC
from fedbench.tracking.databases import checked_uri

if TYPE_CHECKING:
    from mlflow.entities import Run, RunData


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
DATABASE, ARTIFACTS = "mlflow.db", "artifacts"
"""The names of a store's database, and of the folder beside it that has the files of its runs."""


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
    return f"{SQLITE}{folder.as_posix()}/{DATABASE}"


def database_of(uri: str) -> Path | None:
    """The store's SQLite file; None for a store of another kind."""
    return Path(uri.removeprefix(SQLITE)).absolute() if uri.startswith(SQLITE) else None


def beside(database: Path, name: str) -> Path:
    """What is called ``name`` beside a store's database: ``name`` itself for mlflow.db. A folder may hold several
    databases, so that any other has its own name in front."""
    return database.with_name(name if database.name == DATABASE else f"{database.name}-{name}")


def folder_at(address: str) -> Path | None:
    """The folder on this disk that MLflow records as ``address``; None for a place elsewhere."""
    parts = urlparse(address)
    if parts.scheme not in ("", "file"):
        return None
    return Path(url2pathname(parts.path) if parts.scheme else address)


def local_artifacts(uri: str, run: Run) -> Path | None:
    """The folder of the run's artifacts on this disk; None where they are elsewhere, for the client to download.

    They are beside the store's database, wherever that is by now, or where MLflow has recorded that they were written.
    Raises FedbenchError where they are in neither place.
    """
    was = folder_at(run.info.artifact_uri)
    if was is None:
        return None
    database = database_of(uri)
    # <folder of the experiment>/<run>/artifacts
    moved = None if database is None else beside(database, ARTIFACTS).joinpath(*was.parts[-3:])
    for place in (moved, was):
        if place is not None and place.is_dir():
            return place
    here = "" if moved is None else f", nor in {str(moved)!r}"
    raise FedbenchError(
        f"the artifacts of run {run.info.run_id} are not in {str(was)!r}, where they were written{here}; bring the "
        "store's folder artifacts along with its database."
    )


RECORD, ROUNDS = "run.json", "rounds.csv"
SEAL = "fedbench.seal"
"""Tag: the digest of a finished run."""
ROUNDS_HASH = "fedbench.rounds_hash"
"""Tag: the digest of its ``rounds.csv``."""
_OURS = "fedbench."
"""Tags of MLflow's own, notes for instance, may be edited in its interface."""
_ROUND = "round"


def seal_of(data: StoredData | RunData) -> str:
    """sha256 over the run's parameters, last metrics, and fedbench's tags but the seal; metrics to the last bit."""
    tags = {key: value for key, value in data.tags.items() if key.startswith(_OURS) and key != SEAL}
    # SQLite gives 0.0 for -0.0
    metrics = {key: (float(value) + 0.0).hex() for key, value in data.metrics.items()}
    text = json.dumps([dict(data.params), metrics, tags], sort_keys=True)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def check_seal(run: StoredRun | Run) -> None:
    """FedbenchError where a finished run has a seal, as those of fedbench have, and is not what was sealed."""
    sealed = run.data.tags.get(SEAL)
    if run.info.status == "FINISHED" and sealed is not None and sealed != seal_of(run.data):
        raise FedbenchError(
            f"run {run.data.tags.get('fedbench.run_id', '')} ({run.info.run_id}) is not what was recorded: the store "
            "is damaged, or the run was changed by hand; put a copy of the store back, or delete the run "
            f"(mlflow runs delete --run-id {run.info.run_id}) and make it again."
        )


def require_seal(run: StoredRun | Run) -> None:
    """FedbenchError where a finished run has no seal: whoever changes another's run may have removed it."""
    if run.info.status == "FINISHED" and SEAL not in run.data.tags:
        raise FedbenchError(
            f"run {run.data.tags.get('fedbench.run_id', '')} ({run.info.run_id}) has no seal, so nothing tells whether "
            "it is as it was recorded; ask for the store as fedbench wrote it, or make the run again."
        )


def write_record(folder: Path, run: StoredRun | Run) -> None:
    """Write ``run.json`` into the folder of the run's artifacts, whole or not at all."""
    info, data = run.info, run.data
    content = {
        "mlflow_id": info.run_id,
        "experiment": info.experiment_id,
        "status": info.status,
        "started": info.start_time,
        "ended": info.end_time,
        "tags": dict(data.tags),
        "params": dict(data.params),
        # JSON has no NaN
        "metrics": {name: None if math.isnan(value) else value for name, value in data.metrics.items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f".{RECORD}.{os.getpid()}"
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(folder / RECORD)
    finally:
        unfinished.unlink(missing_ok=True)


def read_record(file: Path) -> StoredRun:
    """What `write_record` wrote; FedbenchError where that cannot be read."""
    try:
        content = json.loads(read_bytes(file))
        metrics = {name: math.nan if value is None else float(value) for name, value in content["metrics"].items()}
        data = StoredData(dict(content["params"]), dict(content["tags"]), metrics)
        ids = str(content["mlflow_id"]), str(content["experiment"])
        info = StoredInfo(*ids, content["status"], int(content["started"]), content["ended"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FedbenchError(
            f"the record of a run {str(file)!r} cannot be read ({error}); put a copy of the store back, or delete the "
            f"run (mlflow runs delete --run-id {file.parent.parent.name}) and make it again."
        ) from error
    return StoredRun(info, data)


def rounds_text(rounds: Sequence[tuple[int, Mapping[str, float]]]) -> bytes:
    """``rounds.csv``: a line a round, a column a metric; a cell is empty where the round has no such metric."""
    names = list(dict.fromkeys(name for _, values in rounds for name in values))
    text = io.StringIO(newline="")
    lines = csv.writer(text)
    lines.writerow([_ROUND, *names])
    # the shortest text that gives the same float again
    lines.writerows([number, *(values.get(name, "") for name in names)] for number, values in rounds)
    return text.getvalue().encode()


def rounds_hash(text: bytes) -> str:
    """The digest of a ``rounds.csv``, as `ROUNDS_HASH` has it."""
    return hashlib.sha256(text).hexdigest()


def check_rounds(file: Path, tags: Mapping[str, str]) -> bytes:
    """The content of a run's ``rounds.csv``; FedbenchError where its digest is not that of the run's ``tags``."""
    text = read_bytes(file) if file.is_file() else b""
    if tags.get(ROUNDS_HASH, rounds_hash(text)) != rounds_hash(text):
        raise FedbenchError(
            f"the rounds of a run {str(file)!r} are not what was recorded: the file is damaged, or was changed by "
            "hand; put a copy of the store back, or repeat the run with --rerun."
        )
    return text


def read_rounds(file: Path, names: Collection[str], tags: Mapping[str, str]) -> list[tuple[int, str, float]]:
    """Round, metric and value of everything that the ``rounds.csv`` of the run with these ``tags`` has of ``names``."""
    try:
        heading, *lines = csv.reader(check_rounds(file, tags).decode().splitlines())
        wanted = [(column, name) for column, name in enumerate(heading) if column and name in names]
        return [(int(line[0]), name, float(line[at])) for line in lines for at, name in wanted if line[at]]
    except (OSError, ValueError, IndexError) as error:
        raise FedbenchError(
            f"the rounds of a run {str(file)!r} cannot be read ({error}); put a copy of the store back, or repeat the "
            "run with --rerun."
        ) from error
