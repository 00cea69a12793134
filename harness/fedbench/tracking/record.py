"""The two files by which a stored run is read: ``run.json``, all but its curves, and ``rounds.csv``, its curves.

A finished run has a seal in the first: a digest of all that counts, the digest of the second among it, so that a number
that changed on a disk, or was changed by hand, is noticed. In MLflow the seal is a tag of the run, and is checked there
too.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedbench.core.errors import FedbenchError
from fedbench.core.files import read_bytes
from fedbench.tracking.schema import StoredData, StoredInfo, StoredRun

if TYPE_CHECKING:
    from mlflow.entities import Run, RunData

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
