"""What methods are handed: no labels that they are scored on, and tensors that have to stay as they are.

Withheld are the labels of test and validation data, those that a scenario hides, and the files of images. What a method
changes in place is noticed, and refused by name: torch counts the changes of every tensor, and the counts before and
after a hook are compared. The hooks of a local step are watched in a client's first step, and all of its training from
beginning to end. Where 20 clients train a linear head at once, this takes 0.4 % of a round of FedProx, and 2.4 % of one
of SCAFFOLD, which answers three hooks a client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedbench.core.errors import FedbenchError, MethodFault
from fedbench.core.federation import Federation, ImageSource, Shards, Split, Subset, TensorImages
from fedbench.core.method.answers import require
from fedbench.core.method.hooks import STEPS
from fedbench.core.method.tasks import (
    AggregationTask,
    BroadcastTask,
    ClientTask,
    EvaluationTask,
    Hooks,
    LocalStep,
    ModelSetup,
    ReportedTask,
    ServerData,
    StartTask,
)
from fedbench.core.types import LabelledBatch, Model, UnlabelledBatch, Update
from fedbench.models.clip.backbone import ClipBackbone
from fedbench.models.cnn.backbone import CnnBackbone
from fedbench.models.inputs import FeatureInputs, ImageInputs, UncachedFeatures


@dataclass(frozen=True, eq=False, repr=False)
class Pixels:
    """Images that can be read, and nothing else: their files have folders named after classes, or columns of labels."""

    _source: ImageSource

    def __len__(self) -> int:
        return len(self._source)

    def read(self, indices: Tensor) -> Tensor:
        """uint8 (b, 3, height, width)."""
        return self._source.read(indices)

    def content_hash(self) -> str:
        return self._source.content_hash()


class Withheld(Split):
    """A split without its labels: reading them is a MethodFault."""

    def __init__(self, split: Split, name: str) -> None:
        # as a frozen dataclass sets its fields; `labels` is none here
        of = {"domains": split.domains, "clients": split.clients}
        vars(self).update(of, images=Pixels(split.images), _name=name, _size=len(split))

    @property
    def labels(self) -> Tensor:
        name = vars(self)["_name"]
        raise MethodFault(f"the labels of {name} are withheld from methods; a method must do without them.")

    def __len__(self) -> int:
        return int(vars(self)["_size"])

    def __repr__(self) -> str:
        return f"Withheld({vars(self)['_name']})"


def withheld(federation: Federation) -> Federation:
    """``federation`` as the hook `federate` is handed it: the labels are those of the clients, unless hidden.

    Nobody knows unseen classes before they are tested.
    """
    train, validation, server = federation.train, federation.validation, federation.server
    hidden = Withheld(train, "the training split, which the scenario hides,")
    return replace(
        federation,
        train=_of_clients(federation) if federation.labels_visible else hidden,
        test=Withheld(federation.test, "the test split"),
        validation=None if validation is None else Withheld(validation, "the validation split"),
        server=None if server is None else Withheld(server, "the server's samples"),
        unseen=None,
        new_clients=(),
    )


def _of_clients(federation: Federation) -> Split:
    """The training split with the labels of the samples that clients hold, -1 elsewhere: others may be tested on."""
    train, held = federation.train, federation.held
    labels = torch.full_like(train.labels, -1)
    labels[held] = train.labels[held]
    return replace(train, images=Pixels(train.images), labels=labels)


def partitioned(scored: Federation, handed: Federation, answer: object, owner: str) -> Federation:
    """The federation ``scored``, with the clients of the ``answer`` to `federate`, which was ``handed`` it `withheld`.

    Raises MethodFault for an answer that changes anything else.
    """
    if answer is handed:
        return scored
    require(answer, Federation, "a Federation", owner, "federate")
    assert isinstance(answer, Federation)
    if scored.later:
        raise FedbenchError(
            f"{owner} deals the samples to other clients, and these clients' data drift; run it without."
        )
    for name in (field.name for field in fields(Federation) if field.name != "clients"):
        if getattr(answer, name) is not getattr(handed, name):
            raise MethodFault(
                f"{owner} answers the hook federate with another {name}; it may deal the training samples to other "
                "clients alone: return federation.with_clients(...)."
            )
    return scored.with_clients(answer.clients)


Marks = Callable[[list[Tensor]], list[Any]]
"""What tensors are compared by: something for each that is another where it was changed."""

_PARTS = {
    kind: tuple(names.split())
    for kind, names in {
        Federation: "train clients test validation server",
        Shards: "indices offsets ids",
        Split: "images labels domains",
        Withheld: "images domains",
        ModelSetup: "backbone",
        ClipBackbone: "module",
        CnnBackbone: "module",
        Model: "weights buffers constants",
        StartTask: "model state",
        BroadcastTask: "weights buffers state",
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
"""Where a hook's argument holds its tensors, by type. Running statistics of a step are the model's to change."""


def _getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    parts = attrgetter(*names)
    return parts if len(names) > 1 else lambda value: (parts(value),)


_PART = {kind: _getter(names) for kind, names in _PARTS.items()}


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


class Snapshot:
    """The tensors in what is about to be handed out, and what they are compared by afterwards."""

    def __init__(self, handed: Mapping[str, object], marks: Marks = versions) -> None:
        """``handed`` by the name under which a method knows it; a list stands for several of that name."""
        self._handed, self._marks = handed, marks
        self._tensors = _tensors_in(handed)
        self._before = marks(self._tensors)

    def require_unchanged(self, who: str, hook: str) -> None:
        """Raise MethodFault where one of the tensors has been changed: by ``who``, in the ``hook``."""
        after = self._marks(self._tensors)
        if after == self._before:
            return
        each = zip(self._tensors, self._before, after, strict=True)
        changed = next(tensor for tensor, before, now in each if before != now)
        named = (pair for name, value in self._handed.items() for pair in _named(value, name))
        # what a hook has replaced in the state is not found there any more
        name = next((name for name, tensor in named if tensor is changed), "a tensor that was kept in the state")
        raise MethodFault(
            f"{who} changes {name} in place in the hook {hook}; what a hook is handed stays as it is: change a copy "
            "(.clone())."
        )


def watched(hooks: Hooks, blamed: Mapping[str, str], marks: Marks = versions) -> Hooks:
    """The steps among ``hooks``; those in ``blamed`` refuse a method that changes what it is handed.

    ``blamed``: hook -> whose fault it is then.
    """
    steps = {hook: getattr(hooks, hook) for hook in STEPS}
    for hook, who in blamed.items():
        steps[hook] = _watched(steps[hook], hook, who, marks)
    return cast(Hooks, SimpleNamespace(**steps))


def _watched(answer: Callable[..., Any], hook: str, who: str, marks: Marks) -> Callable[..., Any]:
    place = f"{hook}, or one that it calls" if hook == "local_train" else hook

    def answered(**arguments: Any) -> Any:
        step = arguments.get("step")
        if step is not None and step.number:
            return answer(**arguments)
        before = Snapshot(arguments, marks)
        given = answer(**arguments)
        before.require_unchanged(who, place)
        return given

    return answered


def _tensors_in(handed: Mapping[str, object]) -> list[Tensor]:
    """All tensors. Without recursion and names, since this is done for every client and hook."""
    tensors: list[Tensor] = []
    left: list[Any] = [*handed.values()]
    model = None
    for value in left:  # which grows
        kind = type(value)
        if kind is Tensor:
            tensors.append(value)
        elif kind is dict or kind is MappingProxyType:
            left += value.values()
        elif kind is Model:
            left += () if value is model else _PART[kind](value)
            model = value  # once for all clients that train it
        elif kind in _PART:
            left += _PART[kind](value)
        elif kind is tuple or kind is list:
            left += value
        elif isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, nn.Module):
            left += value.state_dict(keep_vars=True).values()
    return tensors


def _named(value: object, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors with what a method would write for each: ``task.received['head.weight']``."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict | MappingProxyType):
        for key, each in value.items():
            yield from _named(each, f"{name}[{key!r}]")
    elif isinstance(value, list):
        for each in value:
            yield from _named(each, name)
    elif isinstance(value, tuple):
        for position, each in enumerate(value):
            yield from _named(each, f"{name}[{position}]")
    elif isinstance(value, nn.Module):
        yield from ((f"{name}.{each}", tensor) for each, tensor in value.state_dict(keep_vars=True).items())
    else:
        for part in _PARTS.get(type(value), ()):
            yield from _named(getattr(value, part), f"{name}.{part}")
