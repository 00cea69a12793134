"""The database that studies live in: where it is, opening it, and what SQLite needs to be shared by processes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning, OptunaError
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial
from sqlalchemy import event
from sqlalchemy.exc import SQLAlchemyError

from fedbench.core.errors import FedbenchError
from fedbench.core.files import expanded, name_once, usable_folder
from fedbench.tracking.databases import check_database, checked_uri, mask_messages, masked, shown, sqlite_file

warnings.filterwarnings("ignore", category=ExperimentalWarning)
optuna.logging.set_verbosity(optuna.logging.ERROR)
mask_messages()

FILE = "studies.db"
_TABLES = ("studies", "study_directions", "trials", "trial_params", "trial_values", "trial_user_attributes")
"""Optuna's, of those that results are read from."""
HEARTBEAT, GRACE = 2, 10
"""Seconds between a running trial's signs of life, and without one after which others take the trial over."""


def storage_url(storage: str | None, store: str) -> str:
    """The database of ``--storage``: a SQLAlchemy URL, or a file; by default ``studies.db`` beside the runs.

    ``store`` is the tracking URI. Raises FedbenchError where runs are on a server and no storage is named.
    """
    if storage is None:
        if not store.startswith("sqlite:///"):
            raise FedbenchError(
                f"the runs' store {shown(store)} is no folder that studies could be kept in; name a database for "
                "them with --storage, for instance --storage studies.db or --storage postgresql://user@host/studies."
            )
        return f"sqlite:///{Path(store.removeprefix('sqlite:///')).with_name(FILE).as_posix()}"
    if "://" in storage:
        return checked_uri(storage, "--storage")
    file = expanded(storage, "--storage")
    return f"sqlite:///{(usable_folder(file.parent, '--storage') / file.name).as_posix()}"


def open_storage(
    url: str, *, create: bool, abandoned: Callable[[optuna.Study, FrozenTrial], None] | None = None
) -> RDBStorage:
    """The database at ``url``; ``abandoned`` answers for trials whose command died, which have failed then.

    Raises FedbenchError where it is missing and not to be created, or cannot be used.
    """
    file = sqlite_file(url)
    try:
        if file is not None and not file.exists():
            if not create:
                raise FedbenchError(
                    f"there are no studies at {file}; make one with `fedbench tune`, or give --storage."
                )
            _create(file)
        if file is not None:
            check_database(file, "the studies' database", _TABLES, "--storage")
        # a second process that writes makes SQLite wait for its turn
        waiting = {"connect_args": {"timeout": 60}} if file is not None else {}
        storage = RDBStorage(
            url,
            waiting,
            heartbeat_interval=HEARTBEAT,
            grace_period=GRACE,
            heartbeat_stale_trial_callback=abandoned,
        )
    except (OptunaError, SQLAlchemyError, ImportError, RuntimeError, OSError) as error:
        reason = masked(" ".join(str(error).split()))[:300]
        raise FedbenchError(
            f"the studies' database {shown(url)!r} cannot be used: {reason} Choose another --storage."
        ) from error
    if file is not None:
        _one_writer_at_a_time(storage)
    return storage


def _one_writer_at_a_time(storage: RDBStorage) -> None:
    """Make every transaction take SQLite's write lock when it begins.

    Python's driver would begin one at the first write only: two processes could both read that a trial waits, and both
    take it.
    """

    def begin_by_hand(connection: Any, _: object) -> None:
        connection.isolation_level = None

    storage.engine.dispose()  # connections from before the listeners
    event.listen(storage.engine, "connect", begin_by_hand)
    event.listen(storage.engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))


def _create(file: Path) -> None:
    """A new SQLite database, complete or not there at all, whichever process is first."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.{os.getpid()}")
    unfinished.unlink(missing_ok=True)
    try:
        RDBStorage(f"sqlite:///{unfinished.as_posix()}").engine.dispose()
        name_once(unfinished, file)
    finally:
        unfinished.unlink(missing_ok=True)
