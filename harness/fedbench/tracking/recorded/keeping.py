"""Which runs a store has, and dropping some of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedbench.core.errors import FedbenchError
from fedbench.tracking.recorded.lookup import reading_client
from fedbench.tracking.schema import FINAL, INVOCATION, KIND
from fedbench.tracking.store import filed
from fedbench.tracking.tags import RunTags

# isort: split
from mlflow import MlflowClient
from mlflow.entities import Run

PARENT = "mlflow.parentRunId"
STATUSES = ("finished", "failed", "running", "killed", "scheduled")


@dataclass(frozen=True)
class Which:
    """Which runs are meant; empty fields mean all."""

    suite: str | None = None
    method: str = ""
    status: str = ""
    ids: tuple[str, ...] = ()
    """Beginnings of ids, fedbench's or MLflow's."""


@dataclass(frozen=True)
class KeptRun:
    """A run of the store."""

    suite: str
    run: Run

    @property
    def tags(self) -> RunTags:
        """What was recorded with it."""
        return RunTags(self.run.data.tags)

    @property
    def run_id(self) -> str:
        """fedbench's id, else MLflow's."""
        return self.tags.run_id or str(self.run.info.run_id)

    @property
    def accuracy(self) -> float:
        """The final accuracy of the global model in %; NaN where there is none."""
        return float(self.run.data.metrics.get(f"{FINAL}global_accuracy", float("nan")))


def kept_runs(uri: str, which: Which) -> list[KeptRun]:
    """The runs that ``which`` means, oldest first. FedbenchError for an id that no run has, or that several share."""
    return _chosen(reading_client(uri), which)


def drop_runs(uri: str, runs: Sequence[KeptRun]) -> int:
    """Delete ``runs``, and the commands that then have none; how many of these. MLflow has them until ``mlflow gc``."""
    client = reading_client(uri)
    parents = {run.run.data.tags.get(PARENT, "") for run in runs} - {""}
    dropped = {run.run.info.run_id for run in runs}
    for run in runs:
        client.delete_run(run.run.info.run_id)
    left = {run.data.tags.get(PARENT, "") for _, run in filed(client, None) if run.info.run_id not in dropped | parents}
    empty = [parent for parent in sorted(parents) if parent not in left]
    for parent in empty:
        client.delete_run(parent)
    return len(empty)


def _chosen(client: MlflowClient, which: Which) -> list[KeptRun]:
    every = [
        KeptRun(suite, run)
        for suite, run in filed(client, which.suite)
        if run.data.tags.get(KIND) != INVOCATION and "seed" in run.data.params
    ]
    for beginning in which.ids:
        _require_one(beginning, every)
    chosen = [
        one
        for one in every
        if (not which.ids or any(_begins(one, beginning) for beginning in which.ids))
        and which.method in ("", one.run.data.params["method"])
        and which.status in ("", one.run.info.status.lower())
    ]
    return sorted(chosen, key=lambda one: int(one.run.info.start_time))


def _begins(one: KeptRun, beginning: str) -> bool:
    wanted = beginning.strip().lower()
    return bool(wanted) and (one.run_id.startswith(wanted) or one.run.info.run_id.startswith(wanted))


def _require_one(beginning: str, runs: Sequence[KeptRun]) -> None:
    """One description's recordings may be several; several descriptions may not share a beginning."""
    meant = {one.run_id for one in runs if _begins(one, beginning)}
    if not meant:
        raise FedbenchError(f"no run's id begins with {beginning!r}; `fedbench runs list` shows them.")
    if len(meant) > 1:
        raise FedbenchError(
            f"{beginning!r} is the beginning of {len(meant)} runs' ids ({', '.join(sorted(meant)[:4])}); give more "
            "digits."
        )
