"""Addresses of stores and databases: which are files, and how they may be shown."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from functools import lru_cache
from pathlib import Path

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from fedbench.core.errors import FedbenchError
from fedbench.core.files import regular
from fedbench.tracking.masking import keep_secret, masked


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

    No other process could read that.
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
