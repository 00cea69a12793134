"""Reading a store through MLflow: a server, a database that many reach, a folder of files."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fedbench.tracking.recorded.reading import REQUESTS, RUNS_AT_ONCE, Value
from fedbench.tracking.schema import EXPERIMENT, local_artifacts
from fedbench.tracking.store import open_store, runs_of

# isort: split
# after fedbench.tracking.store, which turns MLflow's telemetry off before MLflow is first imported
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore


class ClientReader:
    """Reads through a client; a `fedbench.tracking.recorded.reading.Reader`."""

    def __init__(self, uri: str, client: MlflowClient) -> None:
        self._uri, self._client = uri, client

    def suites(self) -> list[str]:
        """Those with an experiment."""
        names = [experiment.name for experiment in self._client.search_experiments()]
        return [name.removeprefix(EXPERIMENT) for name in names if name.startswith(EXPERIMENT)]

    def runs(self, suite: str | None) -> Iterator[tuple[str, Any]]:
        """Suite and run of every run of the suite (None: of all), the newest first; parents of commands left out."""
        return runs_of(self._client, suite)

    def tags(self, run: str) -> Mapping[str, str]:
        """Of a run, or the parent of a command, by its MLflow id; none where it was purged."""
        try:
            return dict(self._client.get_run(run).data.tags)
        except MlflowException as error:
            if error.error_code != ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
                raise
            return {}

    def values(self, runs: Sequence[str], names: Sequence[str]) -> list[Value]:
        """All values that were logged of the metrics ``names``, by run in the order of logging.

        One query per metric where the store is a database; else one request per run and metric, several at a time.
        """
        store = self._client._tracking_client.store
        if isinstance(store, SqlAlchemyStore):
            bulk: Any = store.get_metric_history_bulk
            parts = [runs[start : start + RUNS_AT_ONCE] for start in range(0, len(runs), RUNS_AT_ONCE)]
            points = ((n, p) for n in names for part in parts for p in bulk(part, n, sys.maxsize))
            return [(point.run_id, point.step, name, point.value) for name, point in points]
        pairs = [(run, name) for run in runs for name in names]
        with ThreadPoolExecutor(REQUESTS) as pool:
            histories = pool.map(lambda one: self._client.get_metric_history(*one), pairs)
            return [(run, p.step, name, p.value) for (run, name), h in zip(pairs, histories, strict=True) for p in h]

    def artifact(self, run: str, name: str, folder: Path) -> Path | None:
        """The artifact as a file, downloaded into ``folder`` if it must be; None where the run has none."""
        here = local_artifacts(self._uri, self._client.get_run(run))
        if here is None:
            return _downloaded(self._client, run, name, folder)
        return here / name if (here / name).is_file() else None


def downloaded(uri: str, run: str, name: str, folder: Path) -> Path | None:
    """The artifact, which is in ``folder`` then; None where the run has none."""
    client = open_store(uri, create=False)
    return None if client is None else _downloaded(client, run, name, folder)


def _downloaded(client: MlflowClient, run: str, name: str, folder: Path) -> Path | None:
    if name not in {artifact.path for artifact in client.list_artifacts(run)}:
        return None
    here = folder / run
    here.mkdir()
    client.download_artifacts(run, name, str(here))
    return here / name
