"""The progress of a suite's runs, as plain lines or live in a terminal; a listener like any other plugin."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedbench.cli.console import clock, megabytes
from fedbench.core.method.hooks import hookimpl
from fedbench.core.records import RoundRecord, RunInfo, RunResult
from fedbench.core.spec import RunSpec

_WIDEST = 100
"""Columns of the suite's bar, however wide the terminal is."""


@dataclass
class Running:
    """A run on its way."""

    spec: RunSpec
    last: int
    """Its last round."""
    resumed: int = 0
    """The round of the checkpoint that it goes on from."""
    round: int = 0
    accuracy: float | None = None
    seconds: float = 0.0
    """Of its latest round."""
    bytes_up: int = 0
    bytes_down: int = 0
    began: float = field(default_factory=time.monotonic)


class Progress:
    """What all views share: which runs are on their way, how many are done, and how long the rest may take.

    As a context manager it opens and closes the view.
    """

    def __init__(self, console: Console, suite: str, specs: Sequence[RunSpec]) -> None:
        self.console = console
        self.suite = suite
        self.total = len(specs)
        self.done = 0
        self.failed = 0
        self.running: dict[str, Running] = {}
        self._name_width = max((len(spec.title) for spec in specs), default=0)
        self._rounds = {spec.run_id: max(1, spec.training.rounds) for spec in specs}
        self._rounds_done = 0.0
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the view."""

    @hookimpl
    def run_started(self, spec: RunSpec, info: RunInfo) -> None:
        """A line for the run."""
        last = spec.training.rounds if info.trainable_parameters else 0
        self.running[spec.run_id] = Running(spec, last, info.resumed_round)
        self.started(self.running[spec.run_id])

    @hookimpl
    def round_finished(self, spec: RunSpec, record: RoundRecord) -> None:
        """Round, accuracy, seconds and traffic of the run."""
        run = self.running[spec.run_id]
        run.round, run.seconds = record.round, record.seconds
        run.accuracy = record.metrics.get("global_accuracy", run.accuracy)
        run.bytes_up += record.bytes_up
        run.bytes_down += record.bytes_down
        self.advanced(run)

    @hookimpl
    def run_finished(self, spec: RunSpec, info: RunInfo, result: RunResult) -> None:
        """The final accuracy, the time, and which executor trained; the run's line goes."""
        run = self._ended(spec)
        self.done += 1
        accuracy = percent(result.summary.get("global_accuracy", run.accuracy))
        figures = f"  {self.label(spec)}  {accuracy}  {clock(result.seconds):>6}"
        executor = f"  {result.executor}" if result.executor else ""
        self.settled(Text.assemble(("done  ", "green"), figures, (executor, "dim")))

    @hookimpl
    def run_failed(self, spec: RunSpec, reason: str) -> None:
        """The reason; the run's line goes."""
        self._ended(spec)
        self.failed += 1
        self.settled(Text.assemble(("failed", "bold red"), f"  {self.label(spec)}  {reason}"))

    @hookimpl
    def run_warned(self, spec: RunSpec, warning: str) -> None:
        """The warning."""
        self.settled(Text.assemble(("note  ", "yellow"), f"  {self.label(spec)}  {warning}"))

    @hookimpl
    def run_retried(self, spec: RunSpec, reason: str, attempt: int) -> None:
        """The reason; the run's line goes, until it begins again."""
        self.running.pop(spec.run_id, None)
        self.settled(Text.assemble(("again ", "yellow"), f"  {self.label(spec)}  attempt {attempt}: {reason}"))

    @hookimpl
    def run_skipped(self, spec: RunSpec) -> None:
        """That another process has finished it."""
        self._ended(spec)
        self.done += 1
        self.settled(Text.assemble(("stored", "green"), f"  {self.label(spec)}  by another process meanwhile"))

    def started(self, run: Running) -> None:
        """A run began."""

    def advanced(self, run: Running) -> None:
        """A run finished a round."""

    def settled(self, line: Text) -> None:
        """A run ended; ``line`` says how."""

    def label(self, spec: RunSpec) -> str:
        """Row and seed, as wide for every run of the suite."""
        return f"{spec.title:<{self._name_width}}  seed {spec.seed}"

    def elapsed(self) -> float:
        """Seconds since the view was opened."""
        return time.monotonic() - self._began

    def remaining(self) -> float | None:
        """Seconds the rest may take at the pace so far, in rounds; None before there is a pace."""
        under_way = sum(self._rounds.get(i, 1) * run.round / max(1, run.last) for i, run in self.running.items())
        finished = self._rounds_done + under_way
        return self.elapsed() * (sum(self._rounds.values()) - finished) / finished if finished else None

    def _ended(self, spec: RunSpec) -> Running:
        self._rounds_done += self._rounds.get(spec.run_id, 1)
        return self.running.pop(spec.run_id, None) or Running(spec, spec.training.rounds)


class PlainProgress(Progress):
    """One line when a run starts, one when it ends, and between them at most one line a tenth of its rounds."""

    def started(self, run: Running) -> None:
        """One line."""
        where = f"  goes on from round {run.resumed}" if run.resumed else ""
        self._write(Text(f"start   {self.label(run.spec)}{where}"))

    def advanced(self, run: Running) -> None:
        """A line at every tenth of the rounds, but not at the last: the run's end says that."""
        tenth = max(1, -(-run.last // 10))
        if run.resumed < run.round < run.last and run.round % tenth == 0:
            self._write(Text(f"round   {self.label(run.spec)}  {'  '.join(figures(run))}"))

    def settled(self, line: Text) -> None:
        """One line, with how many are done."""
        self._write(Text.assemble(line, f"  ({self.done + self.failed}/{self.total})"))

    def _write(self, line: Text) -> None:
        self.console.print(line, soft_wrap=True)
        self.console.file.flush()


def figures(run: Running) -> tuple[str, ...]:
    """Round, accuracy, seconds of the round, MB up and down so far, as text."""
    return (
        f"{run.round:>{len(str(run.last))}}/{run.last}",
        percent(run.accuracy),
        f"{run.seconds:.1f} s",
        f"↑{megabytes(run.bytes_up)} ↓{megabytes(run.bytes_down)} MB",
    )


def percent(accuracy: float | None) -> str:
    """``66.1 %``, or a dash."""
    return "     -" if accuracy is None else f"{accuracy:4.1f} %"


class LiveProgress(Progress):
    """Ended runs scroll by above; below them stand the runs on their way and the suite's bar, which go at the end."""

    def __init__(self, console: Console, suite: str, specs: Sequence[RunSpec]) -> None:
        super().__init__(console, suite, specs)
        self._live = Live(self, console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        super().__enter__()
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the view away."""
        self._live.stop()

    def settled(self, line: Text) -> None:
        """A line that stays."""
        self._live.console.print(line, no_wrap=True, overflow="ellipsis")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The runs on their way, then the suite's bar."""
        if self.running:
            yield self._runs()
        left = self.remaining()
        ended = self.done + self.failed
        ahead = f", {clock(left)} left" if left is not None else "" if self.running else ", starting"
        times = f"{clock(self.elapsed())} elapsed{ahead}"
        # short of the edge: the terminal's echo of Ctrl-C would else wrap, and the view could not take itself away
        bar = Table.grid(padding=(0, 2, 0, 0), expand=True)
        bar.width = min(options.max_width - len("^C") - 1, _WIDEST)
        for ratio in (None, 1, None, None):
            bar.add_column(no_wrap=True, ratio=ratio)
        bar.add_row(self.suite, ProgressBar(self.total, ended), f"{ended}/{self.total} runs", times)
        yield bar

    def _runs(self) -> Table:
        lines = Table.grid(padding=(0, 2, 0, 0))
        lines.add_column(no_wrap=True, overflow="ellipsis")
        for _ in range(5):
            lines.add_column(no_wrap=True, justify="right")
        for run in list(self.running.values()):
            lines.add_row(run.spec.title, f"seed {run.spec.seed}", *figures(run), style="cyan")
        return lines
