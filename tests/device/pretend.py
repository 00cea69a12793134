"""A device that is not the CPU, made of the CPU: PyTorch's backend for others ("PrivateUse1"), written in Python.

A tensor of it wraps one on the CPU, on which every operation is carried out, so that a run on it must end with the bits
of a run on the CPU. Before that it is held to what an accelerator demands: all tensors of an operation lie on it, but
for what CUDA takes from the CPU as well (tensors without axes, and the indices of a tensor of its own), and random
numbers come from a generator of its own. Reading values back is counted, and refused within `without_reading`.

Its graphs hold the operations that were carried out while they were recorded, on the CPU's tensors. Replaying them
reads what these hold then, and writes where they wrote. What a CUDA graph cannot hold is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial, reduce
from typing import Any, Self
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

NAME = "pretend"
_COPIES = {"aten::copy_", "aten::_to_copy"}
_INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"}
_OF_ONE_DEVICE = {
    *("aten::cat", "aten::stack", "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::logaddexp"),
}
"""Operations that take not even tensors without axes from elsewhere."""
_FACTORIES = (
    *("_to_copy.default", "arange.default", "arange.start", "arange.start_step", "eye.default", "eye.m"),
    *("linspace.default", "randperm.default", "randperm.generator"),
)
"""What PyTorch would make by resizing an empty tensor, and a copy that ``torch.tensor`` makes without the fallback."""
_SCALAR = "aten::_local_scalar_dense"

reads: list[str] = []
"""The operations that have read values back from the device: each would wait for all that it has still to do."""
sends: list[str] = []
"""The operations that have copied values from the CPU, which wait as well."""
_refusing: list[bool] = []


class PretendTensor(Tensor):
    """A tensor on the device."""

    raw: Tensor
    """Where its values are: on the CPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, raw: Tensor) -> Self:
        facts = {"strides": raw.stride(), "storage_offset": raw.storage_offset(), "dtype": raw.dtype}
        made = Tensor._make_wrapper_subclass(cls, raw.size(), **facts, device=device())  # type: ignore[attr-defined]
        made.raw = raw
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Carry out an operation on a tensor of the device."""
        return _carried_out(operation, *args, **(kwargs or {}))

    def tolist(self) -> Any:
        """The values, read back."""
        _read("tolist")
        return self.raw.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        """Refused, as of any tensor that is not on the CPU."""
        raise TypeError(f"can't convert {NAME} device type tensor to numpy; use Tensor.cpu() to copy it first")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PretendTensor({self.raw!r})"


def device() -> torch.device:
    """The device, which exists from the first call on."""
    _register()
    return torch.device(NAME, 0)


@contextmanager
def without_reading() -> Iterator[None]:
    """Within the block reading values back is an error."""
    _refusing.append(True)
    try:
        yield
    finally:
        _refusing.pop()


class CUDAGraph:
    """Operations to be repeated, in the device's module under the name that CUDA's has."""

    def __init__(self) -> None:
        self.steps: list[tuple[Any, Any, Any, Any]] = []
        """An operation, its arguments and what it gave."""

    def replay(self) -> None:
        for operation, args, kwargs, given in self.steps:
            found = operation(*args, **kwargs)
            for old, new in zip(tree_leaves(given), tree_leaves(found), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def pool(self) -> None:
        return None


_recording: list[CUDAGraph] = []


@contextmanager
def graph(recorded: CUDAGraph, pool: object = None, stream: object = None) -> Iterator[None]:
    """Record what is done within the block. Unlike CUDA, the pretend device does it as well."""
    _recording.append(recorded)
    try:
        yield
    finally:
        _recording.pop()


def Stream(device: object) -> None:
    return None


def current_stream(device: object) -> None:
    return None


def stream(stream: object) -> Any:
    return nullcontext()


def synchronize(device: object) -> None: ...


def empty_cache() -> None: ...


def get_sync_debug_mode() -> str:
    return "error" if _refusing else "default"


def set_sync_debug_mode(mode: str) -> None:
    _refusing[:] = [True] if mode == "error" else []


_Generator = torch.Generator
_of_device: WeakValueDictionary[int, torch.Generator] = WeakValueDictionary()
"""Generators of the device by their addresses: an operation meets them as other objects."""


class Generator(_Generator):
    """What takes the place of ``torch.Generator``: PyTorch makes none for a backend written in Python."""

    def __new__(cls, device: Any = "cpu") -> Self:
        made = super().__new__(cls)
        if torch.device(device).type == NAME:
            _of_device[made._cdata] = made  # type: ignore[attr-defined]
        return made


@cache
def _register() -> tuple[torch.library.Library, ...]:
    backend_registration._setup_privateuseone_for_python_backend(NAME)  # type: ignore[no-untyped-call]
    there = torch.get_device_module(NAME)
    for part in (CUDAGraph, graph, Stream, current_stream, stream, synchronize, empty_cache):
        setattr(there, part.__name__, part)
    there.get_sync_debug_mode, there.set_sync_debug_mode = get_sync_debug_mode, set_sync_debug_mode
    there.device = stream
    every, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    every.fallback(_carried_out, "PrivateUse1")  # type: ignore[no-untyped-call]
    for name in _FACTORIES:
        operation = reduce(getattr, name.split("."), torch.ops.aten)
        aten.impl(name.removesuffix(".default"), partial(_carried_out, operation), "PrivateUse1")
    return every, aten  # for as long as the process lasts


def _carried_out(operation: Any, *args: Any, **kwargs: Any) -> Any:
    name = operation._schema.name
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    ours = [tensor for tensor in tensors if isinstance(tensor, PretendTensor)]
    others = [tensor for tensor in tensors if not isinstance(tensor, PretendTensor)]
    target = torch.device(kwargs["device"]) if kwargs.get("device") is not None else device()
    _check_devices(name, args, ours, others)
    _check_generators(name, (args, kwargs), target)
    if name == _SCALAR or (ours and name in _COPIES and _lands_on_cpu(name, args, target)):
        _read(name)
    _check_sends(name, args, ours, others)
    by_raw = {id(tensor.raw): tensor for tensor in ours} | {id(tensor): tensor for tensor in others}
    if name.startswith("aten::_foreach") and name.endswith("_"):
        torch.autograd.graph.increment_version(args[0])  # as for other devices
    lowered = _lowered(args), _lowered(kwargs)
    result = operation(*lowered[0], **lowered[1])
    if _recording and target.type == NAME:
        _record(operation, others, *lowered, result)

    def raised(value: Any) -> Any:
        if not isinstance(value, Tensor) or id(value) in by_raw:
            return by_raw.get(id(value), value)
        return PretendTensor(value) if target.type == NAME else value

    return tree_map(raised, result)


def _record(operation: Any, others: list[Tensor], args: Any, kwargs: Any, result: Any) -> None:
    if kwargs.get("generator") is not None:
        raise RuntimeError("a graph is recorded, and cannot draw from this generator")
    fixed = {id(tensor): tensor.clone() for tensor in others}  # what CUDA is given by value
    args, kwargs = tree_map(lambda value: fixed.get(id(value), value), (args, kwargs))
    _recording[-1].steps.append((operation, args, kwargs, result))


def _read(name: str) -> None:
    reads.append(name)
    if _refusing or _recording:
        raise RuntimeError(f"{name} reads values back from the device within a local step")


def _lowered(arguments: Any) -> Any:
    def lowered(value: Any) -> Any:
        if isinstance(value, PretendTensor):
            return value.raw
        return torch.device("cpu") if isinstance(value, torch.device) and value.type == NAME else value

    return tree_map(lowered, arguments)


def _check_devices(name: str, args: Any, ours: list[Any], others: list[Tensor]) -> None:
    allowed: Callable[[Tensor], bool] = lambda tensor: tensor.ndim == 0 and name not in _OF_ONE_DEVICE  # noqa: E731
    if name in _INDEXED and isinstance(args[0], PretendTensor):
        indices = {id(index) for index in args[1] if index is not None}
        others = [tensor for tensor in others if id(tensor) not in indices]
    if ours and name not in _COPIES and not all(map(allowed, others)):
        where = ", ".join(str(tuple(tensor.shape)) for tensor in others if not allowed(tensor))
        raise RuntimeError(f"{name} mixes devices: a tensor of shape {where} is on the CPU, others are on {NAME}")


def _check_sends(name: str, args: Any, ours: list[Any], others: list[Tensor]) -> None:
    is_copy = name in _COPIES and not ours or name == "aten::copy_" and others and isinstance(args[0], PretendTensor)
    if is_copy or (name in _INDEXED and ours and others):
        sends.append(name)
        if _recording:
            raise RuntimeError("a graph is recorded, and cannot hold a copy from the CPU")


def _check_generators(name: str, arguments: Any, target: torch.device) -> None:
    for found in tree_leaves(arguments):
        if isinstance(found, _Generator) and (found._cdata in _of_device) != (target.type == NAME):
            raise RuntimeError(f"{name} draws numbers for {target} from a generator of another device")


def _lands_on_cpu(name: str, args: Any, target: torch.device) -> bool:
    return target.type == "cpu" if name == "aten::_to_copy" else not isinstance(args[0], PretendTensor)
