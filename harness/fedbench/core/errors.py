"""The one error users meet: what was given, what is wrong, what to type next."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable
from pathlib import Path


class FedbenchError(Exception):
    """Bad input or a missing resource. The command line prints it on one line and exits with code 2."""


class MethodFault(FedbenchError):
    """A method answers a hook wrongly, or touches what it must leave alone: a fault of that method and no other."""


class NotHere(FedbenchError):
    """Data or weights that are not on this machine; the text says how to get them."""


class Unworkable(FedbenchError):
    """Hyper-parameter values that a run can't go on with: training diverged, or a context does not fit.

    Tuning counts it as the outcome of a trial; any other error stops tuning.
    """


DIVERGED = "training diverged"
"""Prefix of every reason given by `diverged`, also in stores and on boards."""


def diverged(what: str) -> Unworkable:
    """The error for a loss or weights that are no longer finite; ``what`` says which and what to do."""
    return Unworkable(f"{DIVERGED}: {what}")


MOST_LISTED = 20
"""Errors list at most this many names if there are near ones and a command lists all."""


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


REASON, DETAILS = 2_000, 50_000
"""The most characters reported of a reason, and of a traceback."""


def text_of(error: BaseException) -> str:
    """``str(error)``; where that raises, a sentence that says so."""
    try:
        return _printable(str(error))
    except BaseException as second:  # of a method's own exception, which may do anything
        return f"its text can't be read: __str__ raises {type(second).__name__}"


def reason_of(error: BaseException) -> str:
    """The type of ``error``, its text and its notes, on one line of at most `REASON` characters."""
    notes = "; ".join(_notes(error))
    text = " ".join(f"{type(error).__name__}: {text_of(error)}".split()).strip(": ")
    # the notes say which run it was: a long text is cut before them
    where = shortened(f" ({notes})", REASON // 2) if notes else ""
    return shortened(text, REASON - len(where)) + where


def traceback_of(error: BaseException) -> str:
    """The traceback of ``error`` as Python prints it, of at most `DETAILS` characters."""
    try:
        lines = _printable("".join(traceback.format_exception(error)))
    except BaseException as second:
        where = "".join(traceback.format_tb(error.__traceback__))
        lines = f"{where}{type(error).__name__}, whose text can't be printed: {type(second).__name__}\n"
    return shortened(lines, DETAILS)


def raised_at(error: BaseException) -> str:
    """File, without folders, and line that raised ``error``."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else "no traceback"


def shortened(text: str, most: int) -> str:
    """``text``, or its beginning and end with how much was cut between them, ``most`` characters in all."""
    if len(text) <= most:
        return text
    gap = f" [... cut, {len(text):,} characters in all ...] "
    end = (most - len(gap)) // 3
    return text[: most - len(gap) - end] + gap + text[-end:]


def _notes(error: BaseException) -> list[str]:
    try:
        return [_printable(str(note)) for note in getattr(error, "__notes__", [])]
    except BaseException as second:
        return [f"its notes can't be read: {type(second).__name__}"]


def _printable(text: str) -> str:
    """``text`` in characters that any store takes: neither a half of a surrogate pair nor a zero byte."""
    return "".join([text]).encode(errors="backslashreplace").decode().replace("\0", "\\x00")
