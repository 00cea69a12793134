"""The table that is printed line by line, and written whole."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib.metadata import version

import torch

COLUMNS = ("what", "how", "seconds", "times the first", "peak MB", "found")


@dataclass(frozen=True)
class Line:
    """One row."""

    what: str
    how: str
    seconds: float
    ratio: float | None = None
    """To the first row of the same workload."""
    peak: int | None = None
    """Bytes that torch has allocated on the device at most; None on a CPU."""
    found: str = ""
    has_failed: bool = False


class Table:
    """What has been found so far."""

    def __init__(self, device: str, *, is_dry_run: bool) -> None:
        self._device = device
        self._is_dry_run = is_dry_run
        self._said: list[str] = []
        self.has_failed = False

    def head(self) -> str:
        """Where it is run, and the names of the columns."""
        name = torch.cuda.get_device_name(self._device) if self._device.startswith("cuda") else platform.machine()
        kind = "dry run: these figures say nothing, " if self._is_dry_run else ""
        place = f"{kind}{name}, torch {version('torch')}, Python {platform.python_version()}"
        return f"{place}\n\n| {' | '.join(COLUMNS)} |\n|{'---|' * 2}{'---:|' * 3}---|"

    def add(self, line: Line) -> None:
        """Print a row, and keep it."""
        self.has_failed |= line.has_failed
        numbers = (
            f"{line.seconds:.3g}",
            "" if line.ratio is None else f"{line.ratio:.2f}",
            "" if line.peak is None else f"{line.peak / 1e6:.0f}",
        )
        self.say(f"| {' | '.join((line.what, line.how, *numbers, line.found))} |")

    def say(self, text: str) -> None:
        """Print it, and keep it."""
        print(text, flush=True)
        self._said.append(text)

    def markdown(self) -> str:
        """All of it."""
        return "\n".join(self._said) + "\n"
