"""What the server sends to a client, what the client is to do with it, and whether the answer can be used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedbench.core.method.answers import misfit, not_finite, require, require_fit, require_labels
from fedbench.core.method.tasks import BroadcastTask, ClientTask
from fedbench.core.randomness import torch_generator
from fedbench.core.types import Broadcast, Tensors, Update
from fedbench.rounds.metrics import size_in_bytes
from fedbench.rounds.run import Run, completed, shared
from fedbench.rounds.state import RunState
from fedbench.toolkit.fedavg import FedAvg


def broadcast(run: Run, state: RunState, client: int, exchange: int = 0) -> Broadcast:
    """The broadcast to ``client`` in the round after ``state``."""
    weights, buffers = (shared(tensors, run.private) for tensors in (state.weights, state.buffers))
    task = BroadcastTask(client, state.round + 1, exchange, weights, run.spec, state.server, buffers)
    sent = run.assembly.hooks.broadcast(task=task)
    require(sent, Broadcast, "a Broadcast", run.assembly.answers_first("broadcast"), "broadcast")
    return replace(sent, weights=channels_last(sent.weights))


def broadcasts(run: Run, state: RunState, clients: Iterable[int], exchange: int) -> dict[int, Broadcast]:
    """The broadcast to each client. Weights sent to all clients are shared, in the layout of `channels_last`."""
    state = replace(state, weights=channels_last(state.weights))
    return {client: broadcast(run, state, client, exchange) for client in clients}


def client_task(
    run: Run, state: RunState, number: int, exchange: int, client: int, sent: Broadcast, work: float = 1.0
) -> ClientTask:
    """The task of ``client`` in round ``number`` with what it was ``sent``; ``work`` is the share that a straggler
    does."""
    federation, device = run.federation, run.spec.device
    indices = federation.clients[client].indices
    visible = federation.labels_visible
    # private tensors are never aggregated: those of the state are the model's initial ones
    own = state.own.get(client, {})
    buffers = state.buffers if sent.buffers is None else sent.buffers
    return ClientTask(
        client=client,
        round=number,
        received=channels_last(completed(sent.weights, own, state.weights, run.private)),
        buffers=completed(buffers, own, state.buffers, run.private),
        payload={**sent.payload, **sent.held},
        inputs=run.train.select(indices),
        labels=federation.train.labels[indices].to(device) if visible else None,
        class_counts=federation.class_counts(client).to(device) if visible else None,
        model=run.model,
        spec=run.spec,
        state=state.clients.setdefault(client, {}),
        hooks=run.assembly.hooks,
        side={name: rows.select(indices) for name, rows in run.side.items()},
        exchange=exchange,
        work=work,
    )


def channels_last(tensors: Tensors) -> Tensors:
    """Convolution kernels in the layout that trains faster on CPUs.

    resnet8 on one thread: 1.20 times at width 1, 1.26 at width 4, medians of tests/bench/bench_channels_last.py.
    """
    layout = torch.channels_last
    return {name: t.contiguous(memory_format=layout) if t.ndim == 4 else t for name, t in tensors.items()}


def sent_bytes(run: Run, state: RunState, sent: Broadcast) -> int:
    """Bytes sent to one client."""
    buffers = state.buffers if sent.buffers is None else sent.buffers
    counted = shared(buffers, run.private | run.model.of_server)
    return size_in_bytes(shared(sent.weights, run.private), counted, sent.payload)


def received_bytes(run: Run, update: Update) -> int:
    """Bytes that one client sent."""
    rest = size_in_bytes(shared(update.buffers, run.model.of_server), update.payload)
    return rest + (size_in_bytes(update.weights) if update.encoded is None else update.encoded)


def uploaded(run: Run, tasks: Sequence[ClientTask], updates: Sequence[Update]) -> tuple[Update, ...]:
    """The ``updates`` of ``tasks`` as the hook `upload` lets them arrive."""
    by_client, owner = {task.client: task for task in tasks}, run.assembly.answers_first("upload")
    if owner == FedAvg.name:
        return tuple(updates)
    arrived = []
    for update in updates:
        answer = run.assembly.hooks.upload(task=by_client[update.client], update=update)
        require(answer, Update, "an Update", owner, "upload")
        require_fit(update.weights, answer.weights, owner, "upload")
        arrived.append(replace(update, weights=answer.weights, encoded=answer.encoded))
    return tuple(arrived)


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


KINDS = ("nan", "inf", "shape", "missing")
"""Kinds of damage: a NaN value, an infinite one, a tensor of another shape, a missing tensor."""


def damaged(update: Update, seed: int, round: int, exchange: int) -> Update:
    """A copy of ``update`` with damage of a random kind (`KINDS`) to a random tensor.

    The server cannot know names and shapes of the payload, so only its values are damaged. An update without a tensor
    to damage is returned unchanged.
    """
    generator = torch_generator(seed, "damage", round, update.client, exchange)
    kind = KINDS[int(torch.randint(len(KINDS), (), generator=generator))]
    model = {**update.weights, **update.buffers}
    values = [name for name, t in {**model, **update.payload}.items() if t.is_floating_point() and t.numel()]
    if kind in ("shape", "missing") and not model:
        kind = "nan"
    names = list(model) if kind in ("shape", "missing") else values
    if not names:
        return update
    name = names[int(torch.randint(len(names), (), generator=generator))]
    parts = (update.weights, update.buffers, update.payload)
    changed = {part: _changed(tensors, name, kind) for part, tensors in zip(_PARTS, parts, strict=True)}
    return replace(update, **changed)  # type: ignore[arg-type]


def reason_to_reject(update: Update, weights: Tensors, buffers: Tensors) -> str:
    """The reason why the server cannot use an update of the model that it sent; "" if it can."""
    wrong = misfit(weights, update.weights) or misfit(buffers, update.buffers)
    if wrong:
        return wrong
    name = not_finite(update.weights, update.buffers, update.payload)
    return f"{name!r} is not finite" if name else ""


_PARTS = ("weights", "buffers", "payload")


def _changed(tensors: Tensors, name: str, kind: str) -> Tensors:
    """``tensors`` with one of them damaged, if it is among them."""
    if name not in tensors:
        return tensors
    if kind == "missing":
        return {other: tensor for other, tensor in tensors.items() if other != name}
    return {**tensors, name: _broken(tensors[name], kind)}


def _broken(tensor: Tensor, kind: str) -> Tensor:
    if kind == "shape":
        return tensor.new_zeros(tensor.numel() + 1)
    broken = tensor.clone()
    broken[(0,) * broken.ndim] = float(kind)
    return broken
