"""Tuning on a Ray cluster: workers on its nodes take trials, as `fedbench.tuning`'s processes do on one machine."""

from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fedbench.core.errors import FedbenchError
from fedbench.runs.engines.ray import RayCluster, Shipped, on_any_machine, where
from fedbench.runs.prepare import Settings
from fedbench.tracking.databases import sqlite_file
from fedbench.tuning.trial_process import Notice
from fedbench.tuning.worker import Event, Job, search_with, supervise


class RayNodes:
    """A Ray cluster whose tasks call ``body(*arguments, emit)``, in the way of `LocalWorkers`."""

    def __init__(
        self, address: str, cpus: float, gpus: float, most: int | None, plugin_files: tuple[Path, ...]
    ) -> None:
        """Raises FedbenchError as `RayCluster` does."""
        self._cluster = RayCluster(Settings(Path(), Path(), plugin_files), address, cpus, gpus, most)
        self.shipped, self.here = self._cluster.shipped, self._cluster.here
        self.room, self.slots, self.machines = self._cluster.room, self._cluster.slots, self._cluster.machines
        self.stop, self.close = self._cluster.cancel, self._cluster.close

    def begin(self, name: str, body: Callable[..., None], *arguments: Any) -> Any:
        """Begin a task, which is called ``name`` in Ray's logs."""
        return self._cluster.begin_task(None, name, _stream, body, *arguments)

    def wait(self, seconds: float) -> list[Notice]:
        """What has happened to the tasks under way; waits up to ``seconds`` for something."""
        return [self._notice(stream) for stream in self._cluster.ready(seconds)]

    def _notice(self, stream: Any) -> Notice:
        message, lost, broken = self._cluster.read(stream)
        is_end = "StopIteration" in lost
        events = () if message is None else (message,)
        return Notice(stream, events, bool(lost or broken), "" if is_end else lost, broken)


def _stream(body: Callable[..., None], *arguments: Any) -> Iterator[bytes]:
    """Carry out ``body(*arguments, emit)`` in a thread; pickled, where that is, and then all that it emits."""
    yield pickle.dumps(where())
    emitted: queue.SimpleQueue[Any] = queue.SimpleQueue()
    end, raised = object(), []

    def carry_out() -> None:
        try:
            body(*arguments, emitted.put)
        except BaseException as error:  # raised again for whoever reads the stream
            raised.append(error)
        emitted.put(end)

    threading.Thread(target=carry_out, name="fedbench-work", daemon=True).start()
    while (event := emitted.get()) is not end:
        yield pickle.dumps(event)
    if raised:
        raise raised[0]


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
