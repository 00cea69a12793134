"""MLflow as a listener: one experiment a suite, one MLflow run a `RunSpec`, filed under one for the command.

A run is held back for its first seconds. One that has ended by then is written at once where the store allows it
(`fedbench.tracking.writing.at_once`); `fedbench.tracking.writing.recording` has the steps that others are written in.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
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
from fedbench.tracking.recorded.reading import database_reader
from fedbench.tracking.recorded.seal import SEAL, seal_of
from fedbench.tracking.resuming import Origin, stored_in
from fedbench.tracking.schema import FAILURE, FINAL, database_of
from fedbench.tracking.store import experiment_of, open_store
from fedbench.tracking.tags import (
    code_tags,
    described_by,
    flat_params,
    group_tags,
    info_tags,
    provenance_tags,
    run_note,
    run_tags,
)
from fedbench.tracking.writing.at_once import AtOnce, WholeRun
from fedbench.tracking.writing.command import CLAIMS, CommandRun
from fedbench.tracking.writing.patience import Patience, patient
from fedbench.tracking.writing.recording import (
    NOTE,
    begin_run,
    dataset_of,
    end_run,
    log_dataset,
    log_metrics,
    log_params,
    metrics_at,
    params_as_kept,
    set_tags,
    tags_under,
)

# isort: split
# after fedbench.tracking.store, which turns MLflow's telemetry off before MLflow is first imported
from mlflow.entities import Dataset, Metric

_FLUSH_SECONDS = 5.0
"""For which a run is held back, and then between two times that metrics are sent."""
EXECUTOR = "fedbench.executor"
"""Tag: which executor trained the cohorts and, where it fell back, why."""


@dataclass
class _OpenRun:
    """A run that has not ended."""

    spec: RunSpec
    tags: dict[str, str]
    began: float
    flushed: float
    """When metrics were last sent, on the monotonic clock."""
    dataset: Dataset | None = None
    """None for a run that ended before it had read its data."""
    id: str = ""
    """MLflow's; "" as long as the run is held back."""
    waiting: list[Metric] = field(default_factory=list)
    bytes_up: int = 0
    bytes_down: int = 0
    last_round: int = 0

    @property
    def name(self) -> str:
        """As MLflow shows it."""
        return f"{self.spec.title} · seed {self.spec.seed}"


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
        self._at_once = None if database_of(uri) is None else AtOnce.into(client, self._experiment)
        self._reader = database_reader(uri)
        self._open: dict[str, _OpenRun] = {}
        self._codes = codes or Codes(() if invocation is None else invocation.plugin_files)
        read = ("", 1) if invocation is None else (invocation.suite_text, invocation.suite_version)
        self._provenance = provenance_tags(suite, *read)
        self._command = CommandRun(client, self._experiment, suite, invocation, claims, self._provenance, self._codes)

    @property
    def command(self) -> str:
        """MLflow's id of the command's run; "" where nothing was begun."""
        return self._command.begun

    def has_finished(self, spec: RunSpec, origin: Origin) -> bool:
        """Whether the store has the run by now, made from the same code, data and weights."""
        if self._rerun or not self._may_have(spec, "FINISHED"):
            return False
        return stored_in(self._client, self._suite, {spec.run_id: origin}, spec.run_id).get(spec.run_id) == ()

    @hookimpl
    def run_started(self, spec: RunSpec, info: RunInfo) -> None:
        """Everything that is known before the first round."""
        run = self._opened(spec)
        run.tags |= info_tags(info)
        run.dataset = dataset_of(spec.dataset, info.data_hash)

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
        run.waiting += metrics_at({**record.metrics, **record.method_metrics, **record.measured, **costs}, record.round)
        if time.monotonic() - run.flushed >= _FLUSH_SECONDS:
            self._flush(run)

    @hookimpl
    def run_finished(self, spec: RunSpec, info: RunInfo, result: RunResult) -> None:
        """The final metrics and the artifacts; the run is FINISHED."""
        run = self._open[spec.run_id]
        sent = sum(record.bytes_up + record.bytes_down for record in result.records)
        summary = {**result.summary, "seconds": result.seconds, "megabytes": sent / 1e6}
        final = {f"{FINAL}{name}": value for name, value in summary.items()}
        run.waiting += metrics_at(final, run.last_round)
        tags = {NOTE: run_note(spec, result.summary, run.last_round)}
        tags |= {EXECUTOR: result.executor} if result.executor else {}

        def write_files(folder: Path) -> None:
            try:
                write_artifacts(folder, spec, info, result)
            except FedbenchError as error:
                raise OSError(f"in the folder for files: {error}") from error

        if self._at_once is not None and not run.id:
            self._patience.insist(self._at_once.write, self._whole(run, tags), write_files)
            del self._open[spec.run_id]
        else:
            self._patience.insist(self._log_artifacts, self._begun(run), write_files)
            set_tags(self._client, run.id, tags)
            self._flush(run)
            # last of all: it is over what the store now has
            set_tags(self._client, run.id, {SEAL: seal_of(self._client.get_run(run.id))})
            self._end(spec.run_id, "FINISHED")
        self._command.finished()

    @hookimpl
    def run_warned(self, spec: RunSpec, warning: str) -> None:
        """The warning as a tag; the last one counts."""
        if spec.run_id in self._open:
            self._set_tags(self._open[spec.run_id], {"fedbench.warning": warning})

    @hookimpl
    def run_failed(self, spec: RunSpec, reason: str) -> None:
        """The run is FAILED, with the reason; one that never started is recorded as well."""
        self._end_early(spec, reason, "FAILED", f"It failed: {reason}")
        self._command.failed(f"{spec.title}, seed {spec.seed}: {reason}")

    @hookimpl
    def run_retried(self, spec: RunSpec, reason: str, attempt: int) -> None:
        """The attempt is KILLED, with the reason; the next one is a run of its own."""
        self._end_early(spec, reason, "KILLED", f"Attempt {attempt} was given up: {reason}")

    @hookimpl
    def run_skipped(self, spec: RunSpec) -> None:
        """The command has one run less to carry out."""
        self._command.skipped()

    def interrupt(self) -> None:
        """Keep what the running runs have given so far and mark them, and the command's own run, KILLED."""
        for run_id in list(self._open):
            self._end(run_id, "KILLED")
        self._command.interrupt()

    def end_dead_commands(self) -> None:
        """Mark the runs of commands whose process has died."""
        self._command.end_dead()

    def _opened(self, spec: RunSpec) -> _OpenRun:
        """The run, held back as yet; what a dead process has left of it is given up."""
        made_by = {**self._provenance, **code_tags(self._codes.of_run(spec)), **group_tags(self._suite, spec)}
        tags = {**run_tags(spec), **made_by, NOTE: f"{described_by(spec)} It has not ended."}
        if self._claims is not None:
            tags[CLAIMS] = self._claims.shared_by
            # this process has the claim, so whoever began these is dead
            found = self._may_have(spec, "RUNNING")
            for left in self._command.running(f"tags.`fedbench.run_id` = '{spec.run_id}'") if found else ():
                self._command.give_up(left, f"{described_by(spec)} Its process was killed.")
        self._open[spec.run_id] = run = _OpenRun(spec, tags, time.time(), time.monotonic())
        _ = self._command.id  # begins with its first run
        return run

    def _may_have(self, spec: RunSpec, status: str) -> bool:
        """Whether there may be a run of the spec with this status: a quick look, where the store is a SQLite file."""
        return self._reader is None or self._reader.has(spec.run_id, status)

    def _begun(self, run: _OpenRun) -> str:
        """MLflow's id of a run that is no longer held back."""
        if not run.id:
            run.id = begin_run(
                self._client, self._experiment, run.name, run.tags, self._command.id, int(run.began * 1000)
            )
            log_params(self._client, run.id, flat_params(run.spec))
            if run.dataset is not None:
                log_dataset(self._client, run.id, run.dataset)
        return run.id

    def _whole(self, run: _OpenRun, tags: dict[str, str]) -> WholeRun:
        assert run.dataset is not None
        filed = tags_under(self._command.id, {**run.tags, **tags})
        params = params_as_kept(flat_params(run.spec))
        return WholeRun(run.name, int(run.began * 1000), filed, params, run.dataset, tuple(run.waiting))

    def _set_tags(self, run: _OpenRun, tags: dict[str, str]) -> None:
        run.tags |= tags
        if run.id:
            set_tags(self._client, run.id, tags)

    def _log_artifacts(self, run: str, write_files: Callable[[Path], None]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            write_files(Path(folder))
            self._client.log_artifacts(run, folder)

    def _end_early(self, spec: RunSpec, reason: str, status: str, note: str) -> None:
        run = self._open.get(spec.run_id) or self._opened(spec)
        self._set_tags(run, {FAILURE: reason, NOTE: f"{described_by(spec)} {note}"})
        self._end(spec.run_id, status)

    def _flush(self, run: _OpenRun) -> None:
        log_metrics(self._client, self._begun(run), run.waiting)
        run.waiting.clear()
        run.flushed = time.monotonic()

    def _end(self, run_id: str, status: str) -> None:
        run = self._open.pop(run_id)
        self._flush(run)
        end_run(self._client, run.id, status)
