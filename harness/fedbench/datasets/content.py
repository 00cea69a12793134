"""Putting a data set together, with the digest that says what is in it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedbench.core.errors import FedbenchError
from fedbench.core.federation import Dataset, Split

MOST_CLASSES = 1_000_000
"""A larger label is no class but damage or a mistake, and a class for every number below it would fill memory."""


def dataset(
    name: str,
    classnames: tuple[str, ...],
    train: Split,
    test: Split | None,
    domain_names: tuple[str, ...] = (),
    list_groups: Mapping[str, tuple[int, ...]] | None = None,
    shortest_side: int | None = None,
    file_digests: Sequence[str] = (),
    client_names: tuple[str, ...] = (),
) -> Dataset:
    """A ``Dataset`` whose content hash covers images, labels, domains, clients, class names and groups of both splits.

    ``file_digests`` has one digest of each split's files, where these are decoded at the size that a run asks for.
    FedbenchError where a split's parts differ in length, or an index has no name.
    """
    groups = dict(list_groups or {})
    # clients came later: data without them keep their hashes
    named = [classnames, domain_names, groups, *([client_names] if client_names else [])]
    names = json.dumps(named, sort_keys=True)
    splits = [split for split in (train, test) if split is not None]
    for split in splits:
        for what, index, called in (
            ("label", split.labels, classnames),
            ("domain", split.domains, domain_names),
            ("client", split.clients, client_names),
        ):
            if index is not None:
                _check(name, what, index, len(called), len(split.images))
    content = _digest(names, splits, [split.images.content_hash() for split in splits])
    files = _digest(names, splits, file_digests) if file_digests else ""
    return Dataset(name, classnames, train, test, content, domain_names, groups, shortest_side, files, client_names)


def limited(whole: Dataset, limit: int) -> Dataset:
    """``limit`` samples of each split of ``whole``, drawn at random and alike every time; a smaller split stays."""

    def of(split: Split | None) -> Split | None:
        if split is None or len(split) <= limit:
            return split
        drawn = torch.randperm(len(split), generator=torch.Generator().manual_seed(0))[:limit]
        return split.select(drawn.sort().values)

    def marked(digest: str) -> str:
        return hashlib.sha256(f"{digest} limit {limit}".encode()).hexdigest() if digest else ""

    train = of(whole.train)
    assert train is not None, "there is always a training split"
    content, files = marked(whole.content_hash), marked(whole.files_hash)
    return replace(whole, train=train, test=of(whole.test), content_hash=content, files_hash=files)


def _digest(names: str, splits: Sequence[Split], of_images: Iterable[str]) -> str:
    digest = hashlib.sha256(names.encode())
    for split, images in zip(splits, of_images, strict=True):
        digest.update(images.encode())
        for index in (split.labels, split.domains):
            digest.update(b"none" if index is None else index.contiguous().numpy().tobytes())
        if split.clients is not None:
            digest.update(split.clients.contiguous().numpy().tobytes())
    digest.update(b"no split" * (2 - len(splits)))
    return digest.hexdigest()


def _check(name: str, what: str, index: Tensor, names: int, images: int) -> None:
    if len(index) != images:
        raise FedbenchError(f"{name!r} has {images} images and {len(index)} {what}s of a split; get the data again.")
    outside = index[(index < 0) | (index >= names)]
    if len(outside):
        raise FedbenchError(
            f"{name!r} has the {what} {int(outside[0])}, but names for 0 to {names - 1} only; get the data again."
        )
