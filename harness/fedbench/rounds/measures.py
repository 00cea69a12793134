"""What is measured after a round: by methods (the hook `measure`), and by metrics, which are plug-ins."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from typing import cast

import torch
from torch import Tensor

from fedbench.core.errors import FedbenchError, MethodFault
from fedbench.core.method.answers import require
from fedbench.core.method.base import NoParams
from fedbench.core.method.tasks import ClientTask, MeasureTask
from fedbench.core.metric_names import is_reserved
from fedbench.core.randomness import global_generators
from fedbench.core.types import Update
from fedbench.kinds.kinds import AnyMetric, Metric, MetricTask
from fedbench.kinds.registry import build
from fedbench.rounds.metrics import score
from fedbench.rounds.run import Run, shared
from fedbench.rounds.state import RunState


def measures_of(
    run: Run, state: RunState, tasks: Mapping[int, ClientTask], updates: Sequence[Update]
) -> dict[str, float]:
    """The measurements of the stack's methods after a round. ``state`` is the one after it, ``updates`` were accepted.

    Empty if no method measures, in rounds that are not evaluated, and if no update was accepted. Raises MethodFault for
    answers that are no numbers.
    """
    owners = run.assembly.answers("measure")
    training = run.spec.training
    is_due = state.round % training.eval_every == 0 or state.round == training.rounds
    if not owners or not updates or not is_due:
        return {}
    task = MeasureTask(
        round=state.round,
        tasks=tasks,
        updates=tuple(updates),
        weights=shared(state.weights, run.private),
        buffers=shared(state.buffers, run.private),
        own=state.own,
        inputs=run.test,
        model=run.model,
        spec=run.spec,
        state=state.server,
    )
    with global_generators(run.spec.seed, "global measures", state.round), torch.no_grad():
        answers = run.assembly.hooks.measure(task=task)
    groups = {group: list(classes) for group, classes in run.scored.groups.items()}
    metrics: dict[str, float] = {}
    owner = "+".join(sorted(owners))
    for answer in answers:
        require(answer, Mapping, "numbers by name", owner, "measure")
        for name, value in answer.items():
            metrics |= dict(_numbers(name, value, groups, run.scored.num_classes, owner))
    return metrics


def _numbers(
    name: str, value: float | Tensor, groups: Mapping[str, list[int]], classes: int, owner: str
) -> Iterator[tuple[str, float]]:
    """The metrics of one answer, without those that are NaN."""
    require(value, (Real, Tensor), f"a number or a tensor as {name}", owner, "measure")
    if isinstance(value, Tensor) and value.ndim:
        if value.shape != (classes,):
            raise MethodFault(
                f"{owner} measures {name} as a tensor of shape {tuple(value.shape)}; it must be a number, or "
                f"({classes},) with one for every class."
            )
        by_class = value.double().cpu()
        numbers = {name: by_class, **{f"{name}/{group}": by_class[own] for group, own in groups.items()}}
        values = {each: float(of.nanmean()) for each, of in numbers.items()}
    else:
        values = {name: float(value)}
    yield from ((each, number) for each, number in values.items() if not math.isnan(number))


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
