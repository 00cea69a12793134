"""What a call shows while it runs: in a terminal or pipe what a command shows, in a notebook a bar."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.text import Text

from fedbench.cli.console import clock, complain
from fedbench.cli.progress import Progress, Running, figures
from fedbench.cli.screen import Terminal
from fedbench.core.spec import RunSpec
from fedbench.core.wording import counted
from fedbench.workflow.screen import Screen

_OFTEN = 0.25
"""Seconds between two changes of a bar."""


def screen_for(progress: bool) -> Screen:
    """What to show here; nothing but warnings and failures without ``progress``."""
    if not progress:
        return Silent()
    return Notebook() if notebook_shell() is not None else Terminal()


def notebook_shell() -> Any | None:
    """The shell of the notebook that this process is the kernel of; None where it is none."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell if hasattr(shell, "kernel") else None


def let_figures_be_seen() -> None:
    """In a notebook, have figures shown that are the value of a cell, as ``%matplotlib inline`` has them."""
    shell = notebook_shell()
    if shell is None:
        return
    from matplotlib.figure import Figure

    try:
        shell.display_formatter.formatters["image/png"].lookup_by_type(Figure)
    except KeyError:
        shell.enable_matplotlib("inline")


class Silent:
    """Warnings and failures alone."""

    def say(self, text: str, *, style: str = "") -> None:
        """Nothing."""

    def complain(self, text: str, *, label: str = "error") -> None:
        """A line on stderr."""
        complain(text, label=label)

    def doing(self, what: str) -> AbstractContextManager[object]:
        """Nothing."""
        return nullcontext()

    def progress(self, suite: str, specs: Sequence[RunSpec]) -> Progress:
        """Nothing."""
        return Progress(Console(quiet=True), suite, specs)


class Notebook(Silent):
    """The cell's output: lines, and a bar that is gone when all runs have ended."""

    def say(self, text: str, *, style: str = "") -> None:
        """A line."""
        print(text)

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """A line that goes when it is done."""
        shown = _CellOutput()
        shown.show(f"<small>{html.escape(what)}</small>")
        try:
            yield
        finally:
            shown.show("")

    def progress(self, suite: str, specs: Sequence[RunSpec]) -> Progress:
        """A bar, and a line for every run on its way."""
        return NotebookProgress(Console(quiet=True), suite, specs)


class NotebookProgress(Progress):
    """The share of the runs that have ended, and those on their way; at the end a line that says how long they took."""

    def __enter__(self) -> Self:
        self._bar = CellBar(self.total, "run")
        self._draw()
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The line in place of the bar."""
        failed = f", {self.failed} failed" if self.failed else ""
        self._bar.close(f"{counted(self.done, 'run')}{failed} in {clock(self.elapsed())}")

    def started(self, run: Running) -> None:
        """A run began."""
        self._draw()

    def advanced(self, run: Running) -> None:
        """A run finished a round."""
        if self._bar.is_due():
            self._draw()

    def settled(self, line: Text) -> None:
        """A run ended."""
        self._draw()

    def _draw(self) -> None:
        under_way = [f"{self.label(run.spec).strip()}  {'  '.join(figures(run))}" for run in self.running.values()]
        self._bar.draw(self.done + self.failed, self.elapsed(), self.remaining(), under_way)


class CellBar:
    """A bar in a cell's output with lines below it, which a line replaces at the end."""

    def __init__(self, total: int, unit: str) -> None:
        self._total, self._unit = total, unit
        self._shown, self._last = _CellOutput(), 0.0

    def is_due(self) -> bool:
        """Whether it was drawn long enough ago to be drawn again."""
        return time.monotonic() - self._last >= _OFTEN

    def draw(self, ended: int, elapsed: float, left: float | None, under_way: Iterable[str]) -> None:
        """How many have ended, seconds so far and to come (None: not known yet), a line for each on its way."""
        self._last = time.monotonic()
        times = clock(elapsed) + ("" if left is None else f", about {clock(left)} left")
        lines = "".join(f"<br><small>{html.escape(line)}</small>" for line in under_way)
        bar = f'<progress value="{ended}" max="{self._total}" style="width: 20em"></progress>'
        self._shown.show(f"{bar} {ended}/{self._total} {self._unit}s <small>{times}</small>{lines}")

    def close(self, line: str) -> None:
        """The line in place of the bar."""
        self._shown.show(f"<small>{html.escape(line)}</small>")


class _CellOutput:
    """A piece of HTML in a cell's output that changes."""

    def __init__(self) -> None:
        # no dependency: whoever runs a notebook has it
        self._library: Any = import_module("IPython.display")
        self._handle = self._library.display(self._library.HTML(""), display_id=True)

    def show(self, text: str) -> None:
        self._handle.update(self._library.HTML(text))
