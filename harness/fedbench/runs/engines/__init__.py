"""Where runs are carried out: in this process, in a pool of processes, on a Ray cluster. Numbers do not depend on it.

An engine only begins runs, says what happens to them and ends those that it has to stop. Which run begins when, what is
tried again and what has taken too long is `fedbench.runs.engines.scheduler`'s to decide, alike for all engines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:  # a command that starts the server of forks imports this package before torch
    from fedbench.core.spec import RunSpec
    from fedbench.runs.engines.events import Event, Lost

EngineName = Literal["in-process", "processes", "ray"]
ENGINES: tuple[EngineName, ...] = ("in-process", "processes", "ray")


class Engine(Protocol):
    """Carries out runs side by side."""

    is_one_machine: bool
    """Whether all runs share the memory of one machine, so that a run that found too little is better tried alone."""

    def slots(self) -> int:
        """How many runs it can carry out at the same time."""
        ...

    def begin(self, spec: RunSpec) -> None:
        """Begin a run. Not to be called while as many are under way as there are `slots`."""
        ...

    def wait(self, seconds: float) -> list[Event | Lost]:
        """What has happened since the last call, in order for each run; waits up to ``seconds`` for something.

        A run ends with `RunFinished`, `RunFailed` or `Lost`, and its slot is free again.
        """
        ...

    def has_begun(self, spec: RunSpec) -> bool:
        """Whether a run that was begun has a process by now, rather than a place in somebody's queue."""
        ...

    def stop(self, spec: RunSpec) -> None:
        """End a run that is under way, at once; there are no further events of it, and its slot is free again."""
        ...

    def close(self) -> None:
        """End whatever is under way, and give back what the engine holds."""
        ...
