"""A tracking store that can't be written for a while: its disk is full, its server restarts, another holds its lock."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Any, cast

from fedbench import store as _store  # noqa: F401 - turns MLflow's telemetry off before MLflow is first imported
from fedbench.errors import FedbenchError
from fedbench.uris import shown

# isort: split
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INTERNAL_ERROR, TEMPORARILY_UNAVAILABLE, ErrorCode

_FIRST, _LONGEST = 0.5, 10.0
"""Seconds between two tries, at first and at last."""
_PASSING = frozenset({ErrorCode.Name(INTERNAL_ERROR), ErrorCode.Name(TEMPORARILY_UNAVAILABLE)})


class StoreUnavailable(FedbenchError):
    """The store could not be written, for as long as there was patience."""


def patient(client: MlflowClient, uri: str, tell: Callable[[str], None], seconds: float) -> MlflowClient:
    """``client`` with calls that are tried again while the store can't be reached or written.

    ``tell`` hears of it once. Raises StoreUnavailable after ``seconds``; errors of any other kind at once.
    """
    return cast(MlflowClient, _Patient(client, uri, tell, seconds))


class _Patient:
    def __init__(self, client: MlflowClient, uri: str, tell: Callable[[str], None], seconds: float) -> None:
        self._client = client
        self._uri = uri
        self._tell = tell
        self._seconds = seconds

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._client, name)
        return self._insisting(call) if callable(call) else call

    def _insisting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def insist(*arguments: Any, **named: Any) -> Any:
            pause, began = _FIRST, time.monotonic()
            while True:
                try:
                    return call(*arguments, **named)
                except (MlflowException, OSError) as error:
                    if isinstance(error, MlflowException) and error.error_code not in _PASSING:
                        raise
                    # what the database was asked to do, at length, helps nobody
                    reason = " ".join(str(error).partition("[SQL:")[0].split())[:300]
                    left = self._seconds - (time.monotonic() - began)
                    if left <= 0:
                        raise StoreUnavailable(
                            f"the store {shown(self._uri)!r} can't be written: {reason} Runs that were stored are "
                            "finished; when it can be written again, the same command goes on."
                        ) from error
                    if pause == _FIRST:
                        self._tell(
                            f"the store can't be written: {reason} It is tried again for up to {self._seconds:g} s."
                        )
                    time.sleep(min(pause, left))
                    pause = min(2 * pause, _LONGEST)

        return insist
