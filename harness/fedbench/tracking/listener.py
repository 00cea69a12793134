"""MLflow as a listener: one experiment a suite, one MLflow run a `RunSpec`, filed under one for the command.

`fedbench.tracking.recording` has the steps it is made of, for whoever writes runs of another kind.
"""

from __future__ import annotations

import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from fedbench.core.errors import FedbenchError
from fedbench.core.method.hooks import hookimpl
from fedbench.core.records import RoundRecord, RunInfo, RunResult
from fedbench.core.spec import RunSpec
from fedbench.plugins.run_code import Codes
from fedbench.runs.engines.claims import Claims
from fedbench.tracking.artifacts import write_artifacts
from fedbench.tracking.databases import shown
from fedbench.tracking.invocation import Invocation
from fedbench.tracking.patience import Patience, patient
from fedbench.tracking.recorded.seal import SEAL, seal_of
from fedbench.tracking.recording import (
    NOTE,
    OpenCommand,
    OpenRun,
    begin_run,
    end_run,
    log_dataset,
    log_metrics,
    log_params,
    metrics_at,
    set_tags,
)
from fedbench.tracking.resuming import Origin, stored_in
from fedbench.tracking.schema import FAILURE, FINAL, INVOCATION, KIND
from fedbench.tracking.store import experiment_of, open_store
from fedbench.tracking.tags import (
    code_tags,
    command_code_tags,
    described_by,
    flat_params,
    info_tags,
    provenance_tags,
    run_note,
    run_tags,
)

# isort: split
# after fedbench.tracking.store, which turns MLflow's telemetry off before MLflow is first imported
from mlflow.entities import Run

_FLUSH_SECONDS = 5.0
CLAIMS = "fedbench.claims"
"""Tag: names the folder by whose claims it can be seen whether a run is still at work (see `fedbench.claims`)."""
CLAIM = "fedbench.claim"
"""Tag of a command's run: the claim that its process holds."""
SUITE = "suite.yaml"
"""Artifact of a command's run: the text of the suite."""
EXECUTOR = "fedbench.executor"
"""Tag: which executor trained the cohorts and, where it fell back, why."""


class Tracking:
    """The listener that writes runs to the store at ``uri``, under the experiment ``fedbench/<suite>``.

    With an ``invocation`` they are filed under one parent run, which begins with the first of them and ends with the
    last; without one every run stands alone. With ``claims`` what killed processes left as running is marked KILLED.
    While the store can't be written, its calls are tried again, and ``tell`` gets a message; StoreUnavailable after
    ``patience`` seconds. With ``rerun`` no run counts as finished. ``codes`` are by default those of the code here
    with the invocation's plugin files.
    """

    def __init__(
        self,
        uri: str,
        suite: str,
        invocation: Invocation | None = None,
        claims: Claims | None = None,
        *,
        tell: Callable[[str], None] = lambda _: None,
        patience: float = 120.0,
        rerun: bool = False,
        codes: Codes | None = None,
    ) -> None:
        client = open_store(uri, create=True)
        if client is None:
            raise FedbenchError(f"the store {shown(uri)!r} cannot be created.")
        self._patience = Patience(uri, tell, patience)
        self._client = client = patient(client, self._patience)
        self._claims = claims
        self._rerun = rerun
        self._suite = suite
        self._experiment = experiment_of(client, uri, suite)
        self._open: dict[str, OpenRun] = {}
        self._invocation = invocation
        self._parent: OpenCommand | None = None
        self._codes = codes or Codes(() if invocation is None else invocation.plugin_files)
        self._provenance = provenance_tags(suite, "" if invocation is None else invocation.suite_text)

    def has_finished(self, spec: RunSpec, origin: Origin) -> bool:
        """Whether the store has the run by now, made from the same code, data and weights."""
        if self._rerun:
            return False
        return stored_in(self._client, self._suite, {spec.run_id: origin}, spec.run_id).get(spec.run_id) == ()

    @hookimpl
    def run_started(self, spec: RunSpec, info: RunInfo) -> None:
        """An MLflow run with everything that is known before the first round."""
        self._begin(spec, info_tags(info))
        log_dataset(self._client, self._open[spec.run_id].id, spec.dataset, info.data_hash)

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
            **record.faults,
        }
        run.waiting += metrics_at({**record.metrics, **record.client_metrics, **costs}, record.round)
        if time.monotonic() - run.flushed >= _FLUSH_SECONDS:
            self._flush(run)

    @hookimpl
    def run_finished(self, spec: RunSpec, info: RunInfo, result: RunResult) -> None:
        """The final metrics and the artifacts; the run is FINISHED."""
        run = self._open[spec.run_id]
        final = {f"{FINAL}{name}": value for name, value in {**result.summary, "seconds": result.seconds}.items()}
        run.waiting += metrics_at(final, run.last_round)
        self._patience.insist(self._log_artifacts, run.id, spec, info, result)
        set_tags(self._client, run.id, {NOTE: run_note(spec, result.summary, run.last_round)})
        if result.executor:
            set_tags(self._client, run.id, {EXECUTOR: result.executor})
        self._flush(run)
        # last of all: it is over what the store now has
        set_tags(self._client, run.id, {SEAL: seal_of(self._client.get_run(run.id))})
        self._end(spec.run_id, "FINISHED")
        if self._parent is not None:
            self._parent.finished += 1
            self._tell_parent(self._parent)

    def _log_artifacts(self, run: str, spec: RunSpec, info: RunInfo, result: RunResult) -> None:
        with tempfile.TemporaryDirectory() as folder:
            try:
                write_artifacts(Path(folder), spec, info, result)
            except FedbenchError as error:
                raise OSError(f"in the folder for temporary files: {error}") from error
            self._client.log_artifacts(run, folder)

    @hookimpl
    def run_warned(self, spec: RunSpec, warning: str) -> None:
        """The warning as a tag; the last one counts."""
        if spec.run_id in self._open:
            set_tags(self._client, self._open[spec.run_id].id, {"fedbench.warning": warning})

    @hookimpl
    def run_failed(self, spec: RunSpec, reason: str) -> None:
        """The run is FAILED, with the reason; one that never started is recorded as well."""
        self._end_early(spec, reason, "FAILED", f"It failed: {reason}")
        if self._parent is not None:
            self._parent.failures.append(f"{spec.title}, seed {spec.seed}: {reason}")
            self._tell_parent(self._parent)

    @hookimpl
    def run_retried(self, spec: RunSpec, reason: str, attempt: int) -> None:
        """The attempt is KILLED, with the reason; the next one is a run of its own."""
        self._end_early(spec, reason, "KILLED", f"Attempt {attempt} was given up: {reason}")

    @hookimpl
    def run_skipped(self, spec: RunSpec) -> None:
        """The command has one run less to carry out."""
        if self._invocation is not None:
            self._invocation = replace(
                self._invocation, runs=self._invocation.runs - 1, skipped=self._invocation.skipped + 1
            )
        if self._parent is not None:
            self._tell_parent(self._parent)

    def interrupt(self) -> None:
        """Keep what the running runs have given so far and mark them, and the command's own run, KILLED."""
        for run_id in list(self._open):
            self._end(run_id, "KILLED")
        if self._parent is not None:
            self._end_parent(self._parent, "KILLED")

    def _end_early(self, spec: RunSpec, reason: str, status: str, note: str) -> None:
        if spec.run_id not in self._open:
            self._begin(spec, {})
        tags = {FAILURE: reason, NOTE: f"{described_by(spec)} {note}"}
        set_tags(self._client, self._open[spec.run_id].id, tags)
        self._end(spec.run_id, status)

    def _begin(self, spec: RunSpec, facts: Mapping[str, str]) -> None:
        made_by = {**self._provenance, **code_tags(self._codes.of(spec.method))}
        tags = {**run_tags(spec), **made_by, **facts, NOTE: f"{described_by(spec)} It has not ended."}
        if self._claims is not None:
            tags[CLAIMS] = self._claims.shared_by
            # this process has the claim, so whoever began these is dead
            for left in self._running(f"tags.`fedbench.run_id` = '{spec.run_id}'"):
                self._give_up(left, f"{described_by(spec)} Its process was killed.")
        run = begin_run(
            self._client, self._experiment, f"{spec.title} · seed {spec.seed}", tags, parent=self._parent_id()
        )
        self._open[spec.run_id] = OpenRun(run, time.monotonic())
        log_params(self._client, run, flat_params(spec))

    def _parent_id(self) -> str:
        """The id of the command's run, begun where this is its first run; "" without an invocation."""
        invocation = self._invocation
        if invocation is None:
            return ""
        if self._parent is None:
            tags = {**invocation.tags(), **self._provenance, **command_code_tags(self._codes), KIND: INVOCATION}
            tags[NOTE] = invocation.note(self._suite, 0, (), "RUNNING")
            if self._claims is not None:
                tags[CLAIMS] = self._claims.shared_by
                self.end_dead_commands()
                # held before anybody can see the run
                tags[CLAIM] = uuid.uuid4().hex
                self._claims.hold(tags[CLAIM])
            name = invocation.name(self._suite, datetime.now())
            made = begin_run(self._client, self._experiment, name, tags)
            self._parent = OpenCommand(made, tags.get(CLAIM, ""))
            if invocation.suite_text:
                self._client.log_text(made, invocation.suite_text, SUITE)
        return self._parent.id

    def end_dead_commands(self) -> None:
        """Mark the runs of commands whose process has died, known by a claim that anybody can take."""
        for left in self._running(f"tags.`{KIND}` = '{INVOCATION}'"):
            claim = left.data.tags.get(CLAIM, "")
            if self._claims is not None and claim and self._claims.hold(claim):
                self._give_up(left, "The process of this command was killed; the same command goes on.")
                self._claims.release(claim)

    def _running(self, condition: str) -> list[Run]:
        """What goes on, as far as the store knows, under claims that this process can see."""
        if self._claims is None:
            return []
        filters = f"attributes.status = 'RUNNING' and tags.`{CLAIMS}` = '{self._claims.shared_by}' and {condition}"
        return list(self._client.search_runs([self._experiment], filters))

    def _give_up(self, run: Run, note: str) -> None:
        set_tags(self._client, run.info.run_id, {NOTE: note})
        end_run(self._client, run.info.run_id, "KILLED")

    def _tell_parent(self, parent: OpenCommand) -> None:
        """How many runs ended so far; with the last one, the command's run ends."""
        counts = {"runs_finished": parent.finished, "runs_failed": len(parent.failures)}
        log_metrics(self._client, parent.id, metrics_at(counts, parent.ended))
        if self._invocation is not None and parent.ended == self._invocation.runs:
            self._end_parent(parent, "FAILED" if parent.failures else "FINISHED")

    def _end_parent(self, parent: OpenCommand, status: str) -> None:
        if self._invocation is not None:
            note = self._invocation.note(self._suite, parent.finished, parent.failures, status)
            set_tags(self._client, parent.id, {NOTE: note})
        end_run(self._client, parent.id, status)
        if self._claims is not None:
            self._claims.release(parent.claim)
        self._parent = self._invocation = None

    def _flush(self, run: OpenRun) -> None:
        log_metrics(self._client, run.id, run.waiting)
        run.waiting.clear()
        run.flushed = time.monotonic()

    def _end(self, run_id: str, status: str) -> None:
        run = self._open.pop(run_id)
        self._flush(run)
        end_run(self._client, run.id, status)
