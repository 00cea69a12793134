"""Passwords and tokens in addresses, kept out of everything that is shown, whoever shows it."""

from __future__ import annotations

import logging
import re
import warnings
from typing import Any

_USER = re.compile(r"(://[^/\s:@'\"]*:)[^\s'\"<>]+@")
_OPTION = re.compile(
    r"([?&;][^=&;\s'\"]*(?:pass|pwd|token|secret|key|sig|auth|credential)[^=&;\s'\"]*=)[^&;\s'\"<>)]*", re.IGNORECASE
)


def masked(text: str) -> str:
    """``text`` with ``***`` for the passwords and secret options of the addresses in it."""
    return _OPTION.sub(r"\1***", _USER.sub(r"\1***@", text))


def mask_messages() -> None:
    """From now on warnings and log records of all libraries in this process are `masked`; once is enough."""
    make, show = logging.getLogRecordFactory(), warnings.formatwarning
    if isinstance(make, _MaskedRecords):
        return
    logging.setLogRecordFactory(_MaskedRecords(make))
    warnings.formatwarning = lambda *given, **named: masked(show(*given, **named))


class _MaskedRecords:
    """Makes log records whose messages and tracebacks are masked."""

    def __init__(self, make: Any) -> None:
        self._make = make

    def __call__(self, *given: Any, **named: Any) -> logging.LogRecord:
        record: logging.LogRecord = self._make(*given, **named)
        try:
            text = record.getMessage()
        except (TypeError, ValueError, KeyError):  # the library's own mistake, told by the handler
            return record
        if masked(text) != text:
            record.msg, record.args = masked(text), ()
        if record.exc_info and record.exc_text is None:
            record.exc_text = masked(logging.Formatter().formatException(record.exc_info))
        return record
