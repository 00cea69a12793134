"""Carrying out studies: their trials as they end, and what they found."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from functools import partial

from fedbench.runs.engines.engine import default_workers
from fedbench.runs.prepare import Settings
from fedbench.tuning.found import Found, found
from fedbench.tuning.nested import open_further
from fedbench.tuning.space import defaults_of
from fedbench.tuning.storage import open_storage
from fedbench.tuning.studies import open_study
from fedbench.tuning.tracking import TrialTracking
from fedbench.tuning.worker import Event, Job, Told, WorkerFailed, tune
from fedbench.workflow.selection import Place
from fedbench.workflow.studies import Planned

Start = Callable[[Job, int], Generator[Event, None, None]]


@dataclass(frozen=True)
class Searched:
    """What became of studies."""

    results: tuple[Found, ...]
    failures: tuple[WorkerFailed, ...]


def search(planned: Planned, settings: Settings, place: Place, on_event: Callable[[Told], None]) -> Searched | None:
    """Open or resume the studies and run their trials; None where Ctrl-C stopped it, which leaves what is finished."""
    url, uri = planned.databases
    if place.engine != "ray":
        return _search(planned, settings, place.workers or default_workers(), tune, on_event)
    from fedbench.runs.engines.ray import check_device
    from fedbench.tuning.on_ray import RayNodes, check_reach, tune_on

    for row, _ in planned.records:
        check_device(row.spec, place.run_gpus)
    cluster = RayNodes(place.ray_address, place.run_cpus, place.run_gpus, place.workers, settings.plugin_files)
    with closing(cluster) as nodes:
        check_reach(nodes, url, uri)
        return _search(planned, settings, nodes.room(), partial(tune_on, nodes, place.run_cpus), on_event)


def _search(
    planned: Planned,
    settings: Settings,
    workers: int,
    start: Start,
    on_event: Callable[[Told], None],
) -> Searched | None:
    (url, uri), records = planned.databases, planned.records
    storage = open_storage(url, create=True)
    studies = [open_study(storage, record, defaults_of(row.spec, row.space)) for row, record in records]
    for _, record in records:
        open_further(storage, record)
    suite = records[0][1].suite
    tracking = TrialTracking(uri, suite)
    job = Job(url, tuple(row for row, _ in records), settings, suite, uri)
    failures = []
    try:
        with closing(start(job, min(workers, sum(record.budget.trials for _, record in records)))) as events:
            for event in events:
                if isinstance(event, WorkerFailed):
                    failures.append(event)
                else:
                    on_event(event)
    except KeyboardInterrupt:
        return None
    results = tuple(result for result in map(found, studies) if result is not None)
    for study in studies:
        tracking.finished(study)
    if len(results) < len(studies):
        failures.append(WorkerFailed(f"{len(studies) - len(results)} of the rows have no finished trial."))
    return Searched(results, tuple(failures))
