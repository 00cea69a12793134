"""The MLflow run of a command: the parent of its runs, begun with the first of them and ended with the last."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from fedbench.plugins.run_code import Codes
from fedbench.runs.engines.claims import Claims
from fedbench.tracking.invocation import Invocation
from fedbench.tracking.schema import INVOCATION, KIND
from fedbench.tracking.tags import command_code_tags
from fedbench.tracking.writing.recording import NOTE, begin_run, end_run, log_metrics, metrics_at, set_tags

# isort: split
# after fedbench.tracking.store, which turns MLflow's telemetry off before MLflow is first imported
from mlflow import MlflowClient
from mlflow.entities import Run

CLAIMS = "fedbench.claims"
"""Tag: names the folder by whose claims it can be seen whether a run is still at work (see `fedbench.claims`)."""
CLAIM = "fedbench.claim"
"""Tag of a command's run: the claim that its process holds."""
SUITE = "suite.yaml"
"""Artifact of a command's run: the text of the suite."""
_TELL_SECONDS = 5.0
"""Between two counts of what has ended, but for the last."""


class CommandRun:
    """What the store has of the command under way; without an ``invocation``, nothing."""

    def __init__(
        self,
        client: MlflowClient,
        experiment: str,
        suite: str,
        invocation: Invocation | None,
        claims: Claims | None,
        provenance: Mapping[str, str],
        codes: Codes,
    ) -> None:
        """With ``claims``, runs of commands that were killed are marked KILLED as soon as this one begins."""
        self._client = client
        self._experiment = experiment
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
        """Another command has carried out a run of this one."""
        if self._invocation is not None:
            runs, skipped = self._invocation.runs - 1, self._invocation.skipped + 1
            self._invocation = replace(self._invocation, runs=runs, skipped=skipped)
        self._tell()

    def finished(self) -> None:
        """A run has."""
        self._finished += 1
        self._tell()

    def failed(self, why: str) -> None:
        """A run has; ``why`` is a line."""
        self._failures.append(why)
        self._tell()

    def interrupt(self) -> None:
        """Nothing further will be carried out."""
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
        set_tags(self._client, run.info.run_id, {NOTE: note})
        end_run(self._client, run.info.run_id, "KILLED")

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
        if invocation.suite_text:
            self._client.log_text(self._id, invocation.suite_text, SUITE)

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
        log_metrics(self._client, self._id, metrics_at(counts, self._finished + len(self._failures)))
        self._told = time.monotonic()

    def _end(self, status: str) -> None:
        if self._invocation is not None:
            note = self._invocation.note(self._suite, self._finished, self._failures, status)
            set_tags(self._client, self._id, {NOTE: note})
        end_run(self._client, self._id, status)
        if self._claims is not None:
            self._claims.release(self._claim)
        self._id, self._invocation = "", None
