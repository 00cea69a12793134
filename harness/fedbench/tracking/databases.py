"""Addresses of stores and databases: which are files, and how they may be shown."""

from __future__ import annotations

import re
from pathlib import Path

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from fedbench.core.errors import FedbenchError
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


def _parsed(uri: str) -> URL | None:
    try:
        return make_url(uri)
    except (ArgumentError, ValueError):
        return None
