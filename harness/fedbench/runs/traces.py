"""What a run leaves behind in its process that the next run would meet.

Only runs whose plug-ins all come with fedbench share a process (`fedbench.runs.engines.worker`). Before each of them
random generators and warning filters are set back. After each, torch's switches, the environment and the tensors that
are kept for other runs (data, towers, texts) are compared with what they were. A difference ends the process.
"""

from __future__ import annotations

import gc
import os
import random
import types
import warnings
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from fedbench.runs.untouched import computes_otherwise, switches

_SAMPLE = 256
"""Values of a kept tensor that are compared."""
_ATOMS = (type, types.ModuleType, types.FunctionType, types.CodeType, types.FrameType, types.MethodType, property)
"""What a search for tensors does not enter."""


class Traces:
    """What this process was like before a run, and whether it still is."""

    def __init__(self) -> None:
        self._generators = (random.getstate(), np.random.get_state(), torch.get_rng_state())
        self._filters = list(warnings.filters)
        self._state: Mapping[str, object] = {}
        self._kept: list[object] = []
        self._tensors: list[tuple[Tensor, int, int, Tensor]] = []

    def begin(self, kept: Iterable[object]) -> None:
        """A run begins, which reads what is ``kept`` for others."""
        random.setstate(self._generators[0])
        np.random.set_state(self._generators[1])
        torch.set_rng_state(self._generators[2])
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.manual_seed_all(torch.initial_seed())
        if torch.backends.mps.is_available():
            torch.mps.manual_seed(torch.initial_seed())
        warnings.filters[:] = self._filters  # type: ignore[index]
        self._kept = [one for one in kept if one is not None]
        self._state = _state()
        self._tensors = [(one, one._version, one.data_ptr(), _sample(one)) for one in _tensors_of(self._kept)]

    def changed(self) -> str:
        """What the run has changed for those after it, in words; "" where nothing."""
        try:
            now = _state()
            for name, value in self._state.items():
                if now[name] != value:
                    return name
            for tensor, version, where, sample in self._tensors:
                if (tensor._version, tensor.data_ptr()) != (version, where) or not torch.equal(_sample(tensor), sample):
                    return "a tensor that other runs read"
        except Exception as error:  # the switches that it left may forbid any computation
            return f"something that can't be compared ({type(error).__name__})"
        modules = (getattr(one, "module", None) for one in self._kept)
        if any(isinstance(module, nn.Module) and computes_otherwise(module) for module in modules):
            return "a network that other runs read"
        return ""


def _state() -> Mapping[str, object]:
    return {**switches(), "environment": dict(os.environ), "current folder": os.getcwd(), "numpy.seterr": np.geterr()}


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(len(flat) // _SAMPLE, 1)].clone()


def _tensors_of(roots: Iterable[object]) -> list[Tensor]:
    """All tensors that ``roots`` refer to, over however many objects."""
    seen: set[int] = set()
    tensors: list[Tensor] = []
    waiting = list(roots)
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, _ATOMS):
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            tensors.append(one)
        else:
            waiting += filter(gc.is_tracked, gc.get_referents(one))
    return tensors
