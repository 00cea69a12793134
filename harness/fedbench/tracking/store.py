"""The tracking store through MLflow: opening it, reading its runs. MLflow is set up here and nowhere else."""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlparse

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("DO_NOT_TRACK", "true")
# MLflow's own 7 retries keep a user waiting for minutes when the tracking server is down; 4 take half a minute.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "4")
# The interface's job workers (for evaluating language models) are processes that fedbench has no use for.
os.environ.setdefault("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")
# A handful of files is there at once; its bar would stand between a command's lines.
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")

from mlflow import MlflowClient
from mlflow.entities import Experiment, Run
from mlflow.exceptions import MlflowException
from sqlalchemy.exc import SQLAlchemyError

from fedbench.core.errors import FedbenchError
from fedbench.core.files import name_once
from fedbench.suites.suite import is_read_as, may_hold
from fedbench.tracking.databases import check_database, check_server, mask_messages, masked, shown
from fedbench.tracking.schema import (
    ARTIFACTS,
    EXPERIMENT,
    INVOCATION,
    KIND,
    SQLITE,
    beside,
    check_seal,
    database_of,
    filed_as,
    folder_at,
)

_PAGE = 1000
_TABLES_SECONDS = 120
"""For which another process may take to make the tables of a database."""
_FILES, _COMPLETE, _ELSEWHERE = "fedbench.files", "complete", "elsewhere"
"""Tag of an experiment: whether every run of it that has ended has its ``run.json`` in the folder beside the database.

Not so where the database was moved or copied without that folder, and then written.
"""
_MEMORY = Path("/dev/shm")
"""A folder in memory, where the system has one."""
_PAGE_VIEW = {
    "workflowType": "machine_learning",
    "searchFilter": "tags.`fedbench.run_id` LIKE '%'",
    "orderByKey": "metrics.`final/global_accuracy`",
    "orderByAsc": "false",
}
"""What a page of MLflow shows first: runs alone, not the commands that they were part of, the best one first."""

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
            check_database(database, "the store's database", (), "--store")
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
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        database = database_of(uri)
        location = None if database is None else (beside(database, ARTIFACTS) / _folder_name(suite, prefix)).as_uri()
        # without the first MLflow would show it as an experiment with language models
        tags = {"mlflow.experimentKind": "custom_model_development"}
        tags |= {} if database is None else {_FILES: _COMPLETE}
        try:
            return str(client.create_experiment(name, artifact_location=location, tags=tags))
        except MlflowException:
            # another process was faster
            experiment = client.get_experiment_by_name(name)
            if experiment is None:
                raise
    if experiment.lifecycle_stage != "active":
        raise FedbenchError(
            f"the experiment {name!r} was deleted from {shown(uri)}; bring it back with `mlflow experiments restore "
            f"--experiment-id {experiment.experiment_id}`, or choose another store with --store."
        )
    return str(experiment.experiment_id)


def run_folders(client: MlflowClient, uri: str, experiment: str) -> Path | None:
    """The folder with a folder for each run of the experiment, for who writes files there; None where MLflow has to.

    It is beside the database, wherever that is by now. Where earlier runs have theirs elsewhere, the store notes it for
    those who read it.
    """
    described = client.get_experiment(experiment)
    folder, location = _folder_of(uri, described), folder_at(described.artifact_location)
    if folder is None or location is None or _FILES not in described.tags:
        return None
    if folder.resolve() != location.resolve() and not folder.exists():
        client.set_experiment_tag(experiment, _FILES, _ELSEWHERE)
    return folder


def put_files(client: MlflowClient, folders: Path | None, run: str, files: Path, below: str = "") -> None:
    """Copy the folder ``files`` to the run's artifacts, into the folder ``below``; ``folders`` as `run_folders` says.

    MLflow would write where the store was made, which a store that was moved or copied has left.
    """
    if folders is None:
        client.log_artifacts(run, str(files), below or None)
        return
    for file in filter(Path.is_file, files.rglob("*")):
        copy = folders / run / "artifacts" / below / file.relative_to(files)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)


def files_folder(uri: str, experiment: Experiment) -> Path | None:
    """The folder beside the store's database that has the ``run.json`` of all runs of the experiment that have ended.

    None where there is no such folder: MLflow has to be asked for the runs.
    """
    return _folder_of(uri, experiment) if experiment.tags.get(_FILES) == _COMPLETE else None


def _folder_of(uri: str, experiment: Experiment) -> Path | None:
    database, location = database_of(uri), folder_at(experiment.artifact_location)
    return None if database is None or location is None else beside(database, ARTIFACTS) / location.name


def _folder_name(suite: str, prefix: str) -> str:
    return re.sub(r"[^\w.\-]", "_", (prefix + suite).removeprefix(EXPERIMENT)).lstrip(".") or "_"


def runs_of(client: MlflowClient, suite: str | None, condition: str = "") -> Iterator[tuple[str, Run]]:
    """Suite or group, and run, of every run of the suite or group (None: of all) that meets the filter.

    The parents of commands are no runs and left out.
    """
    # MLflow's own "is not" leaves out what has no such tag, so this is no part of the filter
    return ((name, run) for name, run in filed(client, suite, condition) if run.data.tags.get(KIND) != INVOCATION)


def filed(client: MlflowClient, suite: str | None, condition: str = "") -> Iterator[tuple[str, Run]]:
    """`runs_of`, and the parents of commands as well; FedbenchError for a run that is not what was recorded."""
    experiments = [each for each in suites_of(client) if may_hold(each.name.removeprefix(EXPERIMENT), suite)]
    return filed_in(client, experiments, suite, condition)


def suites_of(client: MlflowClient) -> list[Experiment]:
    """The experiments of suites that were not deleted."""
    return list(all_pages(client.search_experiments, filter_string=f"name LIKE '{EXPERIMENT}%'"))


def filed_in(
    client: MlflowClient, experiments: Collection[Experiment], suite: str | None, condition: str = ""
) -> Iterator[tuple[str, Run]]:
    """`filed` of these experiments, the newest first."""
    names = {experiment.experiment_id: experiment.name.removeprefix(EXPERIMENT) for experiment in experiments}
    if names:
        for run in all_pages(client.search_runs, experiment_ids=list(names), filter_string=condition):
            check_seal(run)
            name = filed_as(names[run.info.experiment_id], run.data.tags)
            if is_read_as(name, suite):
                yield name, run


def page(experiment: str) -> str:
    """The part of the address, after the server's, that shows the experiment's runs, the best first."""
    return f"/#/experiments/{experiment}/runs?{urlencode(_PAGE_VIEW, quote_via=quote)}"


def latest_page(uri: str) -> tuple[str, str] | None:
    """The suite that ran last and the page of the web interface that shows its runs; None where nothing ran."""
    client = open_store(uri, create=False)
    if client is None:
        return None
    suites = {experiment.experiment_id: experiment.name.removeprefix(EXPERIMENT) for experiment in suites_of(client)}
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
    return [*command, "--default-artifact-root", beside(database, ARTIFACTS).as_uri()]


def _create(database: Path) -> None:
    """A new SQLite store, complete or not there at all.

    MLflow's migrations are hundreds of small transactions; where they need not wait for a disk they take a third of
    the time. The file gets its name only once it is whole, so that an interrupt leaves no half of a store.
    """
    database.parent.mkdir(parents=True, exist_ok=True)
    unfinished = database.with_name(f"{database.name}.{os.getpid()}")
    try:
        with tempfile.TemporaryDirectory(dir=_MEMORY if os.access(_MEMORY, os.W_OK) else None) as folder:
            made = Path(folder) / database.name
            MlflowClient(f"{SQLITE}{made.as_posix()}").search_experiments(max_results=1)
            shutil.copyfile(made, unfinished)
        with unfinished.open("rb+") as file:
            os.fsync(file.fileno())
        # not a rename: where another process made the store in the meantime, that one stays
        name_once(unfinished, database)
    finally:
        unfinished.unlink(missing_ok=True)


def all_pages(search: Any, **arguments: Any) -> Iterator[Any]:
    """Everything that a search of MLflow's client finds, page by page."""
    token = None
    while True:
        answers = search(max_results=_PAGE, page_token=token, **arguments)
        yield from answers
        token = answers.token
        if not token:
            return
