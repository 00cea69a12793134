"""MLflow as a listener: one experiment a suite, one MLflow run a `RunSpec`, metrics in batches.

Runs interleave in one process, so everything goes through a client with explicit run ids, never MLflow's active run.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedbench.errors import FedbenchError
from fedbench.hookspecs import RoundRecord, RunInfo, RunResult, hookimpl
from fedbench.provenance import code_hash, commit, versions
from fedbench.spec import RunSpec
from fedbench.store import FINAL, experiment_of, finished_run_ids, open_store, store_uri, ui_command

# isort: split
# after fedbench.store, which turns MLflow's telemetry off before MLflow is first imported
from mlflow.entities import Metric, Param
from mlflow.utils.validation import (
    MAX_ENTITY_KEY_LENGTH,
    MAX_METRICS_PER_BATCH,
    MAX_PARAM_VAL_LENGTH,
    MAX_PARAMS_TAGS_PER_BATCH,
    MAX_TAG_VAL_LENGTH,
)
from safetensors.numpy import save_file

__all__ = ["Tracking", "finished_run_ids", "flat_params", "metric_name", "store_uri", "ui_command"]

_FLUSH_SECONDS = 5.0
_FACTS = (
    "data_hash",
    "weights_hash",
    "num_clients",
    "cohort_size",
    "num_train",
    "num_test",
    "trainable_parameters",
    "round_bytes",
)
"""Of `RunInfo`, written as tags."""


@dataclass
class _Open:
    """An MLflow run that goes on."""

    id: str
    flushed: float
    """When metrics were last sent, on the monotonic clock."""
    waiting: list[Metric] = field(default_factory=list)
    bytes_up: int = 0
    bytes_down: int = 0
    last_round: int = 0


class Tracking:
    """The listener that writes runs to the store at ``uri``, under the experiment ``fedbench/<suite>``."""

    def __init__(self, uri: str, suite: str, plugin_files: Iterable[Path] = ()) -> None:
        client = open_store(uri, create=True)
        if client is None:
            raise FedbenchError(f"the store {uri!r} cannot be created.")
        self._client = client
        self._suite = suite
        self._experiment = experiment_of(client, uri, suite)
        self._open: dict[str, _Open] = {}
        self._provenance = {
            "fedbench.suite": suite,
            "fedbench.commit": commit(),
            "fedbench.code_hash": code_hash(plugin_files),
            **{f"fedbench.version.{name}": value for name, value in versions().items()},
        }

    @hookimpl
    def run_started(self, spec: RunSpec, info: RunInfo) -> None:
        """An MLflow run with everything that is known before the first round."""
        facts = {"owners": json.dumps(dict(info.owners))}
        for name in _FACTS:
            facts[name] = str(getattr(info, name))
        self._begin(spec, {f"fedbench.{name}": value for name, value in facts.items()})

    @hookimpl
    def round_finished(self, spec: RunSpec, record: RoundRecord) -> None:
        """The round's metrics and costs, sent with those of other rounds."""
        run = self._open[spec.run_id]
        run.bytes_up += record.bytes_up
        run.bytes_down += record.bytes_down
        run.last_round = record.round
        costs = {
            "bytes_up": record.bytes_up,
            "bytes_down": record.bytes_down,
            "bytes_up_total": run.bytes_up,
            "bytes_down_total": run.bytes_down,
            "seconds": record.seconds,
        }
        run.waiting += _metrics({**record.metrics, **costs}, record.round)
        if time.monotonic() - run.flushed >= _FLUSH_SECONDS:
            self._flush(run)

    @hookimpl
    def run_finished(self, spec: RunSpec, info: RunInfo, result: RunResult) -> None:
        """The final metrics and the artifacts; the run is FINISHED."""
        run = self._open[spec.run_id]
        final = {f"{FINAL}{name}": value for name, value in {**result.summary, "seconds": result.seconds}.items()}
        run.waiting += _metrics(final, run.last_round)
        with tempfile.TemporaryDirectory() as folder:
            _write_artifacts(Path(folder), spec, info, result)
            self._client.log_artifacts(run.id, folder)
        self._end(spec.run_id, "FINISHED")

    @hookimpl
    def run_failed(self, spec: RunSpec, reason: str) -> None:
        """The run is FAILED, with the reason; one that never started is recorded as well."""
        if spec.run_id not in self._open:
            self._begin(spec, {})
        self._client.set_tag(self._open[spec.run_id].id, "fedbench.failure", reason[:MAX_TAG_VAL_LENGTH])
        self._end(spec.run_id, "FAILED")

    def interrupt(self) -> None:
        """Keep what the running runs have given so far and mark them KILLED."""
        for run_id in list(self._open):
            self._end(run_id, "KILLED")

    def _begin(self, spec: RunSpec, facts: Mapping[str, str]) -> None:
        named = {
            "run_id": spec.run_id,
            "row": spec.row,
            "setting": spec.setting,
            "scale": spec.scale,
            "tuning": json.dumps(spec.tuning),
            "published": json.dumps(spec.published),
        }
        tags = {**{f"fedbench.{name}": value for name, value in named.items()}, **self._provenance, **facts}
        tags = {name: value[:MAX_TAG_VAL_LENGTH] for name, value in tags.items()}
        name = f"{spec.title} · seed {spec.seed}"
        created = self._client.create_run(self._experiment, run_name=name, tags=tags)
        self._open[spec.run_id] = _Open(created.info.run_id, time.monotonic())
        params = [Param(_valid_key(key), value[:MAX_PARAM_VAL_LENGTH]) for key, value in flat_params(spec).items()]
        for start in range(0, len(params), MAX_PARAMS_TAGS_PER_BATCH):
            batch = params[start : start + MAX_PARAMS_TAGS_PER_BATCH]
            self._client.log_batch(created.info.run_id, params=batch)

    def _flush(self, run: _Open) -> None:
        for start in range(0, len(run.waiting), MAX_METRICS_PER_BATCH):
            self._client.log_batch(run.id, metrics=run.waiting[start : start + MAX_METRICS_PER_BATCH])
        run.waiting.clear()
        run.flushed = time.monotonic()

    def _end(self, run_id: str, status: str) -> None:
        run = self._open.pop(run_id)
        self._flush(run)
        self._client.set_terminated(run.id, status)


def flat_params(spec: RunSpec) -> dict[str, str]:
    """The whole spec as text: ``scenario.*``, ``training.*``, ``METHOD.*``, the rest by name. None is ``none``."""
    content = spec.model_dump(mode="json")
    sections = {"": content, "scenario.": content.pop("scenario"), "training.": content.pop("training")}
    sections |= {f"{method}.": values for method, values in content.pop("params").items()}
    return {f"{head}{name}": _text(value) for head, values in sections.items() for name, value in values.items()}


def metric_name(name: str) -> str:
    """``name`` as MLflow allows it: words of letters, digits and ``_.-`` with single slashes and spaces between.

    Where something had to change (a class called ``don't``), four digits of a hash keep two such names apart.
    """
    cleaned = _valid_key(name)
    if cleaned == name:
        return name
    return f"{cleaned[: MAX_ENTITY_KEY_LENGTH - 5]}-{hashlib.sha256(name.encode()).hexdigest()[:4]}"


def _valid_key(name: str) -> str:
    cleaned = "/".join(part if part.strip(".") else "_" for part in re.sub(r"[^\w.\- /]", "_", name).split("/"))
    return posixpath.normpath(cleaned)[:MAX_ENTITY_KEY_LENGTH]


def _metrics(values: Mapping[str, float], step: int) -> list[Metric]:
    now = int(time.time() * 1000)
    return [Metric(metric_name(name), float(value), now, step) for name, value in values.items()]


def _text(value: Any) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _write_artifacts(folder: Path, spec: RunSpec, info: RunInfo, result: RunResult) -> None:
    (folder / "spec.json").write_text(spec.model_dump_json(indent=2) + "\n", encoding="utf-8")
    federation = {
        "classnames": info.classnames,
        "class_counts": info.class_counts,
        "groups": {group: list(classes) for group, classes in info.groups.items()},
    }
    (folder / "federation.json").write_text(json.dumps(federation) + "\n", encoding="utf-8")
    (folder / "owners.json").write_text(json.dumps(dict(info.owners), indent=2) + "\n", encoding="utf-8")
    lines = [f"{sample},{label}" for sample, label in enumerate(result.predictions)]
    (folder / "predictions.csv").write_text("\n".join(["sample,predicted", *lines]) + "\n", encoding="utf-8")
    # safetensors writes memory as it lies; channels-last kernels would come back scrambled
    contiguous = {name: np.asarray(array, order="C") for name, array in result.weights.items()}
    save_file(contiguous, folder / "weights.safetensors")
