"""``breakpoint()`` where no terminal can be reached: an error that says how to debug, in place of a debugger's own."""

from __future__ import annotations

import sys

from fedbench.core.errors import FedbenchError


def refuse_breakpoints() -> None:
    """To be called in a process of its own: from here on ``breakpoint()`` raises FedbenchError."""
    sys.breakpointhook = _refuse


def _refuse(*_: object, **__: object) -> None:
    raise FedbenchError(
        "breakpoint() is in a process of its own here, which no terminal reaches; run with --engine in-process, and "
        "with --executor sequential to stop at one client after another."
    )
