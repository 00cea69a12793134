"""Writing to MLflow: a run under a parent, everything in few large calls, with patience; its end. Nothing here trains.

Everything takes a client and explicit ids, never MLflow's active run: runs interleave in one process.
"""

from __future__ import annotations

import hashlib
import json
import math
import posixpath
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, TypeVar, cast

from fedbench.core.errors import FedbenchError
from fedbench.tracking import store as _store  # noqa: F401 - turns MLflow's telemetry off before MLflow is first imported
from fedbench.tracking.databases import masked, shown

# isort: split
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INTERNAL_ERROR, TEMPORARILY_UNAVAILABLE, ErrorCode
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
_FIRST, _LONGEST = 0.5, 10.0
"""Seconds between two tries, at first and at last."""
_PASSING = frozenset({ErrorCode.Name(INTERNAL_ERROR), ErrorCode.Name(TEMPORARILY_UNAVAILABLE)})
HURRY = threading.Event()
"""Set where somebody has pressed Ctrl-C: from then on nothing is tried again."""
_T = TypeVar("_T")
_METRICS = MAX_METRICS_PER_BATCH - 2 * MAX_PARAMS_TAGS_PER_BATCH
"""Metrics in one call that has parameters and tags as well: MLflow limits each of them, and their sum."""


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


def log(
    client: MlflowClient,
    run: str,
    metrics: Sequence[Metric] = (),
    params: Mapping[str, str] | None = None,
    tags: Mapping[str, str] | None = None,
) -> None:
    """Write all of it in as few calls as MLflow allows, the tags with the last one; too long texts are cut off.

    MLflow writes the tags of a call behind the rest, so whoever sees them sees everything.
    """
    texts = [Param(key, value) for key, value in params_as_kept(params or {}).items()]
    marks = [RunTag(key, value) for key, value in tags_under("", tags or {}).items()]
    calls = max(math.ceil(len(metrics) / _METRICS), math.ceil(len(texts) / MAX_PARAMS_TAGS_PER_BATCH), bool(marks))
    for number in range(calls):
        start, first = number * _METRICS, number * MAX_PARAMS_TAGS_PER_BATCH
        client.log_batch(
            run,
            metrics=metrics[start : start + _METRICS],
            params=texts[first : first + MAX_PARAMS_TAGS_PER_BATCH],
            tags=marks if number == calls - 1 else (),
        )


def log_dataset(client: MlflowClient, run: str, dataset: Dataset) -> None:
    """Record the data set that the run reads, in the column where MLflow looks for it."""
    client.log_inputs(run, datasets=[DatasetInput(dataset=dataset)])


def dataset_of(name: str, digest: str) -> Dataset:
    """A data set as MLflow records it; the digest is cut to fit."""
    return Dataset(name=name, digest=digest[:_DIGEST], source_type="fedbench", source=json.dumps({"name": name}))


def end_run(client: MlflowClient, run: str, status: str, ended: int | None = None) -> None:
    """End the run as FINISHED, FAILED or KILLED, now where ``ended`` is None."""
    client.set_terminated(run, status, ended)


def kept_values(values: Mapping[str, float]) -> dict[str, float]:
    """``values`` as MLflow keeps them: under names that it allows, the largest number in place of an infinite one."""
    numbers = {metric_name(name): float(value) for name, value in values.items()}
    return {
        name: math.copysign(sys.float_info.max, value) if math.isinf(value) else value
        for name, value in numbers.items()
    }


def metrics_at(values: Mapping[str, float], step: int) -> list[Metric]:
    """``values`` as MLflow metrics of now, as `kept_values`."""
    now = int(time.time() * 1000)
    return [Metric(name, value, now, step) for name, value in kept_values(values).items()]


@cache
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


class StoreUnavailable(FedbenchError):
    """The store could not be written, for as long as there was patience."""


class Patience:
    """Tries what needs the store at ``uri`` again while that can't be reached or written, for up to ``seconds``.

    ``tell`` hears of it once for everything that is tried.
    """

    def __init__(self, uri: str, tell: Callable[[str], None], seconds: float) -> None:
        self._uri = uri
        self._tell = tell
        self._seconds = seconds

    def insist(self, call: Callable[..., _T], *arguments: Any, **named: Any) -> _T:
        """What ``call`` returns. Raises StoreUnavailable after all the time, or at once where somebody is in a `HURRY`;
        errors that do not pass are raised as they are.
        """
        pause, began = _FIRST, time.monotonic()
        while True:
            try:
                return call(*arguments, **named)
            except (MlflowException, OSError) as error:
                if isinstance(error, MlflowException) and error.error_code not in _PASSING:
                    raise
                # what the database was to do, at length, helps nobody
                reason = masked(" ".join(str(error).partition("[SQL:")[0].split()))[:300]
                left = self._seconds - (time.monotonic() - began)
                if left <= 0 or HURRY.is_set():
                    raise StoreUnavailable(
                        f"the store {shown(self._uri)!r} can't be written: {reason} Runs that were stored are "
                        "finished; when it can be written again, the same command goes on."
                    ) from error
                if pause == _FIRST:
                    self._tell(f"the store can't be written: {reason} It is tried again for up to {self._seconds:g} s.")
                HURRY.wait(min(pause, left))
                pause = min(2 * pause, _LONGEST)


def patient(client: MlflowClient, patience: Patience) -> MlflowClient:
    """``client`` with every call made with ``patience``."""
    return cast(MlflowClient, _Patient(client, patience))


class _Patient:
    def __init__(self, client: MlflowClient, patience: Patience) -> None:
        self._client = client
        self._patience = patience

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._client, name)
        return partial(self._patience.insist, call) if callable(call) else call
