"""Writing to MLflow, with patience: a run under a parent, everything in few large calls, and the parent itself.

Everything takes a client and explicit ids, never MLflow's active run: runs interleave in one process. The parent is the
run of a command, begun with the first of its runs and ended with the last. It has what was asked for, how far it came,
and at the end the leaderboard.
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
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar, cast

from fedbench.core.errors import FedbenchError
from fedbench.core.wording import counted
from fedbench.plugins.provenance import Codes
from fedbench.runs.engines.claims import Claims
from fedbench.tracking.databases import masked, shown
from fedbench.tracking.read import open_reader
from fedbench.tracking.schema import INVOCATION, KIND
from fedbench.tracking.store import open_store, put_files, run_folders
from fedbench.tracking.tags import command_code_tags

# isort: split
# after fedbench.tracking.store, which turns MLflow's telemetry off before MLflow is first imported
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, Metric, Param, Run, RunTag
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


CLAIMS = "fedbench.claims"
"""Tag: names the folder by whose claims (`fedbench.runs.engines.claims`) it shows whether a run is still at work."""
CLAIM = "fedbench.claim"
"""Tag of a command's run: the claim that its process holds."""
SUITE = "suite.yaml"
"""Artifact of a command's run: the text of the suite."""
BOARD = "leaderboard"
"""The same: a folder with the leaderboard's files."""
BEST = "fedbench.best"
"""Tag of a command's run: the rows that its metrics are of, the best of each table."""
_TELL_SECONDS = 5.0
"""Between two counts of what has ended, but for the last."""


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """What ``fedbench run`` is to carry out. It names no path of this machine but what is part of a run's settings."""

    command: str
    """The command line that asks for the same runs again."""
    runs: int
    """Runs to carry out; every one of them ends as finished or failed."""
    skipped: int = 0
    """Requested runs that the store held already."""
    scale: str = ""
    settings: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    """Methods, settings and seeds are the requested ones; empty where the suite's own were meant."""
    seeds: tuple[int, ...] = ()
    overrides: tuple[str, ...] = ()
    """``KEY=VALUE`` each."""
    plugin_files: tuple[Path, ...] = ()
    """Names and hashes of them are recorded."""
    asked_for: str = ""
    """What its runs are read by again."""
    suite_text: str = ""
    """The suite's file as it was read; "" for a suite of no file."""
    suite_version: int = 1

    def name(self, suite: str, began: datetime) -> str:
        """``longtail · paper · 24 runs · 2026-11-21 18:03``."""
        parts = (suite, self.scale, counted(self.runs, "run"), f"{began:%Y-%m-%d %H:%M}")
        return " · ".join(part for part in parts if part)

    def tags(self) -> dict[str, str]:
        lists: dict[str, Sequence[object]] = {
            "settings": self.settings,
            "methods": self.methods,
            "seeds": self.seeds,
            "overrides": self.overrides,
            "plugins": [path.name for path in self.plugin_files],
        }
        tags = {"command": self.command, "runs": str(self.runs), "skipped": str(self.skipped), "scale": self.scale}
        tags |= {name: json.dumps(values, ensure_ascii=False) for name, values in lists.items()}
        return {f"fedbench.{name}": value for name, value in tags.items()}

    def note(self, suite: str, finished: int, failures: Sequence[str], status: str) -> str:
        """Markdown: what this is, the command, and how far it came. ``failures`` are a line each."""
        rest = self.runs - finished - len(failures)
        ends = [f"{finished} finished", f"{len(failures)} failed"]
        ends += [f"{rest} {'to come' if status == 'RUNNING' else 'not carried out'}"] if rest else []
        held = f" In the store already: {counted(self.skipped, 'run')}." if self.skipped else ""
        # what a reader wants first stands first: MLflow folds the rest
        lines = [f"`fedbench run` on the suite **{suite}**, {counted(self.runs, 'run')}: {', '.join(ends)}.{held}"]
        if failures:
            lines.append("\n".join(f"- failed: {failure}" for failure in failures))
        lines.append(f"`{self.command}`")
        return "\n\n".join(lines) + "\n"


class CommandRun:
    """What the store has of the command under way; without an ``invocation``, nothing."""

    def __init__(
        self,
        client: MlflowClient,
        experiment: str,
        keep: Callable[[str, str], None],
        suite: str,
        invocation: Invocation | None,
        claims: Claims | None,
        provenance: Mapping[str, str],
        codes: Codes,
    ) -> None:
        """``keep`` hears of runs, by MLflow's ids, that have begun, with the text of the suite, or ended.

        With ``claims``, runs of commands that were killed are marked KILLED as soon as this one begins.
        """
        self._client = client
        self._experiment = experiment
        self._keep = keep
        self._suite = suite if invocation is None else invocation.asked_for or suite
        self._invocation = invocation
        self._claims = claims
        self._tags = {**provenance, **command_code_tags(codes), KIND: INVOCATION}
        self._id = self._claim = ""
        self.begun = ""
        """MLflow's id of the command's run, also once it has ended; "" before it is begun."""
        self._finished = 0
        self._failures: list[str] = []
        self._told = 0.0

    @property
    def id(self) -> str:
        """MLflow's, of a run that is begun where it has not been; "" without an invocation."""
        if self._invocation is not None and not self._id:
            self._begin(self._invocation)
        return self._id

    def skipped(self) -> None:
        if self._invocation is not None:
            runs, skipped = self._invocation.runs - 1, self._invocation.skipped + 1
            self._invocation = replace(self._invocation, runs=runs, skipped=skipped)
        self._tell()

    def finished(self) -> None:
        self._finished += 1
        self._tell()

    def failed(self, why: str) -> None:
        """A run has; ``why`` is a line."""
        self._failures.append(why)
        self._tell()

    def interrupt(self) -> None:
        if self._id:
            self._count()
            self._end("KILLED")

    def end_dead(self) -> None:
        """Mark the runs of commands whose process has died, known by a claim that anybody can take."""
        for left in self.running(f"tags.`{KIND}` = '{INVOCATION}'"):
            claim = left.data.tags.get(CLAIM, "")
            if self._claims is not None and claim and self._claims.hold(claim):
                self.give_up(left, "The process of this command was killed; the same command goes on.")
                self._claims.release(claim)

    def running(self, condition: str) -> Sequence[Run]:
        """What goes on, as far as the store knows, under claims that this process can see."""
        if self._claims is None:
            return []
        filters = f"attributes.status = 'RUNNING' and tags.`{CLAIMS}` = '{self._claims.shared_by}' and {condition}"
        return list(self._client.search_runs([self._experiment], filters))

    def give_up(self, run: Run, note: str) -> None:
        """Mark what a dead process has left as running."""
        log(self._client, run.info.run_id, tags={NOTE: note})
        self._terminate(run.info.run_id, "KILLED")

    def _begin(self, invocation: Invocation) -> None:
        tags = {**invocation.tags(), **self._tags, NOTE: invocation.note(self._suite, 0, (), "RUNNING")}
        if self._claims is not None:
            tags[CLAIMS] = self._claims.shared_by
            self.end_dead()
            # held before anybody can see the run
            tags[CLAIM] = self._claim = uuid.uuid4().hex
            self._claims.hold(self._claim)
        name = invocation.name(self._suite, datetime.now())
        self._id = self.begun = begin_run(self._client, self._experiment, name, tags)
        self._keep(self._id, invocation.suite_text)

    def _tell(self) -> None:
        """How many runs ended so far, now and then; with the last one, the command's run ends."""
        if not self._id or self._invocation is None:
            return
        is_last = self._finished + len(self._failures) == self._invocation.runs
        if is_last or time.monotonic() - self._told >= _TELL_SECONDS:
            self._count()
        if is_last:
            self._end("FAILED" if self._failures else "FINISHED")

    def _count(self) -> None:
        counts = {"runs_finished": self._finished, "runs_failed": len(self._failures)}
        log(self._client, self._id, metrics_at(counts, self._finished + len(self._failures)))
        self._told = time.monotonic()

    def _end(self, status: str) -> None:
        if self._invocation is not None:
            note = self._invocation.note(self._suite, self._finished, self._failures, status)
            log(self._client, self._id, tags={NOTE: note})
        self._terminate(self._id, status)
        if self._claims is not None:
            self._claims.release(self._claim)
        self._id, self._invocation = "", None

    def _terminate(self, run: str, status: str) -> None:
        self._client.set_terminated(run, status)
        self._keep(run, "")


def record_board(uri: str, command: str, files: Path, metrics: Mapping[str, float], best: str) -> None:
    """Store what is in the folder ``files`` with the run of ``command``, and the ``metrics`` of the rows ``best``."""
    client = open_store(uri, create=False)
    if client is not None:
        folders = run_folders(client, uri, client.get_run(command).info.experiment_id)
        put_files(client, folders, command, files, BOARD)
        log(client, command, metrics_at(metrics, 0), tags={BEST: best})
        reader = open_reader(uri)
        if reader is not None:
            reader.suites()  # MLflow is there: who reads next need not ask it
