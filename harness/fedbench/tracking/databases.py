"""Addresses of stores and databases: which are files, and how they are shown, without passwords and tokens."""

from __future__ import annotations

import logging
import re
import sqlite3
import warnings
from collections.abc import Sequence
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from fedbench.core.errors import FedbenchError
from fedbench.core.files import regular

if TYPE_CHECKING:
    from sqlalchemy import URL


def shown(uri: str) -> str:
    """``uri`` without a password."""
    parsed = _parsed(uri)
    return masked(re.sub("//.*@", "//***@", uri) if parsed is None else parsed.render_as_string(hide_password=True))


def sqlite_file(url: str) -> Path | None:
    """The file of a SQLite database; None for a database of another kind."""
    parsed = _parsed(url)
    is_file = parsed is not None and parsed.get_backend_name() == "sqlite" and parsed.database
    return Path(str(parsed.database)) if parsed is not None and is_file else None


def checked_uri(uri: str, option: str) -> str:
    """``uri``, whose secrets are masked from now on; FedbenchError for a SQLite database in memory.

    No other process could read that. Options of a SQLite database would be part of its file's name.
    """
    if "://" in uri:
        keep_secret(uri)
    parsed = _parsed(uri)
    if parsed is None or parsed.get_backend_name() != "sqlite":
        return uri
    if not parsed.database or ":memory:" in parsed.database or "memory" in parsed.query.get("mode", ""):
        raise FedbenchError(
            f"{option} {uri!r} is a database in memory, which no other process could read; give a file, for instance "
            "sqlite:////home/me/runs.db, or a folder."
        )
    if "?" in uri:
        raise FedbenchError(f"{option} {uri!r}: a SQLite database takes no options here; leave ? and the rest out.")
    return uri


def check_server(uri: str) -> None:
    """FedbenchError where ``uri`` is a web address and no server answers there; MLflow would say so after minutes."""
    if not uri.startswith(("http://", "https://")):
        return
    import requests

    try:
        requests.get(uri, timeout=_ANSWER_SECONDS, stream=True, allow_redirects=False).close()
    except requests.exceptions.SSLError:
        return  # it is there; what is wrong with its certificate MLflow says at once
    except (OSError, ValueError) as error:
        raise FedbenchError(
            f"no server answers at the store {shown(uri)!r} within {_ANSWER_SECONDS} s; start it, or choose another "
            "with --store."
        ) from error


def _parsed(uri: str) -> URL | None:
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        return make_url(uri)
    except (ArgumentError, ValueError):
        return None


WAIT = 60
"""Seconds for others to finish writing."""
_ANSWER_SECONDS = 4
"""A server may take so long to answer."""


def check_database(file: Path, what: str, tables: Sequence[str], remedy: str) -> None:
    """FedbenchError where ``file`` is no whole database; once in this process as long as the file does not change.

    SQLite itself notices damage only where it happens to read, and takes an empty file for a new database. The indexes
    of ``tables``, by which rows are found, are compared with the rows; those of other tables are too large for that.
    ``what`` is what messages call the file, ``remedy`` the option that names another.
    """
    try:
        status = regular(file)
        fault = _fault(file, tuple(tables), (status.st_mtime_ns, status.st_size, status.st_ino))
    except OSError as error:
        raise FedbenchError(
            f"{what} {str(file)!r} cannot be read: {error.strerror}; name another with {remedy}."
        ) from None
    if fault:
        raise FedbenchError(
            f"{what} {str(file)!r} is damaged ({fault}); put a copy of it back, or name another with {remedy}."
        )


@lru_cache(maxsize=8)
def _fault(file: Path, tables: tuple[str, ...], stamp: tuple[int, int, int]) -> str:
    if stamp[1] == 0:
        return "it is empty"
    try:
        with closing(sqlite3.connect(file, timeout=WAIT)) as database:
            for check in ("quick_check(1)", *(f"integrity_check('{table}')" for table in tables)):
                answer = str(database.execute(f"PRAGMA {check}").fetchone()[0])
                if answer != "ok":
                    return answer.splitlines()[-1]
    except (sqlite3.Error, UnicodeDecodeError) as error:
        # of the machine, not of the file: too many open files, no permission, somebody else's lock
        if isinstance(error, sqlite3.OperationalError) and "malformed" not in str(error):
            raise FedbenchError(
                f"the database {str(file)!r} can't be read now ({error}, after up to {WAIT} s); try again when "
                "whoever writes it has ended, and see that it may be read."
            ) from error
        return str(error)
    return ""


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
    options = [match.group(0).partition("=")[2] for match in _SECRET.finditer(f"?{parts.query}")]
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
