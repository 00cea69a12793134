"""Reading a store: its runs, and the values of a metric by round.

MLflow takes seconds to import and ten milliseconds a run, so a store that is a SQLite file is read by queries on
MLflow's tables. MLflow reads every other store, and one whose tables are not those that are expected here.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from fedbench.core.errors import FedbenchError
from fedbench.suites.single import is_read_as, may_hold
from fedbench.tracking.databases import WAIT, check_database, shown
from fedbench.tracking.recorded.seal import check_seal
from fedbench.tracking.schema import (
    EXPERIMENT,
    INVOCATION,
    KIND,
    RUN_ID,
    SMALL_TABLES,
    StoredData,
    StoredInfo,
    StoredRun,
    database_of,
    filed_as,
    local_artifacts,
)

Value = tuple[str, int, str, float]
"""MLflow id, step, metric, value."""
_T = TypeVar("_T")
RUNS_AT_ONCE = 1000
"""Runs in one query."""
REQUESTS = 8
"""Made at a time: a server far away answers one in the time it answers all."""
_RUNS = "SELECT run_uuid, status, start_time, artifact_uri, experiment_id FROM runs"
_TEXTS = "SELECT one.run_uuid, one.key, one.value FROM {table} AS one JOIN runs USING (run_uuid)"
_LAST = "SELECT one.run_uuid, one.key, one.value, one.is_nan FROM latest_metrics AS one JOIN runs USING (run_uuid)"
_VALUES = "SELECT run_uuid, step, value, is_nan FROM metrics WHERE key = ? AND run_uuid IN ({marks})"
_ACTIVE = "lifecycle_stage = 'active'"


class Reader(Protocol):
    """A store that is there."""

    def suites(self) -> list[str]:
        """Those with an experiment."""
        ...

    def runs(self, suite: str | None) -> Iterable[tuple[str, StoredRun]]:
        """Suite and run of every run of the suite (None: of all), the newest first; parents of commands left out.

        Of runs without a suite file, ``adhoc``, the name is that of their group, which may be asked for as well.
        FedbenchError for a run that is not what was recorded.
        """
        ...

    def tags(self, run: str) -> Mapping[str, str]:
        """Of a run, or the parent of a command, by its MLflow id; none where it was purged."""
        ...

    def values(self, runs: Sequence[str], names: Sequence[str]) -> list[Value]:
        """All values that were logged of the metrics ``names``, by run in the order of logging."""
        ...

    def artifact(self, run: str, name: str, folder: Path) -> Path | None:
        """The artifact as a file, downloaded into ``folder`` if it must be; None where the run has none."""
        ...


def open_reader(uri: str) -> Reader | None:
    """A reader of the store; None where its SQLite file does not exist.

    Raises FedbenchError for a URI that MLflow does not support, a server out of reach, a damaged database.
    """
    database = database_of(uri)
    if database is not None:
        if not database.exists():
            return None
        check_database(database, "the store's database", SMALL_TABLES, "--store")
        if (reader := database_reader(uri)) is not None:
            return reader
    from fedbench.tracking.recorded.by_mlflow import ClientReader  # imports MLflow
    from fedbench.tracking.store import open_store

    client = open_store(uri, create=False)
    return None if client is None else ClientReader(uri, client)


def database_reader(uri: str) -> DatabaseReader | None:
    """A reader of a store that is a SQLite file; None for a store of another kind, or with other tables."""
    database = database_of(uri)
    reader = None if database is None else DatabaseReader(uri, database)
    return reader if reader is not None and reader.is_as_expected() else None


class DatabaseReader:
    """Reads the SQLite file of a store."""

    def __init__(self, uri: str, database: Path) -> None:
        self._uri, self._database = uri, database

    def is_as_expected(self) -> bool:
        """Whether MLflow's tables have the columns that are read here."""
        with self._opened() as opened:
            try:
                for table in ("params", "tags"):
                    opened.execute(f"{_TEXTS.format(table=table)} LIMIT 0")
                for query in (_experiments(), f"{_RUNS} WHERE {_ACTIVE}", _LAST, _VALUES.format(marks="")):
                    opened.execute(f"{query} LIMIT 0", ("",) * query.count("?"))
            except sqlite3.OperationalError as error:
                if "no such" in str(error):
                    return False
                raise
        return True

    def has(self, run_id: str, status: str) -> bool:
        """Whether a run of fedbench's id ``run_id`` has the ``status``, deleted or not."""
        query = "SELECT 1 FROM tags JOIN runs USING (run_uuid) WHERE key = ? AND value = ? AND status = ? LIMIT 1"
        with self._opened() as opened:
            return opened.execute(query, (RUN_ID, run_id, status)).fetchone() is not None

    def suites(self) -> list[str]:
        """Those with an experiment."""
        with self._opened() as opened:
            return [name for _, name in self._experiments(opened, None)]

    def runs(self, suite: str | None) -> Iterator[tuple[str, StoredRun]]:
        """Suite and run of every run of the suite (None: of all), the newest first; parents of commands left out."""
        with self._opened() as opened:
            suites = dict(self._experiments(opened, suite))
            among = f"experiment_id IN ({', '.join(str(int(one)) for one in suites)}) AND {_ACTIVE}"
            found = opened.execute(f"{_RUNS} WHERE {among} ORDER BY start_time DESC, run_uuid").fetchall()
            params, tags = (
                _by_run(opened.execute(f"{_TEXTS.format(table=table)} WHERE {among}")) for table in ("params", "tags")
            )
            last = opened.execute(f"{_LAST} WHERE {among}")
            metrics = _by_run((run, key, _number(value, is_nan)) for run, key, value, is_nan in last)
        for run_id, status, started, artifacts, experiment in found:
            data = StoredData(params[run_id], tags[run_id], metrics[run_id])
            run = StoredRun(StoredInfo(run_id, status, started, artifacts), data)
            check_seal(run)
            name = filed_as(suites[experiment], data.tags)
            if data.tags.get(KIND) != INVOCATION and is_read_as(name, suite):
                yield name, run

    def tags(self, run: str) -> Mapping[str, str]:
        """Of a run, or the parent of a command, by its MLflow id; none where it was purged."""
        with self._opened() as opened:
            return dict(opened.execute("SELECT key, value FROM tags WHERE run_uuid = ?", (run,)).fetchall())

    def values(self, runs: Sequence[str], names: Sequence[str]) -> list[Value]:
        """All values that were logged of the metrics ``names``, by run in the order of logging."""
        parts = [runs[start : start + RUNS_AT_ONCE] for start in range(0, len(runs), RUNS_AT_ONCE)]
        found: list[Value] = []
        with self._opened() as opened:
            for name in names:
                for part in parts:
                    query = _VALUES.format(marks=", ".join("?" * len(part)))
                    points = opened.execute(f"{query} ORDER BY run_uuid, timestamp, step, value", (name, *part))
                    found += [(run, step, name, _number(value, is_nan)) for run, step, value, is_nan in points]
        return found

    def artifact(self, run: str, name: str, folder: Path) -> Path | None:
        """The artifact as a file; None where the run has none."""
        with self._opened() as opened:
            row = opened.execute(f"{_RUNS} WHERE run_uuid = ?", (run,)).fetchone()
        if row is None:
            return None
        here = local_artifacts(self._uri, StoredRun(StoredInfo(*row[:4]), StoredData({}, {}, {})))
        if here is None:
            from fedbench.tracking.recorded.by_mlflow import downloaded  # they are elsewhere

            return downloaded(self._uri, run, name, folder)
        return here / name if (here / name).is_file() else None

    def _experiments(self, opened: sqlite3.Connection, suite: str | None) -> list[tuple[int, str]]:
        found = opened.execute(_experiments(), (f"{EXPERIMENT}*",)).fetchall()
        named = [(number, name.removeprefix(EXPERIMENT)) for number, name in found]
        return [(number, name) for number, name in named if may_hold(name, suite)]

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        """A connection that sees one state of the database."""
        try:
            with closing(sqlite3.connect(self._database, timeout=WAIT)) as opened:
                opened.execute("BEGIN")
                yield opened
        except sqlite3.Error as error:
            raise FedbenchError(
                f"the store {shown(self._uri)!r} cannot be used: {error}. Choose another with --store."
            ) from error


def _experiments() -> str:
    return f"SELECT experiment_id, name FROM experiments WHERE name GLOB ? AND {_ACTIVE}"


def _by_run(rows: Iterable[tuple[str, str, _T]]) -> dict[str, dict[str, _T]]:
    found: dict[str, dict[str, _T]] = defaultdict(dict)
    for run, key, value in rows:
        found[run][key] = value
    return found


def _number(value: float, is_nan: bool) -> float:
    return float("nan") if is_nan else value
