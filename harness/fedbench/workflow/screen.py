"""Where it is said what is being done: a terminal, a notebook, nowhere."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from fedbench.core.spec import RunSpec


class Screen(Protocol):
    """What everything that takes long is given to speak through."""

    def say(self, text: str, *, style: str = "") -> None:
        """A line of plain text; ``style`` is one of rich's."""
        ...

    def complain(self, text: str, *, label: str = "error") -> None:
        """``error: text``, where failures and warnings go."""
        ...

    def doing(self, what: str) -> AbstractContextManager[object]:
        """What is being done inside, while nothing else is shown."""
        ...

    def progress(self, suite: str, specs: Sequence[RunSpec]) -> AbstractContextManager[object]:
        """The view of the runs ``specs``, open inside: a listener of their events."""
        ...
