"""A federation whose hidden labels are replaced by those that a method gives it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fedbench.core.errors import MethodFault, Unworkable
from fedbench.core.federation import Federation, Split
from fedbench.core.method.labelling import LabelTask
from fedbench.core.method.tasks import ModelSetup
from fedbench.core.types import FrozenEncoder, InputSource
from fedbench.plugins.assembly import Assembly


def labelled(
    federation: Federation,
    assembly: Assembly,
    setup: ModelSetup,
    features: Callable[[Split, FrozenEncoder], InputSource],
    *,
    is_run: bool,
) -> Federation:
    """``federation`` with the answer to the hook `label` for labels; as it is where no method answers.

    The hidden labels are in no part of it. Clients lose the samples without a label. A run that is only looked at
    (not ``is_run``) has labels in turn, since real ones would need every image encoded.
    """
    owner, train, shards = assembly.answers_first("label"), federation.train, federation.shards
    if federation.labels_visible:
        return federation
    if is_run:
        own = [client.indices for client in shards]
        answer = assembly.hooks.label(task=LabelTask(setup, partial(features, train), own, len(train)))
        if answer is None:
            return federation
        given = _checked(answer, len(train), federation.num_classes, owner)
    elif "labels" in assembly.provides:
        given = torch.arange(len(train)) % federation.num_classes
    else:
        return federation
    kept = [replace(client, indices=client.indices[given[client.indices] >= 0]) for client in shards]
    empty = [client.id for client in kept if not len(client.indices)]
    if empty:
        raise Unworkable(f"{owner} gives none of client {empty[0]}'s samples a label; let it label more of them.")
    # samples without a label are no client's; 0 stands for theirs, since labels count from 0
    split = replace(train, labels=given.clamp(min=0))
    return replace(federation, train=split, labels_visible=True).with_clients(kept)


def _checked(answer: object, count: int, classes: int, owner: str) -> Tensor:
    if not isinstance(answer, Tensor) or answer.dtype != torch.int64 or answer.shape != (count,):
        raise MethodFault(f"{owner} answers the hook label with no int64 tensor of shape ({count},).")
    if int(answer.min()) < -1 or int(answer.max()) >= classes:
        raise MethodFault(f"{owner} answers the hook label with a label that is not -1 to {classes - 1}.")
    return answer.cpu()
