"""Writing to MLflow: a run under a parent, parameters and metrics in batches, the run's end. Nothing here trains.

Everything takes a client and explicit ids, never MLflow's active run: runs interleave in one process.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
import time
from collections.abc import Mapping, Sequence

from fedbench.tracking import store as _store  # noqa: F401 - turns MLflow's telemetry off before MLflow is first imported

# isort: split
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, Metric, Param
from mlflow.utils.mlflow_tags import MLFLOW_GIT_COMMIT, MLFLOW_PARENT_RUN_ID, MLFLOW_RUN_NOTE, MLFLOW_SOURCE_NAME
from mlflow.utils.validation import (
    MAX_ENTITY_KEY_LENGTH,
    MAX_METRICS_PER_BATCH,
    MAX_PARAM_VAL_LENGTH,
    MAX_PARAMS_TAGS_PER_BATCH,
    MAX_TAG_VAL_LENGTH,
)

NOTE = MLFLOW_RUN_NOTE
"""The tag whose Markdown MLflow shows at the top of a run's page."""
PARENT = MLFLOW_PARENT_RUN_ID
"""The tag that files a run under another."""
SOURCE = MLFLOW_SOURCE_NAME
"""The tag that MLflow shows as what made the run."""
COMMIT = MLFLOW_GIT_COMMIT
"""The tag that MLflow shows beside it as its version."""
_DIGEST = 8
"""Digits of a data set's digest, as leaderboards show them."""


def begin_run(
    client: MlflowClient,
    experiment: str,
    name: str,
    tags: Mapping[str, str],
    parent: str = "",
    began: int | None = None,
) -> str:
    """The id of a new MLflow run called ``name``, filed under the run ``parent`` where one is given (`tags_under`).

    ``began`` is when, in milliseconds since the epoch; now where it is None.
    """
    made = client.create_run(experiment, start_time=began, run_name=name, tags=tags_under(parent, tags))
    return str(made.info.run_id)


def tags_under(parent: str, tags: Mapping[str, str]) -> dict[str, str]:
    """The tags of a run filed under ``parent`` ("": under none); those longer than MLflow takes are cut off."""
    filed = {**tags, PARENT: parent} if parent else tags
    return {key: value[:MAX_TAG_VAL_LENGTH] for key, value in filed.items()}


def params_as_kept(params: Mapping[str, str]) -> dict[str, str]:
    """Parameters under names that MLflow allows; values longer than it takes are cut off."""
    return {valid_key(key): value[:MAX_PARAM_VAL_LENGTH] for key, value in params.items()}


def log_params(client: MlflowClient, run: str, params: Mapping[str, str]) -> None:
    """Write parameters in batches as large as MLflow takes, as `params_as_kept`."""
    every = [Param(key, value) for key, value in params_as_kept(params).items()]
    for start in range(0, len(every), MAX_PARAMS_TAGS_PER_BATCH):
        client.log_batch(run, params=every[start : start + MAX_PARAMS_TAGS_PER_BATCH])


def log_dataset(client: MlflowClient, run: str, dataset: Dataset) -> None:
    """Record the data set that the run reads, in the column where MLflow looks for it."""
    client.log_inputs(run, datasets=[DatasetInput(dataset=dataset)])


def dataset_of(name: str, digest: str) -> Dataset:
    """A data set as MLflow records it; the digest is cut to fit."""
    return Dataset(name=name, digest=digest[:_DIGEST], source_type="fedbench", source=json.dumps({"name": name}))


def metrics_at(values: Mapping[str, float], step: int) -> list[Metric]:
    """``values`` as MLflow metrics of now, under names that it allows."""
    now = int(time.time() * 1000)
    return [Metric(metric_name(name), float(value), now, step) for name, value in values.items()]


def log_metrics(client: MlflowClient, run: str, metrics: Sequence[Metric]) -> None:
    """Write metrics in batches as large as MLflow takes."""
    for start in range(0, len(metrics), MAX_METRICS_PER_BATCH):
        client.log_batch(run, metrics=metrics[start : start + MAX_METRICS_PER_BATCH])


def set_tags(client: MlflowClient, run: str, tags: Mapping[str, str]) -> None:
    """Write tags; values longer than MLflow takes are cut off."""
    for key, value in tags.items():
        client.set_tag(run, key, value[:MAX_TAG_VAL_LENGTH])


def end_run(client: MlflowClient, run: str, status: str) -> None:
    """End the run as FINISHED, FAILED or KILLED."""
    client.set_terminated(run, status)


def metric_name(name: str) -> str:
    """``name`` as MLflow allows it: words of letters, digits and ``_.-`` with single slashes and spaces between.

    Where something had to change (a class called ``don't``), four digits of a hash keep two such names apart.
    """
    cleaned = valid_key(name)
    if cleaned == name:
        return name
    return f"{cleaned[: MAX_ENTITY_KEY_LENGTH - 5]}-{hashlib.sha256(name.encode()).hexdigest()[:4]}"


def valid_key(name: str) -> str:
    """``name`` with every character that MLflow refuses in a key replaced by ``_``; two names may come out alike."""
    cleaned = "/".join(part if part.strip(".") else "_" for part in re.sub(r"[^\w.\- /]", "_", name).split("/"))
    return posixpath.normpath(cleaned)[:MAX_ENTITY_KEY_LENGTH]
