"""The database that studies live in: where it is, opening it, and what SQLite needs to be shared by processes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning, OptunaError
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.trial import FrozenTrial
from sqlalchemy import event, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from fedbench.errors import FedbenchError

warnings.filterwarnings("ignore", category=ExperimentalWarning)
optuna.logging.set_verbosity(optuna.logging.ERROR)

FILE = "studies.db"
HEARTBEAT, GRACE = 2, 10
"""Seconds between a running trial's signs of life, and without one after which others take the trial over."""
_RETRIES = 3
"""How often a trial whose process died is tried again: one that needs more memory than there is must come to an end."""


def storage_url(storage: str | None, store: str) -> str:
    """The database of ``--storage``: a SQLAlchemy URL, or a file; by default ``studies.db`` beside the runs.

    ``store`` is the tracking URI. Raises FedbenchError where runs are on a server and no storage is named.
    """
    if storage is None:
        if not store.startswith("sqlite:///"):
            raise FedbenchError(
                f"the runs' store {store} is no folder that studies could be kept in; name a database for them with "
                "--storage, for instance --storage studies.db or --storage postgresql://user@host/studies."
            )
        return f"sqlite:///{Path(store.removeprefix('sqlite:///')).with_name(FILE).as_posix()}"
    return storage if "://" in storage else f"sqlite:///{Path(storage).expanduser().absolute().as_posix()}"


def open_storage(
    url: str, *, create: bool, abandoned: Callable[[optuna.Study, FrozenTrial], None] | None = None
) -> RDBStorage:
    """The database at ``url``; ``abandoned`` hears of trials whose process died, which are queued once more.

    Raises FedbenchError where it is missing and not to be created, or cannot be used.
    """
    again = RetryHeartbeatStaleTrialCallback(max_retry=_RETRIES)

    def take_over(study: optuna.Study, trial: FrozenTrial) -> None:
        again(study, trial)
        if abandoned is not None:
            abandoned(study, trial)

    file = Path(url.removeprefix("sqlite:///")) if url.startswith("sqlite:///") else None
    try:
        if file is not None and not file.exists():
            if not create:
                raise FedbenchError(
                    f"there are no studies at {file}; make one with `fedbench tune`, or give --storage."
                )
            _create(file)
        # a second process that writes makes SQLite wait for its turn
        waiting = {"connect_args": {"timeout": 60}} if file is not None else {}
        storage = RDBStorage(
            url,
            waiting,
            heartbeat_interval=HEARTBEAT,
            grace_period=GRACE,
            heartbeat_stale_trial_callback=take_over,
        )
    except (OptunaError, SQLAlchemyError, ImportError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())[:300].replace(url, shown(url))
        raise FedbenchError(
            f"the studies' database {shown(url)!r} cannot be used: {reason} Choose another --storage."
        ) from error
    if file is not None:
        _one_writer_at_a_time(storage)
    return storage


def shown(url: str) -> str:
    """``url`` without a password."""
    try:
        return make_url(url).render_as_string(hide_password=True)
    except ArgumentError:
        return url


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
        os.link(unfinished, file)
    except FileExistsError:
        pass
    finally:
        unfinished.unlink(missing_ok=True)
