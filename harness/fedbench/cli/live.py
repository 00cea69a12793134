"""The live view of a suite's runs in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedbench.cli.console import clock
from fedbench.cli.progress import Progress, figures
from fedbench.core.spec import RunSpec

_WIDEST = 100
"""Columns of the suite's bar, however wide the terminal is."""


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
