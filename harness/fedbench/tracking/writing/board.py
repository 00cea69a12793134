"""The leaderboard at the end of a command, in the command's own run: files as artifacts, its best rows as metrics."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fedbench.tracking.store import open_store
from fedbench.tracking.writing.recording import log_metrics, metrics_at, set_tags

FOLDER = "leaderboard"
"""Of the artifacts."""
BEST = "fedbench.best"
"""Tag: the rows that the metrics are of, the best of each table."""


def record_board(uri: str, command: str, files: Path, metrics: Mapping[str, float], best: str) -> None:
    """Store what is in the folder ``files`` with the run of ``command``, and the ``metrics`` of the rows ``best``."""
    client = open_store(uri, create=False)
    if client is None:
        return
    client.log_artifacts(command, str(files), FOLDER)
    log_metrics(client, command, metrics_at(metrics, 0))
    set_tags(client, command, {BEST: best})
