"""A federation whose missing labels are those that a method gives it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fedbench.core.errors import Unworkable
from fedbench.core.federation import Federation, Shards, Split
from fedbench.core.method.answers import require_labels
from fedbench.core.method.tasks import LabelledSamples, LabelTask, ModelSetup
from fedbench.core.types import FrozenEncoder, InputSource
from fedbench.plugins.assembly import Assembly
from fedbench.plugins.withheld import Withheld


def labelled(
    federation: Federation,
    assembly: Assembly,
    setup: ModelSetup,
    features: Callable[[Split, FrozenEncoder], InputSource],
    *,
    is_run: bool,
) -> tuple[Federation, Tensor | None]:
    """``federation`` with the answer to the hook `label` where clients have no label, and which samples these are.

    (n,) bool, None where no method gives labels: then the federation has those that are there, or stays without where
    they are hidden. Clients lose the samples without a label; who has none left takes no part. The hidden labels are
    in no part of it. A run that is only looked at (not ``is_run``) has labels in turn, since real ones would need
    every image encoded.
    """
    train, shards, is_hidden = federation.train, federation.shards, not federation.labels_visible
    own = torch.full((len(train),), -1) if is_hidden else train.labels
    missing = torch.zeros(len(train), dtype=torch.bool)
    missing[federation.held] = own[federation.held] < 0
    if not missing.any():
        return federation, None
    given = None
    if "labels" in assembly.provides or is_hidden:
        given = _given(federation, missing, assembly, setup, features, is_run=is_run)
    if given is None and is_hidden:
        return federation, None
    labels = own if given is None else torch.where(missing, given, own)
    kept, *later = [
        [replace(client, indices=client.indices[labels[client.indices] >= 0]) for client in stretch]
        for stretch in (shards, *federation.later)
    ]
    if not any(len(client.indices) for client in kept):
        raise Unworkable(f"{assembly.answers_first('label')} gives no client's samples a label; let it label more.")
    # samples without a label are no client's; 0 stands for theirs, since labels count from 0
    split = replace(train, labels=labels.clamp(min=0))
    moved = tuple(map(Shards.of, later))
    whole = replace(federation, train=split, labels_visible=True, clients=kept, later=moved)
    return whole, None if given is None else missing


def _given(
    federation: Federation,
    missing: Tensor,
    assembly: Assembly,
    setup: ModelSetup,
    features: Callable[[Split, FrozenEncoder], InputSource],
    *,
    is_run: bool,
) -> Tensor | None:
    count, classes, server = len(federation.train), federation.num_classes, federation.server
    if not is_run:
        return torch.arange(count) % classes if "labels" in assembly.provides else None
    # the task is handed out: what it can reach has no labels
    images = Withheld(federation.train, "the clients' samples")
    of_server = None
    if server is not None and "server_labels" in assembly.requires:
        pictures = Withheld(server, "the server's samples")
        of_server = LabelledSamples(lambda encoder: features(pictures, encoder), server.labels)
    clients = [client.indices[missing[client.indices]] for client in federation.shards]
    task = LabelTask(setup, lambda encoder: features(images, encoder), clients, count, of_server)
    answer = assembly.hooks.label(task=task)
    if answer is None:
        return None
    return require_labels(answer, count, classes, assembly.answers_first("label"), "label").cpu()
