"""What every system is told and tells: the job and the data's folder in, one JSON line out."""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.bench.workloads import Job


@dataclass
class Report:
    """What a system measured of its own run."""

    version: str
    rounds: list[float] = field(default_factory=list)
    """Wall seconds of local training and aggregation, by round."""
    startup: float | None = None
    """Seconds from the start of the process to the beginning of round 1."""
    accuracy: float | None = None
    """Per cent of the test samples, after the last round."""
    note: str = ""
    """How the system says it trained, where it says so."""

    def begin(self) -> None:
        """Round 1 begins now."""
        self.startup = seconds_alive()

    def write(self, file: Path) -> None:
        """One line of JSON."""
        file.write_text(json.dumps(asdict(self)) + "\n", "utf-8")


def parser() -> argparse.ArgumentParser:
    """The options of every system."""
    options = argparse.ArgumentParser()
    options.add_argument("--job", type=Path, help="the job, as JSON")
    options.add_argument("--data", type=Path, help="the folder of its .npy files")
    options.add_argument("--report", type=Path, required=True, help="file to write the report to")
    return options


def asked() -> tuple[Job, Path, Path]:
    """Job, data and report of the command line."""
    given = parser().parse_args()
    return Job.read(given.job), given.data, given.report


def seconds_alive() -> float | None:
    """Seconds since this process started; None where there is no /proc."""
    try:
        stat = Path("/proc/self/stat").read_text()
    except OSError:
        return None
    start = int(stat[stat.rindex(")") + 2 :].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start
