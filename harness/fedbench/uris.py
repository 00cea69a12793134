"""Addresses of stores and databases, as they may be shown."""

from __future__ import annotations

from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError


def shown(uri: str) -> str:
    """``uri`` without a password."""
    try:
        return make_url(uri).render_as_string(hide_password=True)
    except (ArgumentError, ValueError):
        return uri
