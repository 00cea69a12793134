"""What every command writes with: consoles that behave in terminals and in pipes, plain tables, one-line errors."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from fedbench.tracking.databases import masked

_PIPE_WIDTH = 200
_COMMANDS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]",
)
"""What a terminal obeys instead of showing it, and what turns the direction of writing; not tab and line feed.

Half a surrogate pair besides, which is no character and can't be written."""


class _Shown(Console):
    """A console on which a name can only be read, whatever characters it has."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As rich, which passes on escape sequences in texts."""
        for segment in super().render(renderable, options):
            if segment.control or not _COMMANDS.search(segment.text):
                yield segment
            else:
                yield Segment(_readable(segment.text), segment.style)


class OutputLost(Exception):
    """Nobody can read what is written: stdout is closed or full."""

    is_resumable = False
    """Whether the command has stored what it did so far, and goes on from there when it is given again."""


class _Output(io.TextIOWrapper):
    """stdout or stderr that takes every character; what cannot be written is `OutputLost`, or left out on stderr."""

    def __init__(self, stream: TextIO, *, is_lost: bool) -> None:
        self._is_lost = is_lost
        self._below = stream  # which closes what it writes to where nobody holds it
        line_buffering = stream.isatty() or not is_lost
        super().__init__(stream.buffer, stream.encoding, errors="replace", line_buffering=line_buffering)

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            return self._lose(error)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> int:
        if self._is_lost:
            raise OutputLost(f"stdout can't be written: {error.strerror}.") from error
        return 0


def guard_output() -> None:
    """Make this process's stdout and stderr write what they can. Raises OutputLost where stdout is closed."""
    # what is opened next would take the place of a closed stream, and be written to
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
    missing = sys.stdout is None
    sys.stdin = sys.stdin or os.fdopen(0)
    sys.stderr = _Output(sys.stderr or os.fdopen(2, "w"), is_lost=False)
    if missing:
        raise OutputLost("stdout is closed; redirect it, for instance with > log.txt.")
    sys.stdout = _Output(sys.stdout, is_lost=True)


@contextmanager
def resumable() -> Iterator[None]:
    """An `OutputLost` in the block is one of a command that can be resumed."""
    try:
        yield
    except OutputLost as error:
        error.is_resumable = True
        raise


def _readable(text: str) -> str:
    return _COMMANDS.sub("\ufffd", text)


def console(*, stderr: bool = False) -> Console:
    """A console on stdout or stderr. In a pipe it is wide, so that no table is cut to a terminal nobody has."""
    stream = sys.stderr if stderr else sys.stdout
    return _Shown(file=stream, highlight=False, width=None if stream.isatty() else _PIPE_WIDTH)


def say(text: str, *, style: str = "") -> None:
    """A line of plain text: brackets stay as they are, and a pipe gets it unwrapped."""
    out = console()
    out.print(Text(text, style=style), soft_wrap=not out.is_terminal)


def complain(text: str, *, label: str = "error") -> None:
    """``error: text`` on stderr, wrapped at words in a terminal and on one line in a pipe."""
    out = console(stderr=True)
    out.print(Text.assemble((f"{label}: ", "bold red"), masked(" ".join(text.split()))), soft_wrap=not out.is_terminal)


def table(*headings: str, right: tuple[str, ...] = (), whole: tuple[str, ...] = ()) -> Table:
    """An empty table with these headings: ``right`` are right-aligned numbers, ``whole`` never wrapped."""
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True, header_style="bold")
    for heading in headings:
        number = heading in right
        made.add_column(
            heading,
            justify="right" if number else "left",
            no_wrap=number or heading in whole,
            overflow="fold",
        )
    return made


def show_table(
    rows: Iterable[Iterable[object]], *headings: str, right: tuple[str, ...] = (), whole: tuple[str, ...] = ()
) -> None:
    """Print a `table`, a line for each of ``rows``."""
    made = table(*headings, right=right, whole=whole)
    for row in rows:
        made.add_row(*map(cell, row))
    console().print(made)


def cell(value: object) -> Text:
    """``value`` as a table cell; rich would read brackets in a plain string as markup."""
    # before it is measured: a replacement is wider than what it replaces
    return Text("" if value is None else _readable(str(value)))


def megabytes(count: float) -> str:
    """Bytes in MB (10^6), with as many digits as a reader needs."""
    size = count / 1e6
    digits = 0 if size >= 100 or size == 0 else 1 if size >= 10 else 2 if size >= 0.1 else 3
    return f"{size:,.{digits}f}"


def gigabytes(count: float) -> str:
    """Bytes in GB (10^9) with their unit, two significant digits or more; below 0.1 GB in MB."""
    size = count / 1e9
    if size < 0.1:
        return f"{count / 1e6:.{1 if count < 1e7 else 0}f} MB"
    return f"{size:,.{0 if size >= 100 else 1 if size >= 10 else 2}f} GB"


def clock(seconds: float) -> str:
    """``m:ss``, or ``h:mm:ss`` from an hour on."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
