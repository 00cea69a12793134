"""A short run in one transaction: what was held back is written at once, where the store is a database here.

MLflow's client writes a run in a dozen transactions, each value as an object of its own. The tables are MLflow's, by
its own definitions, and get what the client would have written.
"""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlparse
from urllib.request import url2pathname

from fedbench.tracking import store as _store  # noqa: F401 - turns MLflow's telemetry off before MLflow is first imported
from fedbench.tracking.recorded.seal import SEAL, seal_of
from fedbench.tracking.schema import StoredData, StoredInfo, StoredRun

# isort: split
from mlflow import MlflowClient
from mlflow.entities import Dataset, LifecycleStage, Metric, RunStatus, SourceType
from mlflow.store.tracking.dbmodels.models import (
    SqlDataset,
    SqlInput,
    SqlLatestMetric,
    SqlMetric,
    SqlParam,
    SqlRun,
    SqlTag,
)
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NAME
from sqlalchemy import insert, select

_NOBODY = "unknown"
"""The user that MLflow's client writes where none is given."""


@dataclass(frozen=True)
class WholeRun:
    """All of a finished run but its files."""

    name: str
    started: int
    """Milliseconds since the epoch."""
    tags: Mapping[str, str]
    params: Mapping[str, str]
    dataset: Dataset
    metrics: Sequence[Metric]


class AtOnce:
    """Writes whole runs into one experiment."""

    def __init__(self, store: SqlAlchemyStore, experiment: str, artifacts: Path) -> None:
        """``artifacts`` is the experiment's folder of them."""
        self._store = store
        self._experiment = int(experiment)
        self._artifacts = artifacts

    @classmethod
    def into(cls, client: MlflowClient, experiment: str) -> AtOnce | None:
        """For the client's store; None where it is no database, or its files are not on this machine."""
        store = client._tracking_client.store
        location = urlparse(client.get_experiment(experiment).artifact_location)
        if not isinstance(store, SqlAlchemyStore) or location.scheme != "file":
            return None
        return cls(store, experiment, Path(url2pathname(location.path)))

    def write(self, run: WholeRun, write_files: Callable[[Path], None]) -> None:
        """Store ``run`` as finished, sealed, with the files that ``write_files`` puts into a folder."""
        made = uuid.uuid4().hex
        folder = self._artifacts / made / SqlAlchemyStore.ARTIFACTS_FOLDER_NAME
        folder.mkdir(parents=True)
        try:
            write_files(folder)
            self._insert(made, folder.as_uri(), run)
        except BaseException:
            shutil.rmtree(folder.parent, ignore_errors=True)
            raise

    def _insert(self, made: str, artifacts: str, run: WholeRun) -> None:
        values = list(dict.fromkeys(map(self._value, run.metrics)))  # the same twice is one
        last = {value.key: value for value in sorted(values, key=lambda one: (one.step, one.timestamp, one.value))}
        tags = {**run.tags, MLFLOW_RUN_NAME: run.name}
        numbers = {key: float("nan") if value.is_nan else value.value for key, value in last.items()}
        data = StoredData(dict(run.params), dict(run.tags), numbers)
        tags[SEAL] = seal_of(StoredRun(StoredInfo(made, "FINISHED", run.started, artifacts), data))
        with self._store.ManagedSessionMaker(read_only=False) as session:
            session.execute(insert(SqlRun), [self._run(made, artifacts, run)])
            for table, texts in ((SqlTag, tags), (SqlParam, run.params)):
                session.execute(insert(table), [{"key": k, "value": v, "run_uuid": made} for k, v in texts.items()])
            for table, points in ((SqlMetric, values), (SqlLatestMetric, last.values())):
                session.execute(insert(table), [{**value._asdict(), "run_uuid": made} for value in points])
            wanted = (SqlDataset.experiment_id == self._experiment, SqlDataset.name == run.dataset.name)
            known: Any = select(SqlDataset.dataset_uuid).where(*wanted, SqlDataset.digest == run.dataset.digest)
            dataset = session.execute(known).scalar()
            if dataset is None:
                dataset = uuid.uuid4().hex
                session.execute(insert(SqlDataset), [self._dataset(dataset, run.dataset)])
            read = {"source_type": "DATASET", "source_id": dataset, "destination_type": "RUN", "destination_id": made}
            session.execute(insert(SqlInput), [{"input_uuid": uuid.uuid4().hex, **read}])

    def _run(self, made: str, artifacts: str, run: WholeRun) -> dict[str, object]:
        return {
            "run_uuid": made,
            "name": run.name,
            "experiment_id": self._experiment,
            "artifact_uri": artifacts,
            "status": RunStatus.to_string(RunStatus.FINISHED),
            "start_time": run.started,
            "end_time": int(time.time() * 1000),
            "lifecycle_stage": LifecycleStage.ACTIVE,
            "source_type": SourceType.to_string(SourceType.UNKNOWN),
            "user_id": _NOBODY,
            **dict.fromkeys(("source_name", "entry_point_name", "source_version"), ""),
        }

    def _dataset(self, made: str, dataset: Dataset) -> dict[str, object]:
        source = {"dataset_source_type": dataset.source_type, "dataset_source": dataset.source}
        facts = {"name": dataset.name, "digest": dataset.digest, **source}
        return {"dataset_uuid": made, "experiment_id": self._experiment, **facts}

    def _value(self, metric: Metric) -> _Value:
        is_nan, value = self._store.sanitize_metric_value(metric.value)
        return _Value(metric.key, float(value), is_nan, metric.timestamp, metric.step)


class _Value(NamedTuple):
    """A row of MLflow's tables of metrics."""

    key: str
    value: float
    is_nan: bool
    timestamp: int
    step: int
