"""Local steps as graphs: on an accelerator the gradients of a step are recorded once and replayed.

A step of a small network costs launches and Python there, not arithmetic (tests/bench/gpu.md). A graph launches all
kernels of a step at once. They are those of the step itself, so the weights end with the same bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from fedbench.core.method.tasks import ClientTask, Hooks, LocalStep
from fedbench.core.types import LabelledBatch, StepGradients
from fedbench.rounds.executors.gradients import Missing, OneClientOnly, batch_of, shared_task, task_of
from fedbench.rounds.executors.stack import PerClient, flat_of, mapped

MOST = 16
"""The most graphs of a run. Each batch size has one, and clients end their epochs with batches of many sizes."""
CLOSE = 0.05
"""The largest difference, relative to the largest value, where the step itself is not the same twice either."""

Kind = tuple[object, ...]


class Changed(Exception):
    """A replayed step has other gradients than the step itself."""


def can_record(task: ClientTask) -> bool:
    """Whether the weights of ``task`` lie on a device that has graphs."""
    device = next((weight.device for weight in task.received.values()), torch.device("cpu"))
    return hasattr(torch.get_device_module(device), "CUDAGraph")


class Recording:
    """The hooks of a run, of which `local_gradients` is answered by graphs where it can be.

    A kind of step is recorded when it is met a second time. It is then computed three times: as it is, in the tensors
    that the graph will read, and by the graph. If these differ in one bit, or the step does what a graph cannot hold,
    nothing is recorded and `told` says why.
    """

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self._graphs: dict[Kind, _Graph] = {}
        self._met: Counter[Kind] = Counter()
        self._is_due = True
        self.obstacle = ""
        """Why no step is recorded."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hooks, name)

    @property
    def told(self) -> str:
        """What became of the steps, to be put behind the executor's name."""
        if self.obstacle:
            return f"; no graphs: {self.obstacle}"
        return "; steps as graphs" if self._graphs else ""

    def begin(self) -> None:
        """Compare the next step that is replayed, as one of every exchange."""
        self._is_due = True

    def local_gradients(self, step: LocalStep) -> StepGradients:
        """The gradients of the step. Raises Changed where a graph's are not those of the step itself."""
        if self.obstacle:
            return self._hooks.local_gradients(step=step)
        kind = _kind(step)
        graph = self._graphs.get(kind)
        if graph is not None:
            if self._is_due:
                self._is_due = False
                self._require_same(graph, step)
            return graph(step)
        self._met[kind] += 1
        if self._met[kind] == 2 and len(self._graphs) < MOST:
            try:
                graph = _Graph(self._hooks, step, next(iter(self._graphs.values()), None))
                self._require_same(graph, step)
                self._graphs[kind] = graph
            except Exception as error:
                # what is really wrong with the step, the step itself will say
                self.obstacle = _in_words(error)
                self._graphs.clear()
        return self._hooks.local_gradients(step=step)

    def _require_same(self, graph: _Graph, step: LocalStep) -> None:
        replayed, alone = graph.tried(step), self._alone(step)
        if _same(replayed, alone):
            return
        is_steady = _same(self._alone(step), alone)
        if is_steady or not all(map(_close, replayed.values(), alone.values())):
            raise Changed

    def _alone(self, step: LocalStep) -> dict[str, Tensor]:
        """What the step itself gives, with statistics of its own."""
        buffers = {name: value.clone() for name, value in step.buffers.items()}
        own = LocalStep(step.weights, buffers, step.batch, step.task, step.number, step.is_own)
        return _named(self._hooks.local_gradients(step=own), buffers)


class _Graph:
    """The gradients of one kind of step, recorded over tensors that stay where they are."""

    def __init__(self, hooks: Hooks, step: LocalStep, other: _Graph | None) -> None:
        """It shares the memory of the ``other`` graphs of the run, since only one is replayed at a time."""
        device = next(iter(step.weights.values())).device
        own = self._own = mapped(_tensors(step), lambda tensor: torch.empty_like(tensor, device=device))
        self._last: list[tuple[Tensor, int]] = []
        """What was copied last of the client's tensors that stay as they are from step to step, and their versions."""
        for weight, original in zip(own["weights"].values(), step.weights.values(), strict=True):
            weight.requires_grad_(original.requires_grad)
        template = replace(shared_task(step.task), hooks=hooks, round=cast(int, Missing("round")))
        task = task_of(template, own["client"])
        batch, number = batch_of(own["samples"]), cast(int, _Later("number of the step")) if step.number else 0

        def gradients() -> StepGradients:
            return hooks.local_gradients(
                step=LocalStep(own["weights"], own["buffers"], batch, task, number, step.is_own)
            )

        self._copy(step)
        with _without_waiting(device):
            gradients()
        backend = torch.get_device_module(device)
        self._graph = backend.CUDAGraph()
        with backend.graph(self._graph, pool=None if other is None else other._graph.pool()):
            self._found = gradients()

    def __call__(self, step: LocalStep) -> StepGradients:
        """Copies of what the graph finds; the step's running statistics are changed as it changes them."""
        found = self.tried(step)
        loss = found.pop(_LOSS)
        for name, value in step.buffers.items():
            value.copy_(found.pop(_BUFFER + name))
        return StepGradients(found, loss)

    def tried(self, step: LocalStep) -> dict[str, Tensor]:
        """What the step's `__call__` would give, by name; the step stays as it is."""
        self._copy(step)
        self._graph.replay()
        found = _named(self._found, self._own["buffers"])
        copies = [torch.empty_like(value) for value in found.values()]
        torch._foreach_copy_(copies, list(found.values()))
        return dict(zip(found, copies, strict=True))

    def _copy(self, step: LocalStep) -> None:
        """Put the tensors of ``step`` where the graph reads them."""
        sources, own = _tensors(step), dict(self._own)
        client, read = flat_of(sources.pop("client")), flat_of(own.pop("client"))
        last, self._last = self._last, [(tensor, tensor._version) for tensor in client]
        pairs = list(zip(flat_of(own), flat_of(sources), strict=True))
        for i, (tensor, version) in enumerate(self._last):
            if not last or last[i][0] is not tensor or last[i][1] != version:
                pairs.append((read[i], tensor))
        there = [(to, tensor) for to, tensor in pairs if tensor.device == to.device]
        with torch.no_grad():
            torch._foreach_copy_([to for to, _ in there], [tensor for _, tensor in there])
            for to, tensor in pairs:
                if tensor.device != to.device:
                    to.copy_(tensor)


class _Later(Missing):
    """The number of a step that is not the first of its round; no more is known of it."""

    def __bool__(self) -> bool:  # type: ignore[override]
        return True

    def __eq__(self, other: object) -> bool:  # type: ignore[override]
        return False if other == 0 else self._refuse()

    __hash__ = None  # type: ignore[assignment]


_LOSS, _BUFFER = "loss of the step", "buffer "


def _tensors(step: LocalStep) -> PerClient:
    """All tensors that a hook of the step may read."""
    task, batch = step.task, step.batch
    samples: PerClient = {"inputs": batch.inputs, "index": batch.index, "side": dict(batch.side)}
    if isinstance(batch, LabelledBatch):
        samples["labels"] = batch.labels
    client: PerClient = {"received": task.received, "payload": task.payload, "buffers": task.buffers}
    client["state"] = {method: dict(kept) for method, kept in sorted(task.state.items())}
    if task.class_counts is not None:
        client["class_counts"] = task.class_counts
    return {"weights": step.weights, "buffers": step.buffers, "client": client, "samples": samples}


def _kind(step: LocalStep) -> Kind:
    """A key that is equal for steps which one graph can hold."""
    tensors = _tensors(step)
    shapes = tuple((tuple(t.shape), t.stride(), t.dtype, t.requires_grad) for t in flat_of(tensors))
    return (_names(tensors), shapes, id(step.model), step.task.exchange, step.number == 0, step.is_own)


def _names(tensors: PerClient) -> tuple[object, ...]:
    return tuple((name, _names(value) if isinstance(value, dict) else None) for name, value in tensors.items())


def _named(found: StepGradients, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    changed = {_BUFFER + name: value for name, value in buffers.items()}
    return {**found.by_name, **changed, _LOSS: found.loss}


def _same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _close(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= CLOSE * other.abs().max() + 1e-6)


@contextmanager
def _without_waiting(device: torch.device) -> Iterator[None]:
    """Within the block it is an error to wait for ``device``, as a graph cannot."""
    backend = torch.get_device_module(device)
    before = backend.get_sync_debug_mode()
    backend.set_sync_debug_mode("error")
    try:
        yield
    finally:
        backend.set_sync_debug_mode(before)


def _in_words(error: Exception) -> str:
    """The error in a sentence of this package; records contain no message of Python or PyTorch."""
    if isinstance(error, OneClientOnly):
        return str(error)
    if isinstance(error, Changed):
        return "its steps are not the same twice"
    if isinstance(error, TypeError) and "mappingproxy" in str(error):
        return "its loss changes what the client keeps"
    return "its step reads values back, draws numbers or copies from the CPU"
