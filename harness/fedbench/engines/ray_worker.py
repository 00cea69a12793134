"""What runs on a Ray worker: one piece of work, and everything it says on its way, in order.

The function is a stream: Ray hands on what it yields while it goes on, and afterwards how it ended. So the end of a
process is never heard before what the process had said.
"""

from __future__ import annotations

import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from fedbench.checkpoint import discard
from fedbench.engines.attempt import attempt
from fedbench.engines.shipping import Shipped
from fedbench.errors import FedbenchError
from fedbench.events import Emit, Event, RunFailed, RunFinished
from fedbench.prepare import Settings
from fedbench.spec import RunSpec

_GROWN = 2**30
"""Bytes by which a piece of work may leave its process larger before it is ended."""
_PATIENCE = 30.0
"""Seconds that a process which has grown waits for its end."""


@dataclass(frozen=True)
class Place:
    """Where a piece of work is."""

    address: str
    node: str
    """Ray's id of the node."""
    process: int


@dataclass(frozen=True)
class Message:
    """A part of the stream."""

    place: Place | None = None
    """Said first."""
    said: tuple[Any, ...] = ()
    has_grown: bool = False
    """The process holds much more memory than before, and is to be ended: nothing else follows."""


def stream(body: Callable[..., None], *arguments: Any) -> Iterator[bytes]:
    """Carry out ``body(*arguments, emit)`` in a thread; pickled messages with all that it emits."""
    import ray

    ours = psutil.Process()
    before = ours.memory_info().rss
    util: Any = ray.util
    place = Place(util.get_node_ip_address(), ray.get_runtime_context().get_node_id(), ours.pid)
    yield pickle.dumps(Message(place))
    emitted: queue.SimpleQueue[Any] = queue.SimpleQueue()
    end, raised = object(), []

    def carry_out() -> None:
        try:
            body(*arguments, emitted.put)
        except BaseException as error:  # heard by whoever reads the stream
            raised.append(error)
        emitted.put(end)

    threading.Thread(target=carry_out, name="fedbench-work", daemon=True).start()
    is_over = False
    while not is_over:
        batch = [emitted.get()]
        while not emitted.empty():
            batch.append(emitted.get())
        is_over = batch[-1] is end
        has_grown = is_over and not raised and ours.memory_info().rss - before > _GROWN
        said = tuple(batch[:-1] if is_over else batch)
        if said or has_grown:
            yield pickle.dumps(Message(said=said, has_grown=has_grown))
        if has_grown:
            time.sleep(_PATIENCE)
    if raised:
        raise raised[0]


def run(shipped: Shipped, marker: Path | None, spec: RunSpec, settings: Settings, emit: Emit) -> None:
    """One attempt at a run."""
    try:
        settings = shipped.unpacked(settings)
    except FedbenchError as error:
        emit(RunFailed(spec, str(error)))
        return
    ends: list[Event] = []

    def listen(event: Event) -> None:
        emit(event)
        if isinstance(event, RunFinished):
            ends.append(event)

    attempt(spec, settings, listen)
    if ends:
        tidy(settings, marker, [spec.run_id])


def tidy(settings: Settings, marker: Path | None, run_ids: Sequence[str], _: object = None) -> None:
    """Delete the checkpoints of finished runs from a disk that is this machine's own.

    The file ``marker`` is in their folder where the machine shares it with the one that the command was given on, which
    deletes them itself once the results are stored.
    """
    if settings.checkpoints is not None and marker is not None and not marker.exists():
        for run_id in run_ids:
            discard(settings.checkpoints.folder, run_id)
