"""A tracking store that can't be written for a while: its disk is full, its server restarts, another holds its lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

from fedbench.core.errors import FedbenchError
from fedbench.tracking import store as _store  # noqa: F401 - turns MLflow's telemetry off before MLflow is first imported
from fedbench.tracking.databases import shown
from fedbench.tracking.masking import masked

# isort: split
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INTERNAL_ERROR, TEMPORARILY_UNAVAILABLE, ErrorCode

_FIRST, _LONGEST = 0.5, 10.0
"""Seconds between two tries, at first and at last."""
_PASSING = frozenset({ErrorCode.Name(INTERNAL_ERROR), ErrorCode.Name(TEMPORARILY_UNAVAILABLE)})


HURRY = threading.Event()
"""Set where somebody has pressed Ctrl-C: from then on nothing is tried again."""
_T = TypeVar("_T")


class StoreUnavailable(FedbenchError):
    """The store could not be written, for as long as there was patience."""


class Patience:
    """Tries what needs the store at ``uri`` again while that can't be reached or written, for up to ``seconds``.

    ``tell`` hears of it once for everything that is tried.
    """

    def __init__(self, uri: str, tell: Callable[[str], None], seconds: float) -> None:
        self._uri = uri
        self._tell = tell
        self._seconds = seconds

    def insist(self, call: Callable[..., _T], *arguments: Any, **named: Any) -> _T:
        """What ``call`` returns. Raises StoreUnavailable after all the time, or at once where somebody is in a `HURRY`;
        errors that do not pass are raised as they are.
        """
        pause, began = _FIRST, time.monotonic()
        while True:
            try:
                return call(*arguments, **named)
            except (MlflowException, OSError) as error:
                if isinstance(error, MlflowException) and error.error_code not in _PASSING:
                    raise
                # what the database was to do, at length, helps nobody
                reason = masked(" ".join(str(error).partition("[SQL:")[0].split()))[:300]
                left = self._seconds - (time.monotonic() - began)
                if left <= 0 or HURRY.is_set():
                    raise StoreUnavailable(
                        f"the store {shown(self._uri)!r} can't be written: {reason} Runs that were stored are "
                        "finished; when it can be written again, the same command goes on."
                    ) from error
                if pause == _FIRST:
                    self._tell(f"the store can't be written: {reason} It is tried again for up to {self._seconds:g} s.")
                HURRY.wait(min(pause, left))
                pause = min(2 * pause, _LONGEST)


def patient(client: MlflowClient, patience: Patience) -> MlflowClient:
    """``client`` with every call made with ``patience``."""
    return cast(MlflowClient, _Patient(client, patience))


class _Patient:
    def __init__(self, client: MlflowClient, patience: Patience) -> None:
        self._client = client
        self._patience = patience

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._client, name)
        return partial(self._patience.insist, call) if callable(call) else call
