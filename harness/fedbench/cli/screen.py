"""The terminal, or pipe, that a command speaks through."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from fedbench.cli.console import cell, complain, console, say
from fedbench.cli.progress import LiveProgress, PlainProgress, Progress
from fedbench.core.spec import RunSpec


class Terminal:
    """stdout and stderr; ``plain`` shows progress as lines in a terminal as well."""

    def __init__(self, *, plain: bool = False) -> None:
        self._plain = plain

    def say(self, text: str, *, style: str = "") -> None:
        """A line on stdout."""
        say(text, style=style)

    def complain(self, text: str, *, label: str = "error") -> None:
        """A line on stderr."""
        complain(text, label=label)

    def doing(self, what: str) -> AbstractContextManager[object]:
        """A line that goes when it is done; in a pipe one that stays."""
        out = console()
        if out.is_terminal:
            return out.status(cell(what))
        say(what)
        return nullcontext()

    def progress(self, suite: str, specs: Sequence[RunSpec]) -> Progress:
        """Lines on stdout, live in a terminal."""
        out = console()
        return (LiveProgress if out.is_terminal and not self._plain else PlainProgress)(out, suite, specs)
