"""What installed packages register, by the entry points they declare."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points

GROUPS = {
    "method": "fedbench.methods",
    "data set": "fedbench.datasets",
    "partition": "fedbench.partitions",
    "backbone": "fedbench.backbones",
    "text encoder": "fedbench.text_encoders",
    "metric": "fedbench.metrics",
    "suite": "fedbench.suites",
}
"""Kind of plug-in -> the group that a package registers it in."""
GROUP = GROUPS["method"]


def installed(kind: str) -> tuple[EntryPoint, ...]:
    """The entry points of plug-ins of that kind, of all packages on the path; imports none of them.

    Reading them takes some 25 ms, so they are read again only after a folder on the path has changed.
    """
    return _read(tuple((folder, _changed(folder or ".")) for folder in sys.path)).get(kind, ())


def installed_methods() -> tuple[EntryPoint, ...]:
    """Those of methods."""
    return installed("method")


def installed_plugins() -> tuple[EntryPoint, ...]:
    """Those of all kinds, methods first."""
    return (*installed_methods(), *(point for kind in GROUPS if kind != "method" for point in installed(kind)))


def _changed(folder: str) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return 0


@lru_cache(maxsize=1)
def _read(path: tuple[tuple[str, int], ...]) -> Mapping[str, tuple[EntryPoint, ...]]:
    every = entry_points()
    return {kind: tuple(every.select(group=group)) for kind, group in GROUPS.items()}
