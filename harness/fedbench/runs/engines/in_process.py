"""Runs in this process, one after another: for debuggers.

Nothing is isolated: what a run changes or leaves behind meets the runs after it, and this process.
"""

from __future__ import annotations

import queue
import threading

from fedbench.core.errors import FedbenchError
from fedbench.core.spec import RunSpec
from fedbench.runs.engines.attempt import attempt
from fedbench.runs.engines.events import Event, Lost, RunFailed, RunFinished
from fedbench.runs.loaded import NOTHING
from fedbench.runs.prepare import Settings

RUN_THREAD = "fedbench-run"
"""Name of the thread that runs a spec."""


class InProcess:
    """One run at a time, in a thread, so that its events are seen while it goes on."""

    is_one_machine = True

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._events: queue.Queue[Event] = queue.Queue()
        self._thread: threading.Thread | None = None

    def slots(self) -> int:
        """One."""
        return 1

    def begin(self, spec: RunSpec) -> None:
        """Begin a run in a thread of its own."""
        arguments = (spec, self._settings, NOTHING, self._events.put)
        self._thread = threading.Thread(target=attempt, args=arguments, name=RUN_THREAD, daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> list[Event | Lost]:
        """The next event."""
        try:
            event = self._events.get(timeout=seconds)
        except queue.Empty:
            return []
        if isinstance(event, RunFinished | RunFailed) and self._thread is not None:
            self._thread.join()
        return [event]

    def has_begun(self, spec: RunSpec) -> bool:
        """At once."""
        return True

    def stop(self, spec: RunSpec) -> None:
        """Raises FedbenchError: a thread can't be ended from outside."""
        raise FedbenchError("a run in this process can't be stopped; use --engine processes with --run-timeout.")

    def close(self) -> None:
        """Nothing to give back; a run under way goes on until the process ends."""
