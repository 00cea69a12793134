"""What a command costs: wall time, CPU time and peak memory of all its processes together."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PROC = Path("/proc")
INTERVAL = 0.2
"""Seconds between two looks at the memory; more where a look takes long, so that looking costs a tenth of a core."""
GRACE = 10.0
"""Seconds that processes left behind by a finished command get to end before they are ended."""


@dataclass(frozen=True)
class Cost:
    """Of one command. CPU and memory are None where the system has no /proc."""

    code: int
    wall: float
    cpu: float | None
    """User and system seconds of the process tree: the larger of what the kernel adds up for waited-for processes and
    what was last seen of each process, since neither counts all."""
    peak: int | None
    """Bytes: the largest sum of the proportional set sizes (PSS) of all processes of the tree."""
    output: str
    """The last lines of stdout and stderr."""


def measure(command: Sequence[str], *, cwd: Path, env: Mapping[str, str] | None = None) -> Cost:
    """Run ``command`` in ``cwd`` to its end."""
    with tempfile.TemporaryFile() as output:
        started = time.perf_counter()
        process = subprocess.Popen(command, cwd=cwd, env=env, stdout=output, stderr=subprocess.STDOUT)
        watch = Watch(process.pid)
        watcher = threading.Thread(target=watch.run, daemon=True)
        watcher.start()
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            # on Ctrl-C; Ray's processes would stay
            watch.ended.set()
            watch.end_members()
            raise
        wall = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        watch.ended.set()
        watcher.join()
        watch.end_orphans()
        output.seek(max(output.seek(0, os.SEEK_END) - 4_000, 0))
        text = output.read().decode("utf-8", "replace")
    seen = watch.cpu_seconds()
    cpu = None if seen is None else max(usage.ru_utime + usage.ru_stime, seen)
    return Cost(process.returncode, wall, cpu, watch.peak, text)


@dataclass
class Watch:
    """Looks at the tree of ``root`` again and again. A process stays in the tree when its parent ends before it."""

    root: int
    """Its process id, of a child that is not waited for yet."""
    ended: threading.Event = field(default_factory=threading.Event)
    peak: int | None = None
    ticks: dict[tuple[int, int], int] = field(default_factory=dict)
    """CPU ticks last seen, by process id and start time: the kernel uses an id again."""

    def __post_init__(self) -> None:
        stat = read_stat(self.root)
        if stat is not None:
            self.ticks[self.root, stat.start] = stat.ticks

    def run(self) -> None:
        """Until ``ended`` is set."""
        while PROC.is_dir():
            began = time.perf_counter()
            self.look()
            if self.ended.wait(max(INTERVAL, 9 * (time.perf_counter() - began))):
                return

    def look(self) -> None:
        """Once: CPU time of every process of the tree, and the memory of all."""
        members = self.members()
        for pid, stat in members.items():
            self.ticks[pid, stat.start] = stat.ticks
        total = sum(pss(pid) for pid in members)
        self.peak = max(total, self.peak or 0)

    def members(self) -> dict[int, Stat]:
        """The living processes of the tree."""
        found = {int(entry.name): read_stat(int(entry.name)) for entry in PROC.iterdir() if entry.name.isdigit()}
        alive = {pid: stat for pid, stat in found.items() if stat is not None and stat.state != "Z"}
        inside = {pid for pid, start in self.ticks if pid in alive and alive[pid].start == start}
        while grown := {pid for pid, stat in alive.items() if stat.parent in inside} - inside:
            inside |= grown
        return {pid: alive[pid] for pid in inside}

    def cpu_seconds(self) -> float | None:
        """User and system seconds of all processes seen; None where none could be."""
        return sum(self.ticks.values()) / os.sysconf("SC_CLK_TCK") if self.ticks else None

    def end_orphans(self) -> None:
        """Wait for the processes that the command left behind; those that stay are ended."""
        until = time.perf_counter() + GRACE
        while PROC.is_dir() and self.members():
            if time.perf_counter() > until:
                self.end_members()
                return
            time.sleep(0.05)

    def end_members(self) -> None:
        """End all that is left of the tree."""
        for pid in self.members() if PROC.is_dir() else (self.root,):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True)
class Stat:
    """A line of /proc/PID/stat: state, parent, user + system ticks, and the start in ticks after boot."""

    state: str
    parent: int
    ticks: int
    start: int


def read_stat(pid: int) -> Stat | None:
    """None where the process is gone."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    # the name, in brackets, may hold blanks and brackets itself
    fields = text[text.rindex(")") + 2 :].split()
    return Stat(fields[0], int(fields[1]), int(fields[11]) + int(fields[12]), int(fields[19]))


def pss(pid: int) -> int:
    """The proportional set size of a process in bytes; 0 where it is gone or belongs to somebody else."""
    try:
        lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
