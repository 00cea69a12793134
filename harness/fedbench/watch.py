"""Tensors that hooks are handed stay as they are: what a method changes in place is noticed, and refused by name.

torch counts the changes of every tensor; the counts before and after a hook are compared. The hooks of a local step are
watched in a client's first step, and all of its training from beginning to end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedbench.errors import FedbenchError
from fedbench.hookspecs import STEPS, Hooks
from fedbench.models.inputs import FeatureInputs, ImageInputs, UncachedFeatures
from fedbench.shards import Shards
from fedbench.tasks import (
    AggregationTask,
    BroadcastTask,
    ClientTask,
    EvaluationTask,
    LocalStep,
    ModelSetup,
    ReportedTask,
    ServerData,
    StartTask,
)
from fedbench.types import Federation, LabelledBatch, Model, Split, Subset, TensorImages, UnlabelledBatch, Update
from fedbench.withheld import Pixels, Withheld

Marks = Callable[[list[Tensor]], list[Any]]
"""What tensors are compared by: something for each that is another where it was changed."""
_Path = tuple[Any, str | tuple[object]]
"""Where a tensor is: the path of what holds it, and its attribute or key there."""

_PARTS = {
    kind: tuple((f".{name}", attrgetter(name)) for name in names.split())
    for kind, names in {
        Federation: "train clients",
        Shards: "indices offsets ids",
        Split: "images labels domains",
        Withheld: "images domains",
        ModelSetup: "backbone.module",
        Model: "weights buffers constants",
        StartTask: "model state",
        BroadcastTask: "weights state",
        ClientTask: "received buffers payload inputs labels class_counts side state model",
        LocalStep: "weights batch task",
        LabelledBatch: "inputs index labels side",
        UnlabelledBatch: "inputs index side",
        Update: "weights buffers payload",
        ReportedTask: "reports weights buffers model state",
        AggregationTask: "weights buffers updates model state server_data",
        ServerData: "inputs labels",
        EvaluationTask: "model weights buffers inputs state client_state own",
        FeatureInputs: "features rows",
        UncachedFeatures: "images indices",
        ImageInputs: "images indices",
        Pixels: "_source",
        Subset: "source indices",
        TensorImages: "pixels",
    }.items()
}
"""By type, where the tensors of what a hook is handed are. Running statistics of a step are the model's to change."""


def versions(tensors: list[Tensor]) -> list[int]:
    """How often each was changed. Changes through ``.data`` or a NumPy view are not counted: `contents` shows them."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # tensors made in inference mode have no count
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def contents(tensors: list[Tensor]) -> list[bytes]:
    """The bytes of each: for tiny runs."""
    flat = [tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    return [tensor.numpy().tobytes() for tensor in flat]


def watched(hooks: Hooks, blamed: Mapping[str, str], marks: Marks = versions) -> Hooks:
    """The steps among ``hooks``; those in ``blamed`` refuse a method that changes what it is handed.

    ``blamed``: hook -> whose fault it is then.
    """
    steps = {hook: getattr(hooks, hook) for hook in STEPS}
    for hook, who in blamed.items():
        steps[hook] = _watched(steps[hook], hook, who, marks)
    return cast(Hooks, SimpleNamespace(**steps))


@contextmanager
def unchanged(handed: Iterable[tuple[str, object]], who: str, hook: str, marks: Marks = versions) -> Iterator[None]:
    """Raise FedbenchError where a tensor in what was ``handed`` under a name is another at the end of the block."""
    found: list[tuple[_Path, Tensor]] = []
    for name, value in handed:
        _find(value, (None, name), found)
    tensors = [tensor for _, tensor in found]
    before = marks(tensors)
    yield
    after = marks(tensors)
    if after == before:
        return
    changed = next(path for (path, _), was, now in zip(found, before, after, strict=True) if was != now)
    raise FedbenchError(
        f"{who} changes {_written(changed)} in place in the hook {hook}; what a hook is handed stays as it is: "
        "change a copy (.clone())."
    )


def _watched(answer: Callable[..., Any], hook: str, who: str, marks: Marks) -> Callable[..., Any]:
    place = f"{hook}, or one that it calls" if hook == "local_train" else hook

    def answered(**arguments: Any) -> Any:
        step = arguments.get("step")
        if step is not None and step.number:
            return answer(**arguments)
        with unchanged(arguments.items(), who, place, marks):
            return answer(**arguments)

    return answered


def _find(value: object, path: _Path, found: list[tuple[_Path, Tensor]]) -> None:
    """Add every tensor in ``value`` to ``found``."""
    parts = _PARTS.get(type(value))
    if parts is not None:
        for name, part in parts:
            _find(part(value), (path, name), found)
    elif isinstance(value, Tensor):
        found.append((path, value))
    elif isinstance(value, dict | MappingProxyType):
        for key, each in value.items():
            _find(each, (path, (key,)), found)
    elif isinstance(value, tuple):
        for position, each in enumerate(value):
            _find(each, (path, (position,)), found)
    elif isinstance(value, nn.Module):
        for name, tensor in value.state_dict(keep_vars=True).items():
            _find(tensor, (path, f".{name}"), found)


def _written(path: _Path) -> str:
    """The path as a method would write it: ``task.received['head.weight']``."""
    before, last = path
    return ("" if before is None else _written(before)) + (last if isinstance(last, str) else f"[{last[0]!r}]")
