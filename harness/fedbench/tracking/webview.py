"""How MLflow's web interface shows a suite: the columns of its table of runs, and the address that opens it."""

from __future__ import annotations

import json
from collections.abc import Sequence

_MEGABYTES = "final/megabytes"
_COSTS = ("final/bytes_up", "final/bytes_down")
_FIRST = ("global", "head", "mid", "tail")
_FURTHER = ("many", "medium", "few", "balanced", "domain_mean", "worst_client", "personal_mean_client")
_OBJECTIVES = ("global_accuracy", "tail", "worst_client", "worst_domain", "domain_mean_accuracy", "bytes")
_TAGS = ("method", "backbone", "setting", "scale", "seed")
_KEY = "fedbench"
KIND_TAG = "mlflow.experimentKind"
VIEW_TAG = f"mlflow.sharedViewState.{_KEY}"
"""Where MLflow keeps a view that was shared under the key; MLflow shows its own columns where it can't read one."""

_BEST_FIRST = {
    "searchFilter": "tags.`fedbench.run_id` LIKE '%'",
    "orderByKey": "metrics.`final/global_accuracy`",
    "orderByAsc": False,
}
"""Runs alone, not the commands that they were part of, the best one first."""


def experiment_tags(tuning: bool = False) -> dict[str, str]:
    """Tags of an experiment: it trains models (MLflow would show it as one of language models), and its view."""
    metrics = (
        [f"objective/{name}" for name in _OBJECTIVES]
        if tuning
        else [*_accuracies(_FIRST), _MEGABYTES, *_accuracies(_FURTHER), *_COSTS]
    )
    columns = [f"metrics.`{name}`" for name in metrics] + (["params.`lr`"] if tuning else [])
    view = _view(columns) if tuning else {**_view(columns), **_BEST_FIRST}
    return {KIND_TAG: "custom_model_development", VIEW_TAG: json.dumps(view)}


def page(experiment: str) -> str:
    """The part of the address, after the server's, that shows the experiment's runs with the view."""
    return f"/#/experiments/{experiment}/runs?workflowType=machine_learning&viewStateShareKey={_KEY}"


def _accuracies(names: Sequence[str]) -> list[str]:
    return [f"final/{name}_accuracy" for name in names]


def _view(columns: list[str]) -> dict[str, object]:
    """Run names, then ``columns``, then what to filter by; MLflow leaves out columns that no run has."""
    tags = [f"tags.`{name}`" for name in _TAGS]
    widths = {"attributes.`Run Name`": 290, "runDateAndNestInfo": 140, "duration": 80}
    widths |= {name: _width(name) for name in columns} | dict.fromkeys(tags, 130)
    # MLflow reads widths by way of the order
    return {"selectedColumns": [*columns, *tags], "columnOrder": list(widths), "columnWidths": widths}


def _width(column: str) -> int:
    """Pixels in which its heading can be read."""
    return 28 + 7 * len(column.split("`")[1])
