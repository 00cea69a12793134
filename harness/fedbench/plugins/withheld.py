"""What methods are not handed: labels that they are scored on, those that a scenario hides, and the files of images."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from fedbench.core.errors import FedbenchError, MethodFault
from fedbench.core.federation import Federation, ImageSource, Split
from fedbench.core.method.answers import require


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
        """That of the images."""
        return self._source.content_hash()


class Withheld(Split):
    """A split without its labels: reading them is a MethodFault."""

    def __init__(self, split: Split, name: str) -> None:
        # as a frozen dataclass sets its fields; `labels` is none here
        of = {"domains": split.domains, "clients": split.clients}
        vars(self).update(of, images=Pixels(split.images), _name=name, _size=len(split))

    @property
    def labels(self) -> Tensor:
        """MethodFault."""
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
