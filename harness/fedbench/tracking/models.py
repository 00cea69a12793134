"""A recorded run's model: which run an id means, and its model read back with the data that it was trained on.

An id is fedbench's own (16 hex digits), MLflow's (32), or the beginning of either.
"""

from __future__ import annotations

import difflib
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedbench.core.errors import FedbenchError
from fedbench.rounds.run import Run as PreparedRun
from fedbench.rounds.state import RunState
from fedbench.runs.prepare import Settings, prepare
from fedbench.tracking.artifacts import read_predictions, read_spec, read_state
from fedbench.tracking.databases import shown
from fedbench.tracking.schema import INVOCATION, KIND, RUN_ID, local_artifacts
from fedbench.tracking.store import filed, open_store, runs_of
from fedbench.tracking.tags import RunTags

# isort: split
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.exceptions import MlflowException

SHORTEST = 4
"""Hex digits of an id that must be given at least."""
_LISTED = 8


def reading_client(uri: str) -> MlflowClient:
    """A client of the store at ``uri``; FedbenchError where there is none."""
    client = open_store(uri, create=False)
    if client is None:
        raise FedbenchError(f"there is no store at {shown(uri)}; name yours with --store.")
    return client


def find_run(client: MlflowClient, given: str) -> Run:
    """The run that ``given`` means. Of several recordings of one run, the newest finished one, else the newest.

    Raises FedbenchError for an id that is none, that no run has (naming the nearest), or that several runs share.
    """
    wanted = given.strip().lower()
    if not re.fullmatch(f"[0-9a-f]{{{SHORTEST},32}}", wanted):
        raise FedbenchError(
            f"{given!r} is no run id: give {SHORTEST} to 32 hexadecimal digits, from the start of the id that fedbench "
            "or MLflow gave the run."
        )
    hits: dict[str, Run] = {}
    for condition in (f"attributes.run_id LIKE '{wanted}%'", f"tags.`{RUN_ID}` LIKE '{wanted}%'"):
        hits |= {run.info.run_id: run for _, run in filed(client, None, condition)}
    parents = [run for run in hits.values() if run.data.tags.get(KIND) == INVOCATION]
    runs = [run for run in hits.values() if run not in parents]
    if not runs and parents:
        below = f"tags.`mlflow.parentRunId` = '{parents[0].info.run_id}'"
        children = [run for _, run in runs_of(client, None, below)]
        raise FedbenchError(
            f"{given} is a whole command, {parents[0].info.run_name!r}; give one of its runs: {_listed(children)}."
        )
    if not runs:
        raise _unknown(client, wanted)
    if len({run.data.tags.get(RUN_ID) for run in runs}) > 1:
        raise FedbenchError(f"{given} is the beginning of several runs' ids; give more digits: {_listed(runs)}.")
    newest: Run = max(runs, key=lambda run: (run.info.status == "FINISHED", run.info.start_time))
    return newest


def described(run: Run) -> str:
    """``0123456789abcdef (fedavg · clip:embedded · seed 0)``."""
    return f"{run.data.tags.get(RUN_ID, run.info.run_id)} ({run.info.run_name})"


def _listed(runs: Sequence[Run]) -> str:
    """Every run by both its ids, since it may be either that began alike."""
    shown = [f"{described(run)}, MLflow {run.info.run_id}" for run in runs[:_LISTED]]
    return "; ".join(shown) + (f"; and {len(runs) - _LISTED} more" if len(runs) > _LISTED else "")


def _unknown(client: MlflowClient, wanted: str) -> FedbenchError:
    known: dict[str, Run] = {}
    for _, run in runs_of(client, None):
        known |= {run.data.tags.get(RUN_ID, ""): run, run.info.run_id: run}
    if not known:
        return FedbenchError(
            "the store has no runs; fill it with `fedbench run --suite longtail`, or name another store."
        )
    beginnings = {name[: len(wanted)]: run for name, run in known.items()}
    close = difflib.get_close_matches(wanted, beginnings, n=3, cutoff=0.6)
    nearest = "".join(f"; did you mean {' or '.join(described(beginnings[name]) for name in close)}?" if close else ".")
    return FedbenchError(
        f"no run's id begins with {wanted!r}{nearest} `fedbench ui` shows every run with its id; if the run is in "
        "another store, name that with --store."
    )


@dataclass(frozen=True, eq=False)
class RecordedModel:
    """A finished run, assembled anew, with its final state."""

    stored: Run
    """As MLflow has it."""
    run: PreparedRun
    state: RunState
    predictions: tuple[int, ...]
    """As recorded."""


def recorded_model(uri: str, given: str, settings: Settings) -> RecordedModel:
    """The model of the run that the id ``given`` means, with data and weights as they are here and now.

    Raises FedbenchError for an unknown run, one without a model, and data or weights that are not there.
    """
    client = reading_client(uri)
    stored = find_run(client, given)
    if stored.info.status != "FINISHED":
        raise FedbenchError(f"run {described(stored)} is {stored.info.status}; only a finished run has a model.")
    run_id = RunTags(stored.data.tags).run_id
    with tempfile.TemporaryDirectory() as temporary:
        folder = local_artifacts(uri, stored) or _download(client, stored, Path(temporary))
        run = prepare(read_spec(folder, run_id), settings)
        state = read_state(folder, run_id, run.spec.device)
        return RecordedModel(stored, run, state, read_predictions(folder, run_id))


def _download(client: MlflowClient, stored: Run, folder: Path) -> Path:
    """Where in ``folder`` the run's artifacts now are."""
    try:
        return Path(client.download_artifacts(stored.info.run_id, "", str(folder)))
    except (MlflowException, OSError) as error:
        reason = " ".join(str(error).split())[:400]
        raise FedbenchError(f"the artifacts of run {described(stored)} cannot be read: {reason}") from error
