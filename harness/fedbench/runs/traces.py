"""What a run leaves behind in its process that the next run would meet: seen by comparing cheap fingerprints.

Random generators and filters of warnings are set back before every run. All else that is not as it was before the run
is reason to end the process, and the next run begins in a new one. Compared are

- torch's switches (`fedbench.runs.untouched`), its modes and hooks of all modules, denormal numbers, numpy's errors;
- environment, current folder, umask, locale, import path, limits of Python, its collector, hooks and logging;
- handlers of signals and timers, the standard streams, threads and child processes;
- modules and classes of fedbench, of what registers methods, and of what they compute with: every name still has its
  object, functions their code and defaults; fedbench's classes have no new names, and no module hides one of Python's;
- every tensor that is kept from run to run (data, towers, texts, cached features): its object, its place, how often it
  was changed, and a sample of its values, for changes through ``.data`` or numpy, which torch does not count; whether
  a kept network is in training mode or has hooks.

A change made on purpose to get past this is not found: a value beside the sample, an object inside a list.
"""

from __future__ import annotations

import builtins
import functools
import gc
import locale
import logging
import os
import random
import signal
import sys
import threading
import types
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from fedbench.kinds.registry import METHOD, installed
from fedbench.runs.untouched import computes_otherwise, switches
from fedbench.toolkit.fedavg import FedAvg

_WATCHED = (
    *("torch", "torch.nn", "torch.optim", "torch.autograd", "torch.func", "torch.linalg", "torch._tensor", "numpy"),
    *("numpy.random", "builtins", "math", "random", "json", "pickle", "copy", "hashlib", "itertools", "functools"),
    *("collections", "os", "os.path", "time", "pathlib", "dataclasses", "importlib", "pluggy", "sys", "threading"),
)
"""Modules whose names are compared, beside all of fedbench and what registers methods."""
_WATCHED_BELOW = ("torch.nn.", "torch.optim.", "pluggy.")
_SAMPLE = 256
"""Values of a kept tensor that are compared."""
_ATOMS = (type, types.ModuleType, types.FunctionType, types.CodeType, types.FrameType, types.MethodType, property)
"""What a search for tensors does not enter."""


class Traces:
    """What this process was like before its first run, and whether it still is."""

    def __init__(self) -> None:
        self._generators = (random.getstate(), np.random.get_state(), torch.get_rng_state())
        self._filters = list(warnings.filters)
        self._packages = {"fedbench", *(point.module.partition(".")[0] for point in installed(METHOD))}
        self._own = _own_methods()
        for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
            kind([torch.zeros(1)])  # torch wraps its step when the first one is made
        self._state: Mapping[str, object] = {}
        self._code: dict[str, tuple[object, list[object]]] = {}
        self._tensors: dict[int, tuple[Tensor, int, int, Tensor]] = {}
        self._kept: list[object] = []
        self._seen: set[str] = set()
        self._caches: list[object] = []
        """Of functions of fedbench, what they keep of their calls."""
        self._extend()

    def begin(self, method: str, kept: Iterable[object]) -> None:
        """A run of ``method`` begins, which reads what is ``kept`` for others."""
        if self._own.keys() and not self._own.keys() >= set(method.split("+")):
            # whatever somebody else's method changes in one of ours is seen only where ours is imported
            for point in self._own.values():
                point.load()
            self._own = {}
        random.setstate(self._generators[0])
        np.random.set_state(self._generators[1])
        torch.set_rng_state(self._generators[2])
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.manual_seed_all(torch.initial_seed())
        warnings.filters[:] = self._filters  # type: ignore[index]
        self._kept = [one for one in kept if one is not None]
        self._state = _state()
        self._extend()

    def changed(self) -> str:
        """What the run has changed for those after it, in words; "" where nothing."""
        now = _state()
        for name, value in self._state.items():
            if now[name] != value:
                return name
        for name, (holder, before) in self._code.items():
            if _differs(name, holder, before):
                return f"the code of {name}"
        for tensor, version, where, sample in self._tensors.values():
            if (tensor._version, tensor.data_ptr()) != (version, where) or not torch.equal(_sample(tensor), sample):
                return "a tensor that other runs read"
        if any(isinstance(root, nn.Module) and computes_otherwise(root) for root in map(_module_of, self._kept)):
            return "a network that other runs read"
        return ""

    def _extend(self) -> None:
        """Note what has been imported and loaded since the last time."""
        for name in sys.modules.keys() - self._seen:
            self._seen.add(name)
            module, top = sys.modules[name], name.partition(".")[0]
            is_ours = top in self._packages
            if not isinstance(module, types.ModuleType) or not (
                is_ours or name in _WATCHED or name.startswith(_WATCHED_BELOW)
            ):
                continue
            self._code[name] = module, _insides(module)
            for value in list(vars(module).values()):
                if isinstance(value, type) and value.__module__ == name:
                    self._code[f"{name}.{value.__qualname__}"] = value, _insides(value)
                elif isinstance(value, types.FunctionType) and is_ours:
                    self._code[f"{name}.{value.__qualname__}()"] = value, _insides(value)
                elif isinstance(value, functools._lru_cache_wrapper) and is_ours:
                    self._caches.append(value)
        before, self._tensors = self._tensors, {}
        for tensor in _tensors_of([*self._kept, *self._caches]):
            known = before.get(id(tensor))  # held, so that no other has its id
            self._tensors[id(tensor)] = known or (tensor, tensor._version, tensor.data_ptr(), _sample(tensor))


def _own_methods() -> dict[str, Any]:
    """By name, those of the distribution that fedbench comes in."""
    points = installed(METHOD)
    ours = {point.dist.name for point in points if point.name == FedAvg.name and point.dist is not None}
    return {point.name: point for point in points if point.dist is not None and point.dist.name in ours}


def _state() -> Mapping[str, object]:
    umask = os.umask(0)
    os.umask(umask)
    root = logging.getLogger()
    numbers = [number for number in signal.valid_signals() if number not in (signal.SIGKILL, signal.SIGSTOP)]
    timer = signal.getitimer(signal.ITIMER_REAL) if hasattr(signal, "getitimer") else ()
    hooks = (sys.excepthook, sys.displayhook, sys.breakpointhook, sys.unraisablehook, threading.excepthook)
    tiny = torch.tensor([1e-40])
    return {
        **switches(),
        "torch.set_flush_denormal": float(tiny.double() / 2 + tiny.mul(1.0).double()) > 0,
        "torch.autograd.set_detect_anomaly": torch.is_anomaly_enabled(),
        "hooks of all modules": [len(value) for name, value in vars(modules).items() if name.startswith("_global_")
                                 and isinstance(value, dict)],
        "torch's modes": torch._C._len_torch_function_stack(),
        "numpy.seterr": np.geterr(),
        "environment": (dict(os.environ), os.getcwd(), umask, locale.setlocale(locale.LC_ALL)),
        "sys": (list(sys.path), list(sys.meta_path), sys.getrecursionlimit(), sys.getswitchinterval(), hooks,
                sys.gettrace(), sys.getprofile()),
        "gc": (gc.isenabled(), gc.get_threshold(), list(gc.callbacks)),
        "logging": (root.manager.disable, root.level, list(root.handlers)),
        "signals": ([signal.getsignal(number) for number in numbers], timer),
        "standard streams": [sys.stdin, sys.stdout, sys.stderr, *map(_file, (0, 1, 2))],
        "threads": {thread.ident for thread in threading.enumerate()},
        "child processes": _has_children(),
    }  # fmt: skip


def _file(number: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(number)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _has_children() -> bool:
    if not hasattr(os, "waitid"):
        return False
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _insides(holder: object) -> list[object]:
    """What a function is made of, or the values of all names of a module or class, in their order."""
    if isinstance(holder, types.FunctionType):
        return [holder.__code__, holder.__defaults__, holder.__kwdefaults__, holder.__closure__]
    return list(vars(holder).values())


def _differs(name: str, holder: object, before: list[object]) -> bool:
    if isinstance(holder, types.ModuleType) and sys.modules.get(name) is not holder:
        return True
    now = _insides(holder)
    if [*map(id, now[: len(before)])] != [*map(id, before)]:
        return True
    if len(now) == len(before):
        return False
    # in a module a new name may hide Python's own, in a class that of its base; Python adds some with underscores
    new = {key for key in list(vars(holder))[len(before) :] if not key.startswith("__")}
    return name.startswith("fedbench") and bool(new) if isinstance(holder, type) else bool(new & vars(builtins).keys())


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(len(flat) // _SAMPLE, 1)].clone()


def _module_of(kept: object) -> object:
    return getattr(kept, "module", None)


def _tensors_of(roots: Iterable[object]) -> list[Tensor]:
    """All tensors that ``roots`` refer to, over however many objects."""
    seen: set[int] = set()
    found: list[Tensor] = []
    waiting = list(roots)
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, _ATOMS):
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            found.append(one)
        else:
            waiting += filter(gc.is_tracked, gc.get_referents(one))
    return found
