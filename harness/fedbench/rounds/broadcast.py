"""The server's broadcast to a client, and the task that the client makes of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from fedbench.core.method.answers import require
from fedbench.core.method.tasks import BroadcastTask, ClientTask
from fedbench.core.types import Broadcast, Tensors
from fedbench.rounds.metrics import size_in_bytes
from fedbench.rounds.private import completed, shared
from fedbench.rounds.run import Run
from fedbench.rounds.state import RunState


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
