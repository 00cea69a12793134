"""The one error users meet: what was given, what is wrong, what to type next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FedbenchError(Exception):
    """Bad input or a missing resource. The command line prints it on one line and exits with code 2."""


class MethodFault(FedbenchError):
    """A method answers a hook wrongly, or touches what it must leave alone: a fault of that method and no other."""


class NotHere(FedbenchError):
    """Data or weights that are not on this machine; the text says how to get them."""


class Unworkable(FedbenchError):
    """Values of hyper-parameters with which a run cannot go on: training diverged, a context does not fit.

    For tuning it is the outcome of a trial; any other error is nobody's hyper-parameter and stops it.
    """


DIVERGED = "training diverged"
"""With it the reasons of `diverged` begin, in stores and on boards too."""


def diverged(what: str) -> Unworkable:
    """The error for a loss or weights that are no longer finite; ``what`` says which and what to do."""
    return Unworkable(f"{DIVERGED}: {what}")


MOST_LISTED = 20
"""Names that an error lists although a command does, and there are near ones."""


def unknown_name(
    kind: str, given: str, known: Iterable[str], hint: str = "", *, hint_lists: bool = False
) -> FedbenchError:
    """The error for a name nobody registered: the nearest valid names first, then all of them.

    ``kind`` is what was looked up ("method"), ``hint`` what else to type; where that lists the valid names, many are
    not listed here beside near ones.
    """
    names = sorted(known)
    close = difflib.get_close_matches(given, names, n=3, cutoff=0.5)
    nearest = f"; did you mean {' or '.join(repr(n) for n in close)}?" if close else "."
    listed = f" Known: {', '.join(names)}." if names else f" No {kind} is registered."
    if close and hint_lists and len(names) > MOST_LISTED:
        listed = ""
    return FedbenchError(f"unknown {kind} {given!r}{nearest}{listed}{' ' + hint if hint else ''}")
