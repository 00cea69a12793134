"""Killing a command at random moments until it has died often enough, and what came of it."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.table import Table

from tests.soak.fedbench_command import Started

_LOOK = 0.004
"""Seconds between two looks for the moment; a file is written in a few times as long."""

Moment = Callable[[Started], bool]
"""Whether it has come."""


@dataclass
class Kill:
    """One SIGKILL."""

    attempt: int
    """Of the commands that began with nothing stored."""
    target: str
    aimed: str
    """At which moment."""
    phase: str
    """Where it landed, told by what was left on the disk."""
    seconds: float
    """That the process had run."""


@dataclass
class Outcome:
    """Of all kills of one kind of command."""

    title: str
    kills: list[Kill] = field(default_factory=list)
    completed: int = 0
    """Commands that came to their end and were compared."""
    starts: int = 0
    resumed: list[str] = field(default_factory=list)
    """Lines by which commands told that they went on with something."""
    differences: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def show(self, console: Console) -> None:
        """A table of the kills by phase and target, then what differs."""
        targets = sorted({kill.target for kill in self.kills})
        table = Table("where the kill landed", *targets, "all", title=f"{self.title}: {len(self.kills)} kills")
        counts = Counter((kill.phase, kill.target) for kill in self.kills)
        for phase, number in Counter(kill.phase for kill in self.kills).most_common():
            table.add_row(phase, *(str(counts[phase, target] or "") for target in targets), str(number))
        console.print(table)
        console.print(
            f"{self.starts} starts, {self.completed} times to the end, {len(self.resumed)} continuations; "
            f"{self.seconds:.0f} s"
        )
        if self.differences:
            console.print(f"[red]{len(self.differences)} differences from the undisturbed one:")
            for difference in self.differences:
                console.print(f"  {difference}", markup=False)
        else:
            console.print("[green]everything that was stored is what the undisturbed one stored")


class Soaked(Protocol):
    """A command that is killed."""

    name: str
    title: str

    def undisturbed(self) -> None:
        """Carry it out once, as what the others are compared with."""

    def fresh(self, attempt: int) -> None:
        """From now on nothing is stored."""

    def start(self) -> Started:
        """Begin it, or go on with it."""

    def moment(self, rng: random.Random) -> tuple[str, Moment]:
        """When to kill it next, and what that is called."""

    def target(self, rng: random.Random) -> str:
        """What to kill; see `Started.kill`."""

    def phase(self, started: Started) -> str:
        """Where a kill has landed."""

    def resumed(self, started: Started) -> list[str]:
        """The lines of its output that tell of going on."""

    def differences(self) -> list[str]:
        """How what is stored differs from what the undisturbed command stored."""


def soak(soaked: Soaked, kills: int, rng: random.Random, console: Console) -> Outcome:
    """Kill ``soaked`` so often; every time it comes to its end, it begins anew."""
    outcome = Outcome(soaked.title)
    began = time.monotonic()
    soaked.undisturbed()
    console.print(f"{soaked.title}: undisturbed in {time.monotonic() - began:.0f} s")
    attempt = 0
    while len(outcome.kills) < kills:
        attempt += 1
        soaked.fresh(attempt)
        _to_its_end(soaked, attempt, kills, rng, outcome, console)
        found = soaked.differences()
        outcome.completed += 1
        outcome.differences += [f"attempt {attempt}: {difference}" for difference in found]
        console.print(f"attempt {attempt} came to its end: {len(found) or 'no'} differences", *found, sep="\n  ")
    return outcome


def _to_its_end(
    soaked: Soaked, attempt: int, kills: int, rng: random.Random, outcome: Outcome, console: Console
) -> None:
    while True:
        outcome.starts += 1
        started, last = soaked.start(), ""
        while True:
            aimed, is_now = soaked.moment(rng) if len(outcome.kills) < kills else ("never", lambda _: False)
            while (code := started.ended()) is None and not is_now(started):
                time.sleep(_LOOK)
            if code is not None:
                break
            seconds = time.monotonic() - started.began
            last = started.kill(soaked.target(rng))
            phase = soaked.phase(started)
            outcome.kills.append(Kill(attempt, last, aimed, phase, round(seconds, 1)))
            told = f"kill {len(outcome.kills)} of {kills} (attempt {attempt}, {aimed}): {last} after {seconds:.1f} s"
            console.print(f"{told}, {phase}", markup=False)
            if last in ("group", "parent"):
                break
        started.close()
        outcome.resumed += soaked.resumed(started)
        if last in ("group", "parent"):
            continue
        if code:
            outcome.differences.append(f"attempt {attempt}: exit code {code}, see {started.output}")
        return


def is_left_by(started: Started, file: Path) -> bool:
    """Whether ``file`` is there and was written by this process, not by one that was killed before."""
    try:
        return time.time() - file.stat().st_mtime <= started.age()
    except FileNotFoundError:
        return False


def at_line(number: int, delay: float, counted: Sequence[str]) -> Moment:
    """``delay`` seconds after the line ``number`` of this process's output that begins with one of ``counted``."""
    seen: list[float] = []

    def is_now(started: Started) -> bool:
        if not seen and sum(line.startswith(tuple(counted)) for line in started.lines) >= number:
            seen.append(time.monotonic())
        return bool(seen) and time.monotonic() - seen[0] >= delay

    return is_now


def at_time(seconds: float) -> Moment:
    """So long after the start of the process."""
    return lambda started: time.monotonic() - started.began >= seconds


def at_file(folder: Path, pattern: str, appearances: int, delay: float = 0.0) -> Moment:
    """When files that match ``pattern`` below ``folder`` appear for the ``appearances``-th time in this process."""
    before = set(folder.glob(pattern))
    seen = 0
    came: list[float] = []

    def is_now(_: Started) -> bool:
        nonlocal before, seen
        now = set(folder.glob(pattern))
        seen += len(now - before)
        before = now
        if seen >= appearances and not came:
            came.append(time.monotonic())
        return bool(came) and time.monotonic() - came[0] >= delay

    return is_now
