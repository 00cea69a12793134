"""Reading a store: its runs, and the values of a metric by round; what it has of requested runs.

A store that is a folder here is read from the files that its runs have there, see `fedbench.tracking.schema`. MLflow
is asked only which of them were deleted, and its answer holds until its database is written again. MLflow reads every
other store, and those suites of a folder whose runs have no such files.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbench.core.errors import FedbenchError
from fedbench.core.files import read_bytes, replacing
from fedbench.kinds.registry import IN_NO_FILE
from fedbench.plugins.provenance import versions
from fedbench.suites.suite import is_read_as, may_hold
from fedbench.tracking.databases import check_database
from fedbench.tracking.schema import (
    ARTIFACTS,
    EXPERIMENT,
    INVOCATION,
    KIND,
    RECORD,
    ROUNDS,
    StoredRun,
    beside,
    check_seal,
    database_of,
    filed_as,
    local_artifacts,
    read_record,
    read_rounds,
)
from fedbench.tracking.tags import RunTags

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

    from fedbench.plugins.provenance import RunCode

Value = tuple[str, int, str, float]
"""MLflow id, step, metric, value."""
REQUESTS = 8
"""Made at a time: a server far away answers one in the time it answers all."""
_LISTING = "listing.json"
"""The file of the `Listing`, beside the database."""
_HASHES = {"data_hash": "data changed", "weights_hash": "pretrained weights changed"}


def open_reader(uri: str) -> Reader | None:
    """A reader of the store; None where its SQLite file does not exist.

    Raises FedbenchError for a URI that MLflow does not support, a server out of reach, a damaged database.
    """
    database = database_of(uri)
    if database is None:
        reader = Reader(uri)
        reader.suites()  # whether it is there
        return reader
    if not database.exists():
        return None
    check_database(database, "the store's database", (), "--store")
    return FolderReader(uri, database)


class Reader:
    """Reads a store through MLflow."""

    def __init__(self, uri: str) -> None:
        self._uri = uri

    @cached_property
    def client(self) -> MlflowClient:
        """MLflow's, which takes seconds to import."""
        from fedbench.tracking.store import open_store

        client = open_store(self._uri, create=False)
        assert client is not None
        return client

    def suites(self) -> list[str]:
        from fedbench.tracking.store import suites_of

        return [experiment.name.removeprefix(EXPERIMENT) for experiment in suites_of(self.client)]

    def runs(self, suite: str | None) -> Iterable[tuple[str, Any]]:
        """Suite and run of every run of the suite (None: of all), the newest first; parents of commands left out.

        A run is a `StoredRun`, or MLflow's own, which has the same and more. Of runs without a suite file, ``adhoc``,
        the name is that of their group, which may be asked for as well.
        FedbenchError for a run that is not what was recorded.
        """
        from fedbench.tracking.store import runs_of

        return runs_of(self.client, suite)

    def tags(self, run: str) -> Mapping[str, str]:
        """Tags of a run, or of a command, by its MLflow id; none if it was purged."""
        run_as_stored = self._run(run)
        return {} if run_as_stored is None else dict(run_as_stored.data.tags)

    def values(self, runs: Sequence[str], names: Sequence[str]) -> list[Value]:
        """The values by round of the metrics ``names``, in order of the rounds."""
        with ThreadPoolExecutor(REQUESTS) as pool:
            return [value for values in pool.map(lambda run: self._histories(run, names), runs) for value in values]

    def artifact(self, run: str, name: str, folder: Path) -> Path | None:
        """The artifact as a file, downloaded into ``folder`` if it must be; None where the run has none."""
        run_as_stored = self._run(run)
        if run_as_stored is None:
            return None
        here = local_artifacts(self._uri, run_as_stored)
        if here is not None:
            return here / name if (here / name).is_file() else None
        if name not in {file.path for file in self.client.list_artifacts(run, posixpath.dirname(name) or None)}:
            return None
        place = folder / run / name
        place.parent.mkdir(parents=True, exist_ok=True)
        # MLflow leaves the file without the folders of its name
        return Path(self.client.download_artifacts(run, name, str(place.parent))).replace(place)

    def _run(self, run: str) -> Run | None:
        from mlflow.exceptions import MlflowException
        from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE, RESOURCE_DOES_NOT_EXIST, ErrorCode

        try:
            return self.client.get_run(run)
        except MlflowException as error:
            # purged, or somebody's tag that is no id
            if error.error_code not in map(ErrorCode.Name, (RESOURCE_DOES_NOT_EXIST, INVALID_PARAMETER_VALUE)):
                raise
            return None

    def _histories(self, run: str, names: Sequence[str]) -> list[Value]:
        points = ((name, point) for name in names for point in self.client.get_metric_history(run, name))
        return [(run, point.step, name, point.value) for name, point in points]


@dataclass(frozen=True)
class Listing:
    """What of a folder only MLflow knows."""

    stamp: list[int]
    """State of the database that this was read from."""
    ids: dict[str, str]
    """Suite -> MLflow's id of its experiment."""
    folders: dict[str, str]
    """Suite -> the folder of its runs among the artifacts, maybe of others too; "" where MLflow has to read them."""
    deleted: list[str]
    """MLflow's ids of runs that were deleted in its interface; their files are there."""


class FolderReader(Reader):
    """Reads a store that is a folder here."""

    def __init__(self, uri: str, database: Path) -> None:
        super().__init__(uri)
        self._database = database

    def suites(self) -> list[str]:
        return list(self._listing.folders)

    def runs(self, suite: str | None) -> Iterable[tuple[str, Any]]:
        runs: list[tuple[str, Any]] = []
        without: list[str] = []
        deleted = set(self._listing.deleted)
        for experiment, folder in self._listing.folders.items():
            if not may_hold(experiment, suite):
                continue
            files = list(self._artifacts.glob(f"{folder}/*/artifacts/{RECORD}")) if folder else []
            if not files:  # none that has ended, or the database was copied alone
                without.append(experiment)
            for file in files:
                place = file.parent.parent.name
                if place in deleted:
                    continue
                run = read_record(file)
                # a folder that somebody copied is no run
                is_of_it = (run.info.run_id, run.info.experiment_id) == (place, self._listing.ids[experiment])
                name = filed_as(experiment, run.data.tags)
                if is_of_it and run.data.tags.get(KIND) != INVOCATION and is_read_as(name, suite):
                    check_seal(run)
                    runs.append((name, run))
        if without:
            runs += self._by_mlflow(without, suite)
        return sorted(runs, key=lambda pair: (-int(pair[1].info.start_time), pair[1].info.run_id))

    def tags(self, run: str) -> Mapping[str, str]:
        file = self._file(run, RECORD)
        return super().tags(run) if file is None else read_record(file).data.tags

    def values(self, runs: Sequence[str], names: Sequence[str]) -> list[Value]:
        files = {run: file for run in runs if (file := self._file(run, ROUNDS)) is not None}
        points = [(run, *point) for run, file in files.items() for point in read_rounds(file, names, self.tags(run))]
        rest = [run for run in runs if run not in files]
        return points + (super().values(rest, names) if rest else [])

    def artifact(self, run: str, name: str, folder: Path) -> Path | None:
        if self._file(run, RECORD) is None:
            return super().artifact(run, name, folder)
        return self._file(run, name)

    @property
    def _artifacts(self) -> Path:
        return beside(self._database, ARTIFACTS)

    def _file(self, run: str, name: str) -> Path | None:
        """The artifact of a run; None where it is in none of the folders."""
        if Path(run).name != run:
            return None
        places = (self._artifacts / folder / run / "artifacts" / name for folder in self._listing.folders.values())
        return next((place for place in places if place.is_file()), None)

    def _by_mlflow(self, names: Sequence[str], suite: str | None) -> Iterator[tuple[str, Run]]:
        from fedbench.tracking.store import filed_in, suites_of

        experiments = [
            experiment for experiment in suites_of(self.client) if experiment.name.removeprefix(EXPERIMENT) in names
        ]
        runs = filed_in(self.client, experiments, suite)
        return ((name, run) for name, run in runs if run.data.tags.get(KIND) != INVOCATION)

    @cached_property
    def _listing(self) -> Listing:
        """MLflow's answer, which is kept in a file for those who read the same database."""
        file = beside(self._database, _LISTING)
        stamp = _stamp(self._database)
        with suppress(OSError, ValueError, TypeError):
            kept = Listing(**json.loads(read_bytes(file)))
            if stamp and kept.stamp == stamp:
                return kept
        listing = self._ask(stamp)
        if stamp and stamp == _stamp(self._database):
            # who may only read the store asks MLflow every time
            with suppress(FedbenchError), replacing(file, "listing of the store") as temporary:
                temporary.write_text(json.dumps(asdict(listing)) + "\n", encoding="utf-8")
        return listing

    def _ask(self, stamp: list[int]) -> Listing:
        from fedbench.tracking.store import all_pages, files_folder, suites_of

        # isort: split
        from mlflow.entities import ViewType

        experiments = suites_of(self.client)
        ids = {experiment.name.removeprefix(EXPERIMENT): str(experiment.experiment_id) for experiment in experiments}
        places = [files_folder(self._uri, experiment) for experiment in experiments]
        folders = {suite: "" if place is None else place.name for suite, place in zip(ids, places, strict=True)}
        asked = [ids[suite] for suite, folder in folders.items() if folder]
        search = self.client.search_runs
        deleted = all_pages(search, experiment_ids=asked, run_view_type=ViewType.DELETED_ONLY) if asked else ()
        return Listing(stamp, ids, folders, [run.info.run_id for run in deleted])


def _stamp(database: Path) -> list[int]:
    """Changes with every change of the SQLite file; empty where that can't be told.

    SQLite counts the changes in bytes 24 to 27 of a file, unless it has a log of them beside it (byte 18 is 2).
    """
    status = database.stat()
    with database.open("rb") as file:
        head = file.read(28)
    return [] if head[18:19] == b"\2" else [int.from_bytes(head[24:28], "big"), status.st_size, status.st_mtime_ns]


@dataclass(frozen=True)
class Origin:
    """What the numbers of a run come from, beside its description."""

    code: RunCode
    data_hash: str
    weights_hash: str
    suite_version: int = 1


def stored_runs(uri: str, suite: str, origins: Mapping[str, Origin]) -> dict[str, tuple[str, ...]]:
    """Run id -> why the run is carried out again; nothing for one that the store has finished as it would be now.

    Of the runs that ``origins`` names those that the suite has a finished run of; of several the newest decides.
    """
    reader = open_reader(uri)
    return {} if reader is None else why_again((run for _, run in reader.runs(suite)), origins)


def why_again(runs: Iterable[StoredRun | Run], origins: Mapping[str, Origin]) -> dict[str, tuple[str, ...]]:
    """`stored_runs`, of these runs."""
    reasons: dict[str, tuple[str, ...]] = {}
    installed = versions()
    # the newest last: it is the one that tables show
    for run in sorted(runs, key=lambda run: int(run.info.start_time)):
        tags = RunTags(run.data.tags)
        if run.info.status == "FINISHED" and tags.run_id in origins:
            reasons[tags.run_id] = tuple(_differences(tags, origins[tags.run_id], installed))
    return reasons


def _differences(tags: RunTags, origin: Origin, installed: Mapping[str, str]) -> Iterator[str]:
    """What is not as it was when the run with these tags was made, a phrase each."""
    yield from _changed_code(tags, origin.code, installed)
    if tags.suite_version != origin.suite_version:
        yield f"suite version {tags.suite_version} -> {origin.suite_version}"
    for name, phrase in _HASHES.items():
        if tags.text(name) != getattr(origin, name):
            yield phrase


def _changed_code(tags: RunTags, code: RunCode, installed: Mapping[str, str]) -> Iterator[str]:
    if tags.harness_hash != code.harness:
        before = dict.fromkeys(installed, "none") | tags.versions
        newer = [f"{name} {before[name]} -> {now}" for name, now in installed.items() if before[name] != now]
        yield ", ".join(newer) or "code of the harness changed"
    for method in code.methods:
        if tags.methods.get(method.method) != method.hash:
            if method.plugin.endswith(IN_NO_FILE):
                yield f"whether {method.plugin} changed can't be told"
            else:
                yield f"plugin file {method.plugin} changed" if method.plugin else f"method {method.method} changed"
