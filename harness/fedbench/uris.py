"""Addresses of stores and databases, as they may be shown."""

from __future__ import annotations

import re
from pathlib import Path

from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

_SECRET = re.compile("([?&][^=&]*(?:pass|token|secret|key)[^=&]*=)[^&]*", re.IGNORECASE)
"""An option of a URI that nobody is to see."""


def shown(uri: str) -> str:
    """``uri`` without a password."""
    try:
        hidden = make_url(uri).render_as_string(hide_password=True)
    except (ArgumentError, ValueError):
        hidden = re.sub("//.*@", "//***@", uri)
    return _SECRET.sub(r"\1***", hidden)


def sqlite_file(url: str) -> Path | None:
    """The file of a SQLite database; None for a database of another kind."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        return None
    is_file = parsed.get_backend_name() == "sqlite" and parsed.database
    return Path(str(parsed.database)) if is_file else None
