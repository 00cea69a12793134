"""The rows of a stage, and the files that they are written to."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from math import inf, isfinite, nan
from pathlib import Path

import torch


@dataclass(frozen=True)
class Place:
    """Where the stages run."""

    device: str
    folder: Path
    """For data, weights, caches and stores."""
    is_tiny: bool = False
    ends: float = inf
    """On the clock of `time.perf_counter`: no row begins after it."""

    @property
    def left(self) -> float:
        """Seconds."""
        return self.ends - time.perf_counter()


@dataclass(frozen=True)
class Line:
    """One row. A figure that a row does not have is None."""

    what: str = ""
    how: str = ""
    seconds: float = nan
    """Of a round, where the row trains; else of all of it."""
    ratio: float | None = None
    """To the first row of the stage with the same ``what``."""
    step: float | None = None
    """Milliseconds of one local step of one client."""
    images: float | None = None
    """Trained on in a second."""
    tflops: float | None = None
    """10^12 operations in a second."""
    share: float | None = None
    """Per cent of what a large matrix product in the same precision reaches in the same command."""
    peak: int | None = None
    """Bytes that torch has allocated on the device at most; None on a CPU."""
    aim: str = ""
    found: str = ""
    has_failed: bool = False
    below: str = ""
    """Markdown that stands below the table."""


@dataclass(frozen=True)
class Aim:
    """What a figure of a row is to reach: at least ``bound`` images a second, at most ``bound`` of all else."""

    figure: str
    bound: float

    def judged(self, line: Line) -> str:
        """The aim and whether the row meets it."""
        value, is_rate = getattr(line, self.figure), self.figure == "images"
        unit = {"seconds": "s", "step": "ms a step", "images": "images/s"}[self.figure]
        aim = f"{'>=' if is_rate else '<='} {self.bound:,g} {unit}"
        if value is None or not isfinite(value):
            return aim
        is_met = value >= self.bound if is_rate else value <= self.bound
        return f"{aim}: {'met' if is_met else 'missed'}"


@dataclass(frozen=True)
class Row:
    """A row that is still to be measured, and how."""

    what: str
    how: str
    measure: Callable[[], Line]
    aim: Aim | None = None


COLUMNS: tuple[tuple[str, Callable[[Line], str]], ...] = (
    ("what", lambda line: line.what),
    ("how", lambda line: line.how),
    ("seconds", lambda line: f"{line.seconds:.3g}" if isfinite(line.seconds) else ""),
    ("times the first", lambda line: _number(line.ratio, ".2f")),
    ("ms a client's step", lambda line: _number(line.step, ".3g")),
    ("images/s", lambda line: _number(line.images, ",.0f")),
    ("TFLOP/s", lambda line: _number(line.tflops, ".3g")),
    ("% of the ceiling", lambda line: _number(line.share, ".3g")),
    ("peak MB", lambda line: _number(None if line.peak is None else line.peak / 1e6, ".0f")),
    ("aim", lambda line: line.aim),
    ("found", lambda line: line.found),
)
TEXTS = ("what", "how", "aim", "found")


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def markdown(lines: Sequence[Line]) -> str:
    """The rows as a table, with the columns that any of them has."""
    shown = [(name, cell) for name, cell in COLUMNS if name == "what" or any(cell(line) for line in lines)]
    head = [f"| {' | '.join(name for name, _ in shown)} |"]
    head.append("|" + "".join("---|" if name in TEXTS else "---:|" for name, _ in shown))
    body = [f"| {' | '.join(cell(line).replace('|', '/') for _, cell in shown)} |" for line in lines]
    below = [f"\n**{line.what}, {line.how}**\n\n{line.below}" for line in lines if line.below]
    return "\n".join([*head, *body, *below])


class Report:
    """Prints what is found, and writes it as it comes: ``rows.jsonl`` row by row, ``gpu.md`` stage by stage."""

    def __init__(self, folder: Path | None, device: str, *, is_dry_run: bool) -> None:
        self._folder = folder
        self.has_failed = False
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            for name in ("gpu.md", "rows.jsonl"):
                (folder / name).write_text("", encoding="utf-8")
        kind = "dry run: these figures say nothing, " if is_dry_run else ""
        name = torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.machine()
        self.say(f"{kind}{name}, torch {version('torch')}, Python {platform.python_version()}")

    def say(self, text: str) -> None:
        """Print it, and write it into the Markdown."""
        print(text, flush=True)
        self._append("gpu.md", f"{text}\n\n")

    def row(self, stage: str, line: Line) -> None:
        """Print a row, and keep it."""
        self.has_failed |= line.has_failed
        cells = [f"{name} {cell(line)}" for name, cell in COLUMNS[2:] if cell(line)]
        print(f"{stage}: {line.what}, {line.how}: {'; '.join(cells)}", flush=True)
        kept = replace(line, seconds=line.seconds if isfinite(line.seconds) else None)  # type: ignore[arg-type]
        if line.below:
            print(line.below, flush=True)
        self._append("rows.jsonl", json.dumps({"stage": stage, **asdict(kept)}) + "\n")

    def stage(self, name: str, lines: Sequence[Line], seconds: float) -> None:
        """Write the table of a stage that is done."""
        self._append("gpu.md", f"## {name}\n\n{markdown(lines)}\n\n{seconds:.0f} s in all.\n\n")

    def _append(self, file: str, text: str) -> None:
        if self._folder is not None:
            with (self._folder / file).open("a", encoding="utf-8") as out:
                out.write(text)
