"""The hook `relabel`: a method that labels the clients' samples may change these labels in every round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedbench.core.method.answers import require_labels
from fedbench.core.method.tasks import ClientTask
from fedbench.rounds.run import Run


def relabelled(run: Run, tasks: Sequence[ClientTask]) -> list[ClientTask]:
    """``tasks`` with the answers to the hook `relabel`. A client left without samples does not train in this round."""
    if run.given is None:
        return list(tasks)
    return [task for task in (_relabelled(run, task) for task in tasks) if len(task.inputs)]


def _relabelled(run: Run, task: ClientTask) -> ClientTask:
    assert task.labels is not None and run.given is not None  # who gives labels has given some
    given = torch.nonzero(run.given[run.federation.clients[task.client].indices]).flatten()
    if not len(given):
        return task
    classes = run.federation.num_classes
    asked = _of(task, given, task.labels, classes)
    answer = run.assembly.hooks.relabel(task=asked)
    if answer is None:
        return task
    new = require_labels(answer, len(given), classes, run.assembly.answers_first("relabel"), "relabel")
    labels = task.labels.clone()
    labels[given.to(labels.device)] = new.to(labels.device)
    return _of(task, torch.nonzero(labels >= 0).flatten().cpu(), labels, classes)


def _of(task: ClientTask, rows: Tensor, labels: Tensor, classes: int) -> ClientTask:
    """``task`` reduced to the samples ``rows``; ``labels`` (n_k,) are those of all the client's samples."""
    own = labels[rows.to(labels.device)]
    return replace(
        task,
        inputs=task.inputs.select(rows),
        labels=own,
        class_counts=torch.bincount(own, minlength=classes),
        side={name: source.select(rows) for name, source in task.side.items()},
    )
