"""Local steps as graphs: on an accelerator what a step computes is recorded once and replayed.

A step of a small network costs launches and Python there, not arithmetic (tests/bench/gpu.md). A graph launches all
kernels of a step at once. They are those of the step itself: its bits, but for sums that a card adds in any order.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from math import inf, isnan, nan
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from fedbench.core.errors import Unworkable
from fedbench.core.types import Tensors
from fedbench.rounds.executors.stack import PerClient, flat_of, mapped

IS_ON = os.environ.get("FEDBENCH_GRAPHS") != "0"
"""Whether steps are recorded at all."""
MOST = 32
"""The most graphs of one way to compute a step. Each size of a batch has one, and clients end their epochs with
batches of many sizes."""
ROUNDING, CLOSE = 1e-5, 1e-3
"""The largest differences, relative to the largest value, that are taken for sums in another order: of any step, and of
one that is not the same twice by itself either."""
_LEAST = 1e-12
"""The least value that differences are relative to."""
_NO_NUMBER = 1e30
"""What stands for NaN where results are compared, since a NaN also marks what a replay does not write."""


class OneClientOnly(Exception):
    """A step reads something that is known of one client or step alone."""


class NoTerms(Exception):
    """The methods that may add terms to the loss add none in this step."""


class Changed(Exception):
    """A replayed step gives something else than the step itself; the reason is to be told."""


def can_record(device: torch.device) -> bool:
    """Whether steps on ``device`` may be recorded."""
    return IS_ON and hasattr(torch.get_device_module(device), "CUDAGraph")


class Graphs:
    """The graphs of a run, by the kind of step.

    A kind is recorded when it is met a second time. The step is then computed three times: as it is, in the tensors
    that the graph will read, and by the graph. If these differ by more than the order of sums, or the step does what a
    graph cannot hold, nothing is recorded from then on.
    """

    def __init__(self) -> None:
        self._graphs: dict[Hashable, Graph] = {}
        self._met: Counter[Hashable] = Counter()
        self.obstacle = ""
        """Why nothing is recorded, in words of this package."""

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def told(self) -> str:
        """What became of the steps, to be put behind the executor's name."""
        if self.obstacle:
            return f", no graphs: {self.obstacle}"
        return ", steps as graphs" if self._graphs else ""

    def stop(self, error: Exception) -> None:
        """Neither record nor replay from now on."""
        self.obstacle = _in_words(error)
        self._graphs.clear()

    def replayed(
        self,
        kind: Hashable,
        tensors: PerClient,
        step: Callable[[PerClient], Tensors],
        alone: Callable[[], Tensors],
        *,
        is_compared: bool = False,
    ) -> Tensors | None:
        """What a graph of ``step`` gives for ``tensors``; None where there is none, or not yet.

        ``kind`` is what decides about the step beside the names and shapes of its tensors. ``alone`` is the step
        itself. Raises Changed where ``is_compared`` shows that the graph's answer is another one, and Unworkable where
        a recording that failed has left the device unusable.
        """
        if self.obstacle:
            return None
        kind = kind, _names(tensors), tuple((tuple(t.shape), t.stride(), t.dtype) for t in flat_of(tensors))
        graph = self._graphs.get(kind)
        if graph is not None:
            found = graph(tensors)
            if is_compared and not _agree(found, alone):
                raise Changed("its loss is not what it was when it was recorded")
            return found
        self._met[kind] += 1
        if self._met[kind] == 2 and len(self._graphs) < MOST:
            try:
                graph = Graph(step, tensors, next(iter(self._graphs.values()), None))
                if not _agree(graph(tensors), alone):
                    raise Changed("its steps are not the same twice")
                self._graphs[kind] = graph
            except (Unworkable, NoTerms):
                raise
            except Exception as error:
                # what is really wrong with the step, the step itself will say
                self.stop(error)
        return None


class Graph:
    """A function of tensors by name, recorded over tensors that stay where they are."""

    def __init__(self, step: Callable[[PerClient], Tensors], tensors: PerClient, other: Graph | None) -> None:
        """``tensors`` have the weights under "weights", and under "client" what seldom changes from step to step.

        The memory is shared with the ``other`` graphs of the run, since only one is replayed at a time.
        """
        device = next(iter(tensors["weights"].values())).device

        def alike(tensor: Tensor) -> Tensor:
            return torch.empty_like(_once(tensor), device=device).expand(tensor.shape)

        own = self._own = mapped(tensors, alike)
        self._last: list[tuple[ref[Tensor], int]] = []
        """The tensors under "client" that were copied last, and their versions."""
        self._step = step  # what it refers to stays where the graph reads it
        self._copy(tensors)
        with _without_waiting(device):
            step(own)
        backend = torch.get_device_module(device)
        self._graph = backend.CUDAGraph()
        # graphs that share memory are recorded on one stream, of the device of the tensors
        self._stream: Any = backend.Stream(device) if other is None else other._stream
        pool = None if other is None else other._graph.pool()
        try:
            # the current stream comes back even where ending the recording fails
            as_before = backend.stream(backend.current_stream(device))
            with backend.device(device), as_before, backend.graph(self._graph, pool=pool, stream=self._stream):
                self._found = step(own)
        except Exception as error:
            _require_usable(device, error)
            raise
        for value in self._found.values():  # what a replay doesn't write shows
            if value.is_floating_point():
                value.fill_(nan)

    def __call__(self, tensors: PerClient) -> Tensors:
        """Copies of what the graph gives for ``tensors``, which stay as they are."""
        self._copy(tensors)
        self._graph.replay()
        copies = [torch.empty_like(value) for value in self._found.values()]
        torch._foreach_copy_(copies, list(self._found.values()))
        return dict(zip(self._found, copies, strict=True))

    def _copy(self, tensors: PerClient) -> None:
        """Put ``tensors`` where the graph reads them."""
        sources, own = dict(tensors), dict(self._own)
        client, read = flat_of(sources.pop("client")), flat_of(own.pop("client"))
        last, self._last = self._last, [(ref(tensor), tensor._version) for tensor in client]
        pairs = list(zip(flat_of(own), flat_of(sources), strict=True))
        for i, tensor in enumerate(client):
            if not last or last[i][0]() is not tensor or last[i][1] != tensor._version:
                pairs.append((read[i], tensor))
        pairs = [(_once(to), _once(tensor)) for to, tensor in pairs]
        there = [(to, tensor) for to, tensor in pairs if tensor.device == to.device]
        with torch.no_grad():
            torch._foreach_copy_([to for to, _ in there], [tensor for _, tensor in there])
            for to, tensor in pairs:
                if tensor.device != to.device:
                    to.copy_(tensor)


def _once(tensor: Tensor) -> Tensor:
    """``tensor`` with a size of 1 where an axis repeats one value, as in `Tensor.expand`.

    A copy that repeats it as well is computed by the same kernels, and with the same rounding.
    """
    for axis, stride in enumerate(tensor.stride()):
        tensor = tensor if stride else tensor.narrow(axis, 0, 1)
    return tensor


def _in_words(error: Exception) -> str:
    if isinstance(error, OneClientOnly | Changed):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return "the card has too little memory for one"
    if isinstance(error, TypeError) and "mappingproxy" in str(error):
        return "its loss changes what the client keeps"
    return "its step reads values back, draws numbers or copies from the CPU"


def _require_usable(device: torch.device, error: Exception) -> None:
    """Raise Unworkable where a recording that failed with ``error`` has left ``device`` in the midst of it."""
    backend = torch.get_device_module(device)
    try:
        backend.synchronize(device)
        backend.empty_cache()
    except Exception:
        raise Unworkable(
            f"recording a local step as a CUDA graph failed ({type(error).__name__}), and the process can't go on; "
            "set the environment variable FEDBENCH_GRAPHS=0, so that none is recorded."
        ) from error


def _agree(found: Tensors, alone: Callable[[], Tensors]) -> bool:
    wanted = alone()
    gap = _gap(found, wanted)
    return gap <= ROUNDING or (gap <= CLOSE and _gap(alone(), wanted) > 0)


def _gap(one: Tensors, other: Tensors) -> float:
    """The largest difference of any tensor, relative to its largest value."""
    if one.keys() != other.keys():
        return inf
    gaps = [0.0]
    for name, tensor in other.items():
        # a run that diverges says so itself
        pair = one[name].nan_to_num(_NO_NUMBER), tensor.nan_to_num(_NO_NUMBER)
        if not torch.equal(*pair):
            gaps.append(float((pair[0] - pair[1]).abs().max()) / max(float(pair[1].abs().max()), _LEAST))
    return inf if any(map(isnan, gaps)) else max(gaps)


def _names(tensors: PerClient) -> tuple[object, ...]:
    return tuple((name, _names(value) if isinstance(value, dict) else None) for name, value in tensors.items())


@contextmanager
def _without_waiting(device: torch.device) -> Iterator[None]:
    """Within the block it is an error to wait for ``device``, as a graph cannot."""
    backend = torch.get_device_module(device)
    before = backend.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it doesn't see every wait
        backend.set_sync_debug_mode("error")
    try:
        yield
    finally:
        backend.set_sync_debug_mode(before)
