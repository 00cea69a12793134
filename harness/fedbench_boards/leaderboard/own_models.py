"""Methods with clients' own models beside methods with one model: both by the accuracy over the same clients.

A board that is ranked by the accuracy of clients' own models (``personal_mean_client_accuracy`` and the like) lists a
row without own models by its global model, over the same clients and their test samples; so do curves by round. The
global model of some runs is never trained: its accuracy is that before the first round.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import pandas as pd

from fedbench.core.metric_names import GROUPS
from fedbench.tracking.schema import FINAL
from fedbench.tracking.tags import RunTags
from fedbench_boards.leaderboard.model import Line

ONE_FOR_ALL_MARK = "§"
"""Mark behind the name of a row with one model for all clients, if rows are ranked by own models."""
ONE_FOR_ALL_NOTE = "one model for all: under own models is what the global model reaches over the same clients"
SHARED = "one_model_for_all"
"""The column of results that marks the runs with one model for all clients."""
_PERSONAL = "personal_"
OF_GROUPS = tuple(f"{_PERSONAL}{group}_client_accuracy" for group in GROUPS)
"""Accuracies of own models by group of classes."""
_OVER_CLIENTS = tuple(f"{which}_client_accuracy" for which in ("mean", "worst", "std", "p10", "gini", *GROUPS))


def ranks_own_models(headline: str) -> bool:
    """Whether ``headline`` is over clients, each by its own model."""
    return headline.startswith(_PERSONAL) and headline.removeprefix(_PERSONAL) in _OVER_CLIENTS


def of_global_model(metric: str) -> str:
    """The metric of the global model: ``mean_client_accuracy`` for ``personal_mean_client_accuracy``."""
    return metric.removeprefix(_PERSONAL)


def with_global_models(results: pd.DataFrame, headlines: tuple[str, ...]) -> pd.DataFrame:
    """``results`` in which runs without own models have the numbers of their global model in their place.

    That is done if one of the ``headlines`` is of own models; a column marks such runs. A run whose global model is
    never trained has nothing to show, and keeps its gaps.
    """
    results = results.assign(**{SHARED: False})
    mean = FINAL + _PERSONAL + _OVER_CLIENTS[0]
    if not any(map(ranks_own_models, headlines)) or FINAL + _OVER_CLIENTS[0] not in results:
        return results
    own = results[mean] if mean in results else pd.Series(float("nan"), index=results.index)
    shared = own.isna() & results[FINAL + _OVER_CLIENTS[0]].notna() & ~results["untrained"].astype(bool)
    for metric in _OVER_CLIENTS:
        ours, theirs = FINAL + _PERSONAL + metric, FINAL + metric
        if theirs in results:
            kept = results[ours] if ours in results else pd.Series(float("nan"), index=results.index)
            results[ours] = kept.where(~shared, results[theirs])
    return results.assign(**{SHARED: shared})


def with_global_curves(curves: pd.DataFrame, results: pd.DataFrame, metrics: Sequence[str]) -> pd.DataFrame:
    """``curves`` by ``mlflow_id`` and round, in which runs in ``results`` without own models have their global model's
    values for those of ``metrics`` that are of own models."""
    known = with_global_models(results, tuple(metrics))
    shared = curves.index.get_level_values("mlflow_id").isin(known.loc[known[SHARED], "mlflow_id"])
    for metric in filter(ranks_own_models, metrics):
        theirs = of_global_model(metric)
        if theirs in curves:
            ours = curves[metric] if metric in curves else pd.Series(float("nan"), index=curves.index)
            curves = curves.assign(**{metric: ours.where(~shared, curves[theirs])})
    return curves


def notes_on_marks(lines: Sequence[Line]) -> list[str]:
    """What the marks behind the names of ``lines`` mean, as far as any has them."""
    untrained = [f"{UNTRAINED_MARK} {UNTRAINED_NOTE}"] if any(line.untrained for line in lines) else []
    shared = [f"{ONE_FOR_ALL_MARK} {ONE_FOR_ALL_NOTE}"] if any(line.one_for_all for line in lines) else []
    return [*untrained, *shared]


UNTRAINED_MARK = "‡"
"""Mark behind the name of a row whose global model is never trained."""
UNTRAINED_NOTE = (
    "the global model is never trained, since nothing of it is sent: no rank by its accuracy; see own models"
)


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
