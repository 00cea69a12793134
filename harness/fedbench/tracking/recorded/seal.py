"""A digest of what the store has of a finished run, so that a number that changed on a disk is noticed when read.

SQLite keeps no checksums: a flipped bit in a metric is another metric.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from fedbench.core.errors import FedbenchError

if TYPE_CHECKING:
    from mlflow.entities import Run

    from fedbench.tracking.schema import StoredRun

SEAL = "fedbench.seal"
"""Tag: the digest of a finished run."""
_OURS = "fedbench."
"""Tags of MLflow's own, notes for instance, may be edited in its interface."""


def seal_of(run: StoredRun | Run) -> str:
    """sha256 over the run's parameters, last metrics, and fedbench's tags but the seal; metrics to the last bit."""
    tags = {key: value for key, value in run.data.tags.items() if key.startswith(_OURS) and key != SEAL}
    metrics = {key: float(value).hex() for key, value in run.data.metrics.items()}
    text = json.dumps([dict(run.data.params), metrics, tags], sort_keys=True)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def check_seal(run: StoredRun | Run) -> None:
    """FedbenchError where the run has a seal, as finished ones have, and is not what was sealed."""
    sealed = run.data.tags.get(SEAL)
    if sealed is not None and sealed != seal_of(run):
        raise FedbenchError(
            f"run {run.data.tags.get('fedbench.run_id', '')} ({run.info.run_id}) is not what was recorded: the store "
            "is damaged, or the run was changed by hand; put a copy of the store back, or delete the run "
            f"(mlflow runs delete --run-id {run.info.run_id}) and make it again."
        )
