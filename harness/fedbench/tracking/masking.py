"""Passwords and tokens in addresses, kept out of everything that is shown, whoever shows it."""

from __future__ import annotations

import logging
import re
import warnings
from typing import Any
from urllib.parse import unquote, urlsplit

_USER = re.compile(r"(://[^/\s:@'\"]*:)[^\s'\"<>]+@")
_USER_OF_SITE = re.compile(r"(https?://)[^/?#\s'\"<>]+@", re.IGNORECASE)
"""A site's user may be a token, whole or beside a password that says nothing; a database's is a name."""
_OPTION = re.compile(
    r"([?&;][^=&;\s'\"]*(?:pass|pwd|token|secret|key|sig|auth|credential)[^=&;\s'\"]*=)[^&;\s'\"<>)]*", re.IGNORECASE
)
_SECRET = re.compile(r"[?&;][^=&;]*(?:pass|pwd|token|secret|key|sig|auth|credential)[^=&;]*=[^&;]*", re.IGNORECASE)

_known: set[str] = set()
"""Passwords and secret options of the addresses that were given, as they may be written."""
_SHORTEST = 4
"""Characters of a secret that is replaced wherever it stands; a shorter one would be part of other words."""
_SHORTEST_TOKEN = 16
"""As `_SHORTEST`, of a site's user, who may have a name."""


def keep_secret(uri: str) -> None:
    """From now on `masked` knows the password and the secret options of this address, whatever characters they have."""
    try:
        parts = urlsplit(uri)
    except ValueError:  # no address; whoever opens it says so
        return
    user, _, password = parts.netloc.rpartition("@")[0].partition(":")
    options = [found.group(0).partition("=")[2] for found in _SECRET.finditer(f"?{parts.query}")]
    secrets = [(secret, _SHORTEST) for secret in (password, *options)]
    secrets += [(user, _SHORTEST_TOKEN)] if parts.scheme in ("http", "https") else []
    forms = ((form, least) for secret, least in secrets for form in (secret, unquote(secret)))
    _known.update(form for form, least in forms if len(form) >= least)


def masked(text: str) -> str:
    """``text`` with ``***`` for the passwords and secret options of the addresses in it, and for users of sites."""
    for secret in sorted(_known, key=len, reverse=True):
        text = text.replace(secret, "***")
    return _OPTION.sub(r"\1***", _USER_OF_SITE.sub(r"\1***@", _USER.sub(r"\1***@", text)))


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
        except (TypeError, ValueError, KeyError):  # the library's own mistake, reported by the handler
            return record
        if masked(text) != text:
            record.msg, record.args = masked(text), ()
        if record.exc_info and record.exc_text is None:
            record.exc_text = masked(logging.Formatter().formatException(record.exc_info))
        return record
