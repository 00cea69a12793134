"""The metrics of a run, computed by plug-ins: the standard metrics, and those that the run names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import cast

from fedbench.core.errors import FedbenchError
from fedbench.core.method.base import NoParams
from fedbench.core.metric_names import is_reserved
from fedbench.kinds.kinds import AnyMetric, Metric, MetricTask
from fedbench.kinds.registry import build
from fedbench.rounds.metrics import score

STANDARD = "standard"


class StandardMetrics(Metric[NoParams]):
    """What every run has: accuracies over samples, classes, groups, domains and clients, F1, calibration, top-5."""

    name = STANDARD
    needs_model = False

    def values(self, task: MetricTask) -> Mapping[str, float]:
        return score(task.predictions, task.federation)


def metrics_named(names: Sequence[str]) -> tuple[AnyMetric, ...]:
    """The metric plug-ins of a run, the standard ones first. FedbenchError for an unknown name."""
    return tuple(cast(AnyMetric, build("metric", name)[0]) for name in dict.fromkeys((STANDARD, *names)))


def measured(metrics: Sequence[AnyMetric], task: MetricTask, *, is_last: bool) -> dict[str, float]:
    """The values of ``metrics`` in a round. FedbenchError for a value that is no number, or has a name of another
    plug-in."""
    result: dict[str, float] = {}
    for metric in metrics:
        if (metric.at_the_end and not is_last) or (metric.needs_model and task.predictions.labels is None):
            continue
        answer = metric.values(task)
        values = answer if isinstance(answer, Mapping) else {} if answer is None else {metric.name: answer}
        if metric.name != STANDARD:
            _require_own(metric, values)
        result |= values
    return result


def _require_own(metric: AnyMetric, values: Mapping[str, object]) -> None:
    for name, value in values.items():
        if not isinstance(name, str) or name.partition("/")[0] != metric.name or is_reserved(name):
            raise FedbenchError(
                f"metric {metric.name!r} gives a number called {name!r}; call it {metric.name!r}, or "
                f"{metric.name}/PART, and not as the harness calls its own (..._accuracy, bytes, seconds)."
            )
        if not isinstance(value, Real):
            raise FedbenchError(f"metric {metric.name!r} gives {value!r} as {name!r}; it must be a number.")
