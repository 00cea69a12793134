"""Tuning on a Ray cluster: workers on its nodes take trials, as `fedbench.tuning`'s processes do on one machine."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial

from fedbench.core.errors import FedbenchError
from fedbench.runs.engines.ray import RayNodes, Shipped, on_any_machine
from fedbench.tracking.databases import sqlite_file
from fedbench.tuning.worker import Event, Job, search_with, supervise


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
    """The events of up to ``workers`` workers on ``nodes``; see `supervise`."""
    job = replace(job, settings=on_any_machine(job.settings, cpus))
    return supervise(nodes, partial(nodes.begin, "tuning", search, nodes.shipped, job), workers)


def search(shipped: Shipped, job: Job, emit: Callable[[Event], None]) -> None:
    """What a worker does: take trials until all budgets are spent."""
    search_with(lambda: replace(job, settings=shipped.unpacked(job.settings)), emit)
