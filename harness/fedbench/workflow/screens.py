"""Screens say what is being done: in a terminal or pipe, in a notebook, or nowhere; and how far runs are."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.constrain import Constrain
from rich.live import Live
from rich.padding import Padding
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Column
from rich.text import Text

from fedbench.core.method.hooks import hookimpl
from fedbench.core.records import RoundRecord, RunInfo, RunResult
from fedbench.core.spec import RunSpec
from fedbench.core.wording import counted
from fedbench.workflow.console import cell, clock, complain, console, megabytes, say

_OFTEN = 0.25
"""Seconds between two changes of a notebook's bar."""
_WIDEST = 100
"""Columns of the suite's bar, however wide the terminal is."""


class Screen:
    """What everything that takes long speaks through. This one shows warnings and failures alone."""

    def say(self, text: str, *, style: str = "") -> None:
        """A line of plain text; ``style`` is one of rich's."""

    def complain(self, text: str, *, label: str = "error") -> None:
        """``error: text`` on stderr."""
        complain(text, label=label)

    def doing(self, what: str) -> AbstractContextManager[object]:
        """What is being done inside, while nothing else is shown."""
        return nullcontext()

    def progress(self, suite: str, specs: Sequence[RunSpec]) -> Progress:
        """The view of the runs ``specs``, open inside: a listener of their events."""
        return Progress(suite, specs)


class Terminal(Screen):
    """stdout and stderr, in a terminal or a pipe."""

    def say(self, text: str, *, style: str = "") -> None:
        say(text, style=style)

    def doing(self, what: str) -> AbstractContextManager[object]:
        """A line that goes when it is done; in a pipe one that stays."""
        out = console()
        if out.is_terminal:
            return out.status(cell(what))
        say(what)
        return nullcontext()

    def progress(self, suite: str, specs: Sequence[RunSpec]) -> Progress:
        out = console()
        return (LiveProgress if out.is_terminal else PlainProgress)(suite, specs, out)


class Notebook(Screen):
    """A cell's output: lines, and a bar that is gone when all runs have ended."""

    def say(self, text: str, *, style: str = "") -> None:
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
        return NotebookProgress(suite, specs)


def screen_for(progress: bool) -> Screen:
    """What to show here; nothing but warnings and failures without ``progress``."""
    if not progress:
        return Screen()
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
    """Seconds of its latest round."""
    bytes_up: int = 0
    bytes_down: int = 0

    def figures(self) -> tuple[str, ...]:
        """Round, accuracy, seconds of the round, MB up and down so far, as text."""
        return (
            f"{self.round:>{len(str(self.last))}}/{self.last}",
            percent(self.accuracy),
            f"{self.seconds:.1f} s",
            f"↑{megabytes(self.bytes_up)} ↓{megabytes(self.bytes_down)} MB",
        )


class Progress:
    """The runs on their way, how many have ended, and how long the rest may take. It shows nothing by itself.

    As a context manager it opens and closes the view.
    """

    def __init__(self, suite: str, specs: Sequence[RunSpec]) -> None:
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
        last = spec.training.rounds if info.trainable_parameters else 0
        self._rounds[spec.run_id] = max(1, spec.training.rounds - info.resumed_round)
        self.running[spec.run_id] = Running(spec, last, info.resumed_round)
        self.started(self.running[spec.run_id])

    @hookimpl
    def round_finished(self, spec: RunSpec, record: RoundRecord) -> None:
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
        executor = f"  {result.executor}" if result.executor else ""
        self._say(("done  ", "green"), spec, f"{accuracy}  {clock(result.seconds):>6}", (executor, "dim"))

    @hookimpl
    def run_failed(self, spec: RunSpec, reason: str) -> None:
        self._ended(spec)
        self.failed += 1
        self._say(("failed", "bold red"), spec, reason)

    @hookimpl
    def run_warned(self, spec: RunSpec, warning: str) -> None:
        self._say(("note  ", "yellow"), spec, warning)

    @hookimpl
    def run_retried(self, spec: RunSpec, reason: str, attempt: int) -> None:
        """The reason; the run's line goes, until it begins again."""
        self.running.pop(spec.run_id, None)
        self._say(("again ", "yellow"), spec, f"attempt {attempt}: {reason}")

    @hookimpl
    def run_skipped(self, spec: RunSpec) -> None:
        """That another process has finished it."""
        self._ended(spec)
        self.done += 1
        self._say(("stored", "green"), spec, "by another process meanwhile")

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
        finished = self._rounds_done
        for run_id, run in self.running.items():
            share = max(0, run.round - run.resumed) / max(1, run.last - run.resumed)
            finished += self._rounds.get(run_id, 1) * share
        return self.elapsed() * (sum(self._rounds.values()) - finished) / finished if finished else None

    def _ended(self, spec: RunSpec) -> Running:
        self._rounds_done += self._rounds.get(spec.run_id, 1)
        return self.running.pop(spec.run_id, None) or Running(spec, spec.training.rounds)

    def _say(self, what: tuple[str, str], spec: RunSpec, text: str, *further: tuple[str, str]) -> None:
        self.settled(Text.assemble(what, f"  {self.label(spec)}  {text}", *further))


def percent(accuracy: float | None) -> str:
    """``66.1 %``, or a dash."""
    return "     -" if accuracy is None else f"{accuracy:4.1f} %"


class PlainProgress(Progress):
    """One line when a run starts, one when it ends, and between them at most one line a tenth of its rounds."""

    def __init__(self, suite: str, specs: Sequence[RunSpec], console: Console) -> None:
        super().__init__(suite, specs)
        self._console = console

    def started(self, run: Running) -> None:
        where = f"  goes on from round {run.resumed}" if run.resumed else ""
        self._write(Text(f"start   {self.label(run.spec)}{where}"))

    def advanced(self, run: Running) -> None:
        """A line at every tenth of the rounds, but not at the last: the run's end says that."""
        tenth = max(1, -(-run.last // 10))
        if run.resumed < run.round < run.last and run.round % tenth == 0:
            self._write(Text(f"round   {self.label(run.spec)}  {'  '.join(run.figures())}"))

    def settled(self, line: Text) -> None:
        """One line, with how many are done."""
        self._write(Text.assemble(line, f"  ({self.done + self.failed}/{self.total})"))

    def _write(self, line: Text) -> None:
        self._console.print(line, soft_wrap=True)
        self._console.file.flush()


class LiveProgress(Progress):
    """Ended runs scroll by above; below them stand the runs on their way and the suite's bar, which go at the end."""

    def __init__(self, suite: str, specs: Sequence[RunSpec], console: Console) -> None:
        super().__init__(suite, specs)
        self._runs = Bars(
            _text("{task.description}", "cyan", Column(no_wrap=True, overflow="ellipsis")),
            *(_text(f"{{task.fields[figures][{place}]}}", "cyan", Column(no_wrap=True)) for place in range(5)),
        )
        ended = (_text("{task.completed}/{task.total} runs"), TimeElapsedColumn(), _text("{task.fields[left]}"))
        self._suite = Bars(_text("{task.description}"), BarColumn(None), *ended, expand=True)
        self._suite_task = self._suite.add_task(suite, total=self.total, left="starting")
        self._tasks: dict[str, TaskID] = {}
        # short of the edge: the terminal's echo of Ctrl-C would else wrap, and the view could not take itself away
        self.view = Group(self._runs, Constrain(Padding(self._suite, (0, len("^C") + 1, 0, 0)), _WIDEST))
        self._live = Live(self.view, console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the view away."""
        self._live.stop()

    def started(self, run: Running) -> None:
        self._tasks[run.spec.run_id] = self._runs.add_task(run.spec.title, figures=5 * ("",))
        self.advanced(run)

    def advanced(self, run: Running) -> None:
        self._runs.update(self._tasks[run.spec.run_id], figures=(f"seed {run.spec.seed}", *run.figures()))
        self._draw_suite()

    def settled(self, line: Text) -> None:
        """A line that stays."""
        for run_id in self._tasks.keys() - self.running.keys():
            self._runs.remove_task(self._tasks.pop(run_id))
        self._draw_suite()
        self._live.console.print(line, no_wrap=True, overflow="ellipsis")

    def _draw_suite(self) -> None:
        left = self.remaining()
        ahead = f"{clock(left)} left" if left is not None else "" if self.running else "starting"
        self._suite.update(self._suite_task, completed=self.done + self.failed, left=ahead)


def _text(text: str, style: str = "none", column: Column | None = None) -> TextColumn:
    """A column of plain text, whatever brackets a name has."""
    return TextColumn(text, style, markup=False, table_column=column)


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
        self._draw()

    def advanced(self, run: Running) -> None:
        if self._bar.is_due():
            self._draw()

    def settled(self, line: Text) -> None:
        self._draw()

    def _draw(self) -> None:
        under_way = [f"{self.label(run.spec).strip()}  {'  '.join(run.figures())}" for run in self.running.values()]
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
