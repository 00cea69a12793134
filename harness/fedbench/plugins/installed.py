"""The methods of installed packages, by the entry points these declare."""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points

GROUP = "fedbench.methods"
"""The group that a package registers its methods in."""


def installed_methods() -> tuple[EntryPoint, ...]:
    """The entry points of the group, of all packages on the path; imports none of them.

    Reading them takes some 25 ms, so they are read again only after a folder on the path has changed.
    """
    return _read(tuple((folder, _changed(folder or ".")) for folder in sys.path))


def _changed(folder: str) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return 0


@lru_cache(maxsize=1)
def _read(path: tuple[tuple[str, int], ...]) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=GROUP))
