"""Importing what others wrote: whatever their module raises is an error that names it, and only Ctrl-C stops us."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from fedbench.core.errors import FedbenchError
from fedbench.kinds.failure_text import reason_of, shortened


@contextmanager
def importing(what: str, remedy: str) -> Iterator[None]:
    """Raise FedbenchError, which names ``what`` and the ``remedy``, for anything that the block raises.

    A module may raise SystemExit (a script without a main guard) or KeyboardInterrupt as well. A KeyboardInterrupt that
    follows the signal is somebody's Ctrl-C, and passes.
    """
    pressed = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        if callable(before):
            before(number, frame)

    before = signal.getsignal(signal.SIGINT)
    # handlers can be set in the main thread alone, and only there is Ctrl-C raised
    listens = callable(before) and threading.current_thread() is threading.main_thread()
    if listens:
        signal.signal(signal.SIGINT, note)
    try:
        yield
    except BaseException as error:
        if pressed and isinstance(error, KeyboardInterrupt):
            raise
        raise FedbenchError(f"{what} cannot be imported: {shortened(reason_of(error), _LONGEST)}; {remedy}.") from error
    finally:
        if listens:
            signal.signal(signal.SIGINT, before)


_LONGEST = 500
