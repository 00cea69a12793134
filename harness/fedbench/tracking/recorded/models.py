"""A recorded run's model, read back with the data that it was trained on."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from fedbench.core.errors import FedbenchError
from fedbench.rounds.run import Run as PreparedRun
from fedbench.rounds.state import RunState
from fedbench.runs.prepare import Settings, prepare
from fedbench.tracking.artifacts import read_predictions, read_spec, read_state
from fedbench.tracking.recorded.lookup import described, find_run, reading_client
from fedbench.tracking.schema import local_artifacts
from fedbench.tracking.tags import RunTags

# isort: split
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.exceptions import MlflowException


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
