"""Tuning on a Ray cluster: workers on its nodes take trials, as `fedbench.tuning`'s processes do on one machine."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace

from fedbench.core.errors import FedbenchError
from fedbench.core.wording import counted
from fedbench.runs.engines.ray.cluster import on_any_machine
from fedbench.runs.engines.ray.nodes import RayNodes, Task, last_line
from fedbench.runs.engines.ray.shipping import Shipped
from fedbench.tracking.databases import sqlite_file
from fedbench.tuning.worker import Event, Job, TrialEnded, WorkerFailed, search_with

_LOOK_SECONDS = 1.0
_LOSSES = 5
"""Workers that may be lost, for each that there can be, without any trial having ended in between."""


def check_reach(nodes: RayNodes, url: str, store: str) -> None:
    """Raise FedbenchError where the databases of studies or runs are files, and the workers are on several machines."""
    machines = sorted(nodes.machines() | {nodes.here})
    if len(machines) == 1:
        return
    for option, uri, instead in (
        ("--storage", url, "postgresql://user@host/studies"),
        ("--store", store, "http://host:5000, an MLflow server"),
    ):
        if sqlite_file(uri) is not None or "://" not in uri or uri.startswith("file:"):
            raise FedbenchError(
                f"the Ray cluster has {len(machines)} machines ({', '.join(machines)}), which can't write safely to "
                f"one file; give {option} a database that all of them reach, for instance {instead}."
            )


def tune_on(nodes: RayNodes, cpus: float, job: Job, workers: int) -> Generator[Event, None, None]:
    """The events of up to ``workers`` workers on ``nodes`` until every study has spent its budget.

    A worker that is lost is replaced, and its trial handed on once its signs of life have ceased. Closing the
    generator ends the workers.
    """
    job = replace(job, settings=on_any_machine(job.settings, cpus))
    under_way: set[Task] = set()
    lost, is_ending = 0, False
    try:
        while True:
            while not is_ending and len(under_way) < min(workers, nodes.slots()):
                under_way.add(nodes.begin("tuning", search, nodes.shipped, job))
            if is_ending and not under_way:
                return
            for heard in nodes.wait(_LOOK_SECONDS):
                for event in heard.said:
                    lost = 0 if isinstance(event, TrialEnded) else lost
                    is_ending |= isinstance(event, WorkerFailed)
                    yield event
                if not heard.is_over:
                    continue
                under_way.discard(heard.task)
                if heard.broken:
                    is_ending = True
                    yield WorkerFailed(f"a worker can't work: {last_line(heard.broken)}", heard.broken)
                elif heard.lost:
                    lost += 1
                    if lost > _LOSSES * workers and not is_ending:
                        is_ending = True
                        yield WorkerFailed(f"lost {counted(lost, 'worker')}, the last one since {heard.lost}.")
                else:
                    is_ending = True  # it found nothing left to do
    finally:
        for task in under_way:
            nodes.stop(task)


def search(shipped: Shipped, job: Job, emit: Callable[[Event], None]) -> None:
    """What a worker does: take trials until all budgets are spent."""
    search_with(lambda: replace(job, settings=shipped.unpacked(job.settings)), emit)
