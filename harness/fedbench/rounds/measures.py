"""The hook `measure`: asks methods for their measurements of a round, checks them and averages them by reporting
group."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fedbench.core.errors import MethodFault
from fedbench.core.method.tasks import ClientTask, MeasureTask
from fedbench.core.randomness import global_generators
from fedbench.core.types import Update
from fedbench.rounds.private import shared
from fedbench.rounds.run import Run
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
    for answer in answers:
        for name, value in answer.items():
            metrics |= dict(_numbers(name, value, groups, run.scored.num_classes, "+".join(sorted(owners))))
    return metrics


def _numbers(
    name: str, value: float | Tensor, groups: Mapping[str, list[int]], classes: int, owner: str
) -> Iterator[tuple[str, float]]:
    """The metrics of one answer, without those that are NaN."""
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
