"""A Ray cluster: as many runs side by side as fit on its nodes, each in a process of its own with one thread."""

from __future__ import annotations

import time
import uuid
from dataclasses import replace
from pathlib import Path

from fedbench.core.errors import FedbenchError
from fedbench.core.spec import RunSpec
from fedbench.runs.checkpoint import Checkpointing
from fedbench.runs.engines.events import Event, Lost, RunFailed, RunFinished
from fedbench.runs.engines.ray.nodes import RayNodes, Task
from fedbench.runs.engines.ray.worker import run, tidy
from fedbench.runs.engines.worker import Notice, last_line
from fedbench.runs.prepare import Settings

_TIDYING = 20.0
"""Seconds that other machines are given to delete checkpoints of finished runs."""


class RayCluster:
    """Runs on the cluster at ``address`` ("auto", host:port), or on one that is started on this machine.

    Every run takes ``run_cpus`` and ``run_gpus`` of one node; ``workers`` is how many there may be at the same time.
    Workers read data and keep checkpoints under the same paths as this machine. Where these are folders that all
    machines share, a run whose process died goes on from its checkpoint wherever it is tried again; else it may begin
    anew, with the same numbers.
    """

    is_one_machine: bool

    def __init__(
        self, settings: Settings, address: str, run_cpus: float, run_gpus: float, workers: int | None = None
    ) -> None:
        """Raises FedbenchError where Ray is missing, no cluster is found, or no run fits on it."""
        self._gpus = run_gpus
        self._nodes = RayNodes(address, run_cpus, run_gpus, workers, settings.plugin_files)
        self._settings = on_any_machine(settings, run_cpus)
        self._marker = _mark(self._settings.checkpoints)
        self._runs: dict[Task, RunSpec] = {}
        self._left: dict[str, set[str]] = {}
        """By node, the runs that ended there before they were finished."""
        self._finished: set[str] = set()
        self.is_one_machine = len(self._nodes.machines()) == 1

    def slots(self) -> int:
        """How many runs fit on the nodes that are there now."""
        self.is_one_machine = len(self._nodes.machines()) <= 1
        return self._nodes.slots()

    def begin(self, spec: RunSpec) -> None:
        """Begin a run on some node. Raises FedbenchError for one on a GPU where none is set aside for it."""
        check_device(spec, self._gpus)
        given = (self._nodes.shipped, self._marker, spec, self._settings)
        self._runs[self._nodes.begin(f"{spec.method} seed {spec.seed}", run, *given)] = spec

    def wait(self, seconds: float) -> list[Event | Lost]:
        """Events of all runs; `Lost` for each whose process, or node, ended before it did."""
        return [event for notice in self._nodes.wait(seconds) for event in self._events(notice)]

    def has_begun(self, spec: RunSpec) -> bool:
        """Whether a worker has taken the run; on a cluster that others use it may have to wait for one."""
        return any(task.place is not None for task, its in self._runs.items() if its.run_id == spec.run_id)

    def stop(self, spec: RunSpec) -> None:
        """End the process that has the run."""
        for task in [task for task, its in self._runs.items() if its.run_id == spec.run_id]:
            self._nodes.stop(task)
            self._gone(task)

    def close(self) -> None:
        """End all runs; leave the cluster, or end it where it was started here."""
        try:
            self._tidy()
        finally:
            if self._marker is not None:
                self._marker.unlink(missing_ok=True)
            self._nodes.close()

    def _events(self, notice: Notice) -> list[Event | Lost]:
        spec = self._runs.get(notice.task)
        if spec is None:
            return []
        events: list[Event | Lost] = list(notice.events)
        if any(isinstance(event, Lost) for event in notice.events):
            self._gone(notice.task)
        elif any(isinstance(event, RunFinished | RunFailed) for event in notice.events):
            self._finished |= {event.spec.run_id for event in notice.events if isinstance(event, RunFinished)}
            del self._runs[notice.task]
        elif notice.is_over:
            self._gone(notice.task)
            if notice.broken:
                events.append(
                    RunFailed(spec, f"it can't be run on its worker: {last_line(notice.broken)}", notice.broken)
                )
            else:
                events.append(Lost(spec, notice.lost or "its worker ended without a word"))
        return events

    def _gone(self, task: Task) -> None:
        spec = self._runs.pop(task)
        if task.place is not None:
            self._left.setdefault(task.place.node, set()).add(spec.run_id)

    def _tidy(self) -> None:
        """Let nodes delete the checkpoints of runs that were finished on another."""
        if not self._nodes.machines() - {self._nodes.here}:
            return
        for task in list(self._runs):
            self._nodes.stop(task)
        there = {node["NodeID"] for node in self._nodes.alive()}
        given = {node: sorted(runs & self._finished) for node, runs in self._left.items() if node in there}
        tidying = {
            self._nodes.begin_on(node, tidy, self._settings, self._marker, run_ids)
            for node, run_ids in given.items()
            if run_ids
        }
        until = time.monotonic() + _TIDYING
        while tidying and time.monotonic() < until:
            tidying -= {notice.task for notice in self._nodes.wait(0.5) if notice.is_over}


def check_device(spec: RunSpec, gpus: float) -> None:
    """Raise FedbenchError for a run on a GPU that is not among the ``gpus`` set aside for it."""
    kind, _, index = spec.device.partition(":")
    if kind != "cuda":
        return
    if not gpus:
        raise FedbenchError(
            f"{spec.title} is to run on device={spec.device}, but no GPU is set aside for a run, and Ray hides "
            "GPUs from it then; give --run-gpus 1, or a share such as 0.25."
        )
    if index.isdigit() and int(index) >= gpus:
        raise FedbenchError(
            f"device={spec.device} is not among the {gpus:g} GPUs of a run (--run-gpus), which are numbered "
            f"from 0 for each; set device={kind}."
        )


def on_any_machine(settings: Settings, cpus: float) -> Settings:
    """``settings`` that mean the same in every current folder, with as many cores as a piece of work has to itself."""
    kept = settings.checkpoints
    return replace(
        settings,
        data_dir=settings.data_dir.absolute(),
        cache_dir=settings.cache_dir.absolute(),
        plugin_files=(),
        cores=max(int(cpus), 1),
        checkpoints=None if kept is None else replace(kept, folder=kept.folder.absolute()),
    )


def _mark(checkpoints: Checkpointing | None) -> Path | None:
    """A file by which a worker sees that it keeps checkpoints where this machine does; None where none can be made."""
    if checkpoints is None:
        return None
    marker = checkpoints.folder / f"shared-{uuid.uuid4().hex}"
    try:
        checkpoints.folder.mkdir(parents=True, exist_ok=True)
        marker.touch()
    except OSError:  # nothing is deleted on workers then
        return None
    return marker
