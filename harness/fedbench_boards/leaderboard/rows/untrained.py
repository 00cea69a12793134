"""Runs whose global model is never trained: its accuracy is that before the first round."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fedbench.tracking.schema import FINAL
from fedbench.tracking.tags import RunTags

MARK = "‡"
"""Mark behind the name of a row whose global model is never trained."""
NOTE = "the global model is never trained, since nothing of it is sent: no rank by its accuracy; see own models"
_PERSONAL = "personal_"


def is_untrained(method: str, tags: RunTags, metrics: Mapping[str, float]) -> bool:
    """Whether a finished run has tensors to train, but a global model that none of them changed.

    That is so if clients and server sent nothing, and if every tensor is private and the harness evaluates; a method
    that evaluates itself may predict by what clients report.
    """
    if FINAL + "global_accuracy" not in metrics or not tags.number("trainable_parameters"):
        return False
    sent = [metrics.get(f"{FINAL}bytes_{way}", float("nan")) for way in ("up", "down")]
    evaluating = set(re.split(", | around ", tags.parsed("owners", dict).get("evaluate", method)))
    is_private = tags.text("round_bytes") == "0" and evaluating.isdisjoint(method.split("+"))
    return is_private or sum(sent) == 0


def is_of_global_model(metric: str) -> bool:
    """Whether the metric is of the global model, not of clients' own models."""
    return not metric.startswith(_PERSONAL)
