"""What runs on a Ray worker: one piece of work, and everything it says on its way, in order.

A run has a process of its own here as well (`fedbench.runs.engines.processes`). The worker itself can't be forked,
since Ray has threads in it, and a new worker for each run would import everything anew, which takes seconds. So each
worker has one process of its own that runs are forked from, and that ends with it.

The function is a stream: Ray hands on what it yields while it goes on, and afterwards how it ended. So the end of a
process is never reported before what the process has emitted.
"""

from __future__ import annotations

import os
import pickle
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbench.core.errors import FedbenchError
from fedbench.core.spec import RunSpec
from fedbench.runs.checkpoint import discard
from fedbench.runs.engines.engine import Processes
from fedbench.runs.engines.events import Event, Lost, RunFailed, RunFinished
from fedbench.runs.engines.ray.shipping import Shipped
from fedbench.runs.prepare import Settings

_LOOK_SECONDS = 60.0
"""Between two looks at a run that emits nothing."""


@dataclass(frozen=True)
class PlaceOfWork:
    """Where a piece of work is."""

    address: str
    node: str
    """Ray's id of the node."""
    process: int


@dataclass(frozen=True)
class Message:
    """A part of the stream."""

    place: PlaceOfWork | None = None
    """Said first."""
    events: tuple[Any, ...] = ()


def stream(body: Callable[..., None], *arguments: Any) -> Iterator[bytes]:
    """Carry out ``body(*arguments, emit)`` in a thread; pickled messages with all that it emits."""
    import ray

    util: Any = ray.util
    place = PlaceOfWork(util.get_node_ip_address(), ray.get_runtime_context().get_node_id(), os.getpid())
    yield pickle.dumps(Message(place))
    emitted: queue.SimpleQueue[Any] = queue.SimpleQueue()
    end, raised = object(), []

    def carry_out() -> None:
        try:
            body(*arguments, emitted.put)
        except BaseException as error:  # raised again for whoever reads the stream
            raised.append(error)
        emitted.put(end)

    threading.Thread(target=carry_out, name="fedbench-work", daemon=True).start()
    is_over = False
    while not is_over:
        batch = [emitted.get()]
        while not emitted.empty():
            batch.append(emitted.get())
        is_over = batch[-1] is end
        events = tuple(batch[:-1] if is_over else batch)
        if events:
            yield pickle.dumps(Message(events=events))
    if raised:
        raise raised[0]


def run(
    shipped: Shipped, marker: Path | None, spec: RunSpec, settings: Settings, emit: Callable[[Event | Lost], None]
) -> None:
    """One attempt at a run, in a process of its own."""
    try:
        settings = shipped.unpacked(settings)
    except FedbenchError as error:
        emit(RunFailed(spec, str(error)))
        return
    engine = _processes(settings)
    engine.begin(spec)
    while True:
        for event in engine.wait(_LOOK_SECONDS):
            emit(event)
            if isinstance(event, RunFinished):
                tidy(settings, marker, [spec.run_id])
            if isinstance(event, RunFinished | RunFailed | Lost):
                return


_forked_from: list[tuple[Settings, Processes]] = []


def _processes(settings: Settings) -> Processes:
    """What this worker forks its runs from: the same for all runs of a command, which have the same settings."""
    if not _forked_from or _forked_from[0][0] != settings:
        for _, others in _forked_from:
            others.close()
        _forked_from[:] = [(settings, Processes(settings, 1))]
    return _forked_from[0][1]


def tidy(settings: Settings, marker: Path | None, run_ids: Sequence[str], _: object = None) -> None:
    """Delete the checkpoints of finished runs from a disk that is this machine's own.

    The file ``marker`` is in their folder where the machine shares it with the one that the command was given on, which
    deletes them itself once the results are stored.
    """
    if settings.checkpoints is not None and marker is not None and not marker.exists():
        for run_id in run_ids:
            discard(settings.checkpoints.folder, run_id)
