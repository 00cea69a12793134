"""The tracking store through MLflow: opening it, reading its runs. MLflow is set up here and nowhere else."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("DO_NOT_TRACK", "true")
# MLflow's own 7 retries keep a user waiting for minutes when the tracking server is down; 4 take half a minute.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "4")
# The interface's job workers (for evaluating language models) are processes that fedbench has no use for.
os.environ.setdefault("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")
# A handful of files is there at once; its bar would stand between a command's lines.
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")

from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.exceptions import MlflowException
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from sqlalchemy import Engine, event
from sqlalchemy.exc import SQLAlchemyError

from fedbench.core.errors import FedbenchError
from fedbench.core.files import name_once
from fedbench.suites.single import is_read_as, may_hold
from fedbench.tracking.databases import check_database, check_server, shown
from fedbench.tracking.masking import mask_messages, masked
from fedbench.tracking.recorded.seal import check_seal
from fedbench.tracking.schema import EXPERIMENT, INVOCATION, KIND, SMALL_TABLES, SQLITE, TUNING, database_of, filed_as
from fedbench.tracking.webview import experiment_tags, page

_PAGE = 1000
_TABLES_SECONDS = 120
"""For which another process may take to make the tables of a database."""

for _noisy in ("mlflow", "alembic"):
    logging.getLogger(_noisy).setLevel(logging.WARNING)
# It logs every error of the database with a traceback before it raises it.
logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
mask_messages()


def open_store(uri: str, *, create: bool) -> MlflowClient | None:
    """A client of the store; None where its SQLite file does not exist and ``create`` is off.

    Raises FedbenchError for a URI that MLflow does not support, a server out of reach, a folder out of bounds, a
    damaged database.
    """
    check_server(uri)
    database = database_of(uri)
    try:
        if database is not None and not database.exists():
            if not create:
                return None
            _create(database)
        if database is not None:
            check_database(database, "the store's database", SMALL_TABLES, "--store")
        return _reached(uri)
    except ImportError as error:
        raise FedbenchError(
            f"the store {shown(uri)!r} needs a database driver that is not installed ({error}); for PostgreSQL: "
            "pip install 'fedbench-harness[postgresql]'."
        ) from error
    except (MlflowException, SQLAlchemyError, OSError) as error:
        reason = masked(" ".join(str(error).split()))[:400]
        raise FedbenchError(
            f"the store {shown(uri)!r} cannot be used: {reason} Choose another with --store."
        ) from error


def _reached(uri: str) -> MlflowClient:
    """A client of a store that answers. Whoever is first to open an empty database makes its tables."""
    began = time.monotonic()
    while True:
        try:
            client = MlflowClient(uri)
            client.search_experiments(max_results=1)
            return client
        except (MlflowException, SQLAlchemyError) as error:
            # another process makes them at this moment
            beaten = any(text in str(error) for text in ("already exists", "duplicate key", "UniqueViolation"))
            if not beaten or time.monotonic() - began > _TABLES_SECONDS:
                raise
            time.sleep(1)


def experiment_of(client: MlflowClient, uri: str, suite: str, prefix: str = EXPERIMENT) -> str:
    """The id of the suite's experiment, created where it is missing; ``prefix`` is `TUNING` for that of its studies."""
    name = prefix + suite
    found = client.get_experiment_by_name(name)
    if found is None:
        database = database_of(uri)
        folder = re.sub(r"[^\w.\-]", "_", name.removeprefix(EXPERIMENT)).lstrip(".") or "_"
        location = None if database is None else (database.parent / "artifacts" / folder).as_uri()
        try:
            return str(
                client.create_experiment(name, artifact_location=location, tags=experiment_tags(prefix == TUNING))
            )
        except MlflowException:
            # another process was faster
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    if found.lifecycle_stage != "active":
        raise FedbenchError(
            f"the experiment {name!r} was deleted from {shown(uri)}; bring it back with `mlflow experiments restore "
            f"--experiment-id {found.experiment_id}`, or choose another store with --store."
        )
    return str(found.experiment_id)


def runs_of(client: MlflowClient, suite: str | None, condition: str = "") -> Iterator[tuple[str, Run]]:
    """Suite or group, and run, of every run of the suite or group (None: of all) that meets the filter.

    The parents of commands are no runs and left out.
    """
    # MLflow's own "is not" leaves out what has no such tag, so this is no part of the filter
    return ((name, run) for name, run in filed(client, suite, condition) if run.data.tags.get(KIND) != INVOCATION)


def filed(client: MlflowClient, suite: str | None, condition: str = "") -> Iterator[tuple[str, Run]]:
    """`runs_of`, and the parents of commands as well; FedbenchError for a run that is not what was recorded."""
    names = {
        experiment.experiment_id: experiment.name.removeprefix(EXPERIMENT)
        for experiment in _all_pages(client.search_experiments, filter_string=f"name LIKE '{EXPERIMENT}%'")
        if may_hold(experiment.name.removeprefix(EXPERIMENT), suite)
    }
    if names:
        for run in _all_pages(client.search_runs, experiment_ids=list(names), filter_string=condition):
            check_seal(run)
            name = filed_as(names[run.info.experiment_id], run.data.tags)
            if is_read_as(name, suite):
                yield name, run


def latest_page(uri: str) -> tuple[str, str] | None:
    """The suite that ran last and the page of the web interface that shows its runs; None where nothing ran."""
    client = open_store(uri, create=False)
    if client is None:
        return None
    found = _all_pages(client.search_experiments, filter_string=f"name LIKE '{EXPERIMENT}%'")
    suites = {experiment.experiment_id: experiment.name.removeprefix(EXPERIMENT) for experiment in found}
    if not suites:
        return None
    latest = client.search_runs(list(suites), order_by=["attributes.start_time DESC"], max_results=1)
    return next(((suites[run.info.experiment_id], page(run.info.experiment_id)) for run in latest), None)


def ui_command(uri: str) -> list[str]:
    """The command that opens MLflow's web interface on the store; ``--port`` may be appended."""
    if urlparse(uri).scheme in ("http", "https"):
        raise FedbenchError(f"the store {shown(uri)} is an MLflow server already; open that address in a browser.")
    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", uri, "--workers", "1"]
    database = database_of(uri)
    if database is None:
        return command
    if not database.exists():
        raise FedbenchError(f"there is no store at {database.parent}; fill one with `fedbench run --suite longtail`.")
    return [*command, "--default-artifact-root", (database.parent / "artifacts").as_uri()]


def _create(database: Path) -> None:
    """A new SQLite store, complete or not there at all.

    MLflow's migrations are hundreds of small transactions; without waiting for the disk at each they take a third of
    the time. The file gets its name only once it is whole, so that an interrupt leaves no half of a store.
    """
    database.parent.mkdir(parents=True, exist_ok=True)
    unfinished = database.with_name(f"{database.name}.{os.getpid()}")
    unfinished.unlink(missing_ok=True)
    event.listen(Engine, "connect", _without_waiting)
    try:
        artifacts = (database.parent / "artifacts").as_uri()
        store = SqlAlchemyStore(f"{SQLITE}{unfinished.as_posix()}", artifacts)  # type: ignore[no-untyped-call]
        store.engine.dispose()
        with unfinished.open("rb+") as file:
            os.fsync(file.fileno())
        # not a rename: where another process made the store in the meantime, that one stays
        name_once(unfinished, database)
    finally:
        event.remove(Engine, "connect", _without_waiting)
        unfinished.unlink(missing_ok=True)


def _without_waiting(connection: Any, _: object) -> None:
    connection.execute("PRAGMA synchronous=OFF")


def _all_pages(search: Any, **arguments: Any) -> Iterator[Any]:
    token = None
    while True:
        page = search(max_results=_PAGE, page_token=token, **arguments)
        yield from page
        token = page.token
        if not token:
            return
