"""MLflow as a listener: one experiment a suite, one MLflow run a `RunSpec`, filed under one for the command.

A run is held back for its first seconds: one that has ended by then costs four calls. Where the store is a folder
here, its files are written into it, the one by which it is read (`fedbench.tracking.schema`) at last.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedbench.core.errors import FedbenchError
from fedbench.core.method.hooks import hookimpl
from fedbench.core.records import RoundRecord, RunInfo, RunResult
from fedbench.core.spec import RunSpec
from fedbench.plugins.provenance import Codes
from fedbench.runs.engines.claims import Claims
from fedbench.tracking.artifacts import write_artifacts
from fedbench.tracking.databases import shown
from fedbench.tracking.read import Origin, why_again
from fedbench.tracking.recording import (
    CLAIMS,
    NOTE,
    SUITE,
    CommandRun,
    Invocation,
    Patience,
    begin_run,
    dataset_of,
    end_run,
    kept_values,
    log,
    log_dataset,
    metrics_at,
    params_as_kept,
    patient,
    tags_under,
)
from fedbench.tracking.schema import (
    FAILURE,
    FINAL,
    RECORD,
    ROUNDS,
    ROUNDS_HASH,
    SEAL,
    StoredData,
    StoredInfo,
    StoredRun,
    database_of,
    rounds_hash,
    rounds_text,
    seal_of,
    write_record,
)
from fedbench.tracking.store import experiment_of, files_folder, open_store, put_files, run_folders
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
    parent: str
    """MLflow's id of the command's run; "" where there is none."""
    tags: dict[str, str]
    params: dict[str, str]
    began: float
    flushed: float
    """When metrics were last sent, on the monotonic clock."""
    has_params: bool = False
    """Whether MLflow has them."""
    dataset: Dataset | None = None
    """None for a run that ended before it had read its data."""
    id: str = ""
    """MLflow's; "" as long as the run is held back."""
    waiting: list[Metric] = field(default_factory=list)
    """Metrics to send, and behind them all that is written when the run ends."""
    rounds: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    last: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.spec.title} · seed {self.spec.seed}"

    @property
    def data(self) -> StoredData:
        """What the store has of it, once everything is sent."""
        return StoredData(self.params, tags_under(self.parent, self.tags), self.last)

    @property
    def last_round(self) -> int:
        return self.rounds[-1][0] if self.rounds else 0

    def measured(self, values: Mapping[str, float]) -> None:
        self.last |= kept_values(values)
        self.waiting += metrics_at(values, self.last_round)


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
        self._uri = uri
        self._claims = claims
        self._rerun = rerun
        self._suite = suite
        self._experiment = experiment_of(client, uri, suite)
        self._folders = run_folders(client, uri, self._experiment)
        self._is_read_by_file = self._folders is not None and (
            files_folder(uri, client.get_experiment(self._experiment)) is not None
        )
        self._open: dict[str, _OpenRun] = {}
        self._codes = codes or Codes(() if invocation is None else invocation.plugin_files)
        read = ("", 1) if invocation is None else (invocation.suite_text, invocation.suite_version)
        self._provenance = provenance_tags(suite, *read)
        self._command = CommandRun(
            client, self._experiment, self._keep, suite, invocation, claims, self._provenance, self._codes
        )

    @property
    def command(self) -> str:
        return self._command.begun

    def has_finished(self, spec: RunSpec, origin: Origin) -> bool:
        """Whether the store has the run by now, made from the same code, data and weights."""
        if self._rerun:
            return False
        condition = f"attributes.status = 'FINISHED' and tags.`fedbench.run_id` = '{spec.run_id}'"
        finished = self._client.search_runs([self._experiment], condition)
        # one whose process was killed before it was whole is not read either
        by_file = self._is_read_by_file
        whole = [run for run in finished if not by_file or (self._files(run.info.run_id) / RECORD).exists()]
        return why_again(whole, {spec.run_id: origin}).get(spec.run_id) == ()

    @hookimpl
    def run_started(self, spec: RunSpec, info: RunInfo) -> None:
        run = self._opened(spec)
        run.tags |= info_tags(info)
        run.dataset = dataset_of(spec.dataset, info.data_hash)

    @hookimpl
    def round_finished(self, spec: RunSpec, record: RoundRecord) -> None:
        run = self._open[spec.run_id]
        sent = {"bytes_up": record.bytes_up, "bytes_down": record.bytes_down}
        totals = {f"{name}_total": run.last.get(f"{name}_total", 0) + count for name, count in sent.items()}
        costs = {**sent, **totals, "seconds": record.seconds, **record.faults}
        values = {**record.metrics, **record.method_metrics, **record.measured, **costs}
        run.rounds.append((record.round, kept_values(values)))
        run.measured(values)
        if time.monotonic() - run.flushed >= _FLUSH_SECONDS:
            self._send(run)

    @hookimpl
    def run_finished(self, spec: RunSpec, info: RunInfo, result: RunResult) -> None:
        run = self._open[spec.run_id]
        sent = sum(record.bytes_up + record.bytes_down for record in result.records)
        summary = {**result.summary, "seconds": result.seconds, "megabytes": sent / 1e6}
        run.measured({f"{FINAL}{name}": value for name, value in summary.items()})
        tags = {NOTE: run_note(spec, result.summary, run.last_round)}
        tags |= {EXECUTOR: result.executor} if result.executor else {}
        tags[ROUNDS_HASH] = rounds_hash(rounds_text(run.rounds))
        run.tags |= tags
        # over what the store has in the end
        run.tags[SEAL] = tags[SEAL] = seal_of(run.data)
        begun = bool(run.id)
        self._begin(run)
        self._patience.insist(self._write_files, run, info, result)
        self._end(spec.run_id, "FINISHED", tags if begun else None)
        self._command.finished()

    @hookimpl
    def run_warned(self, spec: RunSpec, warning: str) -> None:
        """The warning as a tag; the last one counts."""
        if spec.run_id in self._open:
            run = self._open[spec.run_id]
            run.tags["fedbench.warning"] = warning
            if run.id:
                log(self._client, run.id, tags={"fedbench.warning": warning})

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
        self._command.skipped()

    def interrupt(self) -> None:
        """Keep what the running runs have given so far and mark them, and the command's own run, KILLED."""
        for run_id in list(self._open):
            self._end(run_id, "KILLED")
        self._command.interrupt()

    def end_dead_commands(self) -> None:
        self._command.end_dead()

    def _opened(self, spec: RunSpec) -> _OpenRun:
        """The run, held back as yet; what a dead process has left of it is given up."""
        made_by = {**self._provenance, **code_tags(self._codes.of_run(spec)), **group_tags(self._suite, spec)}
        tags = {**run_tags(spec), **made_by, NOTE: f"{described_by(spec)} It has not ended."}
        if self._claims is not None:
            tags[CLAIMS] = self._claims.shared_by
            # this process has the claim, so whoever began these is dead
            for left in self._command.running(f"tags.`fedbench.run_id` = '{spec.run_id}'"):
                self._command.give_up(left, f"{described_by(spec)} Its process was killed.")
        began = time.time()  # the command begins with its first run
        params = params_as_kept(flat_params(spec))
        run = _OpenRun(spec, self._command.id, tags, params, began, time.monotonic())
        self._open[spec.run_id] = run
        return run

    def _begin(self, run: _OpenRun) -> None:
        if run.id:
            return
        run.id = begin_run(self._client, self._experiment, run.name, run.tags, run.parent, int(run.began * 1000))
        if run.dataset is not None:
            log_dataset(self._client, run.id, run.dataset)

    def _send(self, run: _OpenRun, tags: Mapping[str, str] | None = None) -> None:
        """What is waiting, and the ``tags``; with the first of it the parameters."""
        self._begin(run)
        log(self._client, run.id, run.waiting, None if run.has_params else run.params, tags)
        run.has_params = True
        run.waiting.clear()
        run.flushed = time.monotonic()

    def _write_files(self, run: _OpenRun, info: RunInfo, result: RunResult) -> None:
        """Its model and the other files of a finished run, into its folder or to where MLflow puts them."""
        try:
            if self._folders is not None:
                folder = self._files(run.id)
                shutil.rmtree(folder, ignore_errors=True)  # what a try left that failed
                folder.mkdir(parents=True)
                write_artifacts(folder, run.spec, info, result)
                (folder / ROUNDS).write_bytes(rounds_text(run.rounds))
                return
            with tempfile.TemporaryDirectory() as temporary:
                write_artifacts(Path(temporary), run.spec, info, result)
                (Path(temporary) / ROUNDS).write_bytes(rounds_text(run.rounds))
                if database_of(self._uri) is None:  # else it would be in the folder of another store
                    write_record(Path(temporary), self._stored(run, "FINISHED"))
                self._client.log_artifacts(run.id, temporary)
        except FedbenchError as error:
            raise OSError(f"in the folder for files: {error}") from error

    def _files(self, run: str) -> Path:
        assert self._folders is not None
        return self._folders / run / "artifacts"

    def _end_early(self, spec: RunSpec, reason: str, status: str, note: str) -> None:
        run = self._open.get(spec.run_id) or self._opened(spec)
        tags = {FAILURE: reason, NOTE: f"{described_by(spec)} {note}"}
        run.tags |= tags
        self._end(spec.run_id, status, tags if run.id else None)

    def _end(self, run_id: str, status: str, tags: Mapping[str, str] | None = None) -> None:
        run = self._open.pop(run_id)
        self._send(run, tags)
        stored = self._stored(run, status)
        end_run(self._client, run.id, status, stored.info.end_time)
        if self._folders is not None:
            # last of all: from now on the run is read
            self._patience.insist(write_record, self._files(run.id), stored)

    def _stored(self, run: _OpenRun, status: str) -> StoredRun:
        times = int(run.began * 1000), int(time.time() * 1000)
        return StoredRun(StoredInfo(run.id, self._experiment, status, *times), run.data)

    def _keep(self, run: str, suite: str) -> None:
        """Write the record of a run that is none of the open ones, as MLflow has it, and the text of the ``suite``."""
        if suite:
            self._patience.insist(self._put_suite, run, suite)
        if self._folders is not None:
            self._patience.insist(write_record, self._files(run), self._client.get_run(run))

    def _put_suite(self, run: str, text: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, SUITE).write_text(text, encoding="utf-8")
            put_files(self._client, self._folders, run, Path(folder))
