"""Putting a data set together, with the digest that says what is in it.

Every form of image data is read into one table, of which `dataset_of` makes a data set. It has a sample in each row:
``label`` and, where the data have them, ``domain`` and ``client`` are categories, which are numbered in their order;
``split`` is train or test. Where samples are files, ``path`` names them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedbench.core.errors import FedbenchError
from fedbench.core.federation import Dataset, Split
from fedbench.datasets.images import EncodedImages, load_images
from fedbench.datasets.names import DatasetName

if TYPE_CHECKING:
    import pandas as pd

MOST_CLASSES = 1_000_000
"""A larger label is no class but damage or a mistake, and a class for every number below it would fill memory."""
SPLITS = ("train", "test")


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


def numbered(values: Iterable[Any], names: Sequence[Any] | None = None) -> pd.Categorical:
    """The values of a column as categories ``names``, by default the values in order. An empty cell has none."""
    import pandas as pd  # takes half a second

    given = [None if pd.isna(value) else value for value in values]
    names = sorted({value for value in given if value is not None}) if names is None else names
    place = {name: number for number, name in enumerate(names)}
    codes = [-1 if value is None else place[value] for value in given]
    return pd.Categorical.from_codes(codes, categories=pd.Index(list(names), dtype=object))


def dataset_of(
    table: pd.DataFrame,
    encoded: Callable[[pd.DataFrame], EncodedImages],
    classnames: tuple[str, ...],
    parsed: DatasetName,
    cache_dir: Path,
    groups: Mapping[str, tuple[int, ...]] | None = None,
) -> Dataset:
    """The data set in ``table``, in the table's order; ``encoded`` gives the images of one split's part of it."""
    parts = [part for name in SPLITS if len(part := table[table["split"] == name])]
    images = load_images([encoded(part) for part in parts], parsed, cache_dir)
    splits = []
    for part, source in zip(parts, images.splits, strict=True):
        labels = _codes(part, "label")
        assert labels is not None, "every sample has a label"
        splits.append(Split(source, labels, _codes(part, "domain"), _codes(part, "client")))
    return dataset(
        parsed.text,
        classnames,
        splits[0],
        splits[1] if len(splits) == 2 else None,
        _called(table, "domain"),
        groups,
        images.shortest_side,
        images.file_digests,
        _called(table, "client"),
    )


def _called(table: pd.DataFrame, column: str) -> tuple[str, ...]:
    return tuple(map(str, table[column].cat.categories)) if column in table else ()


def _codes(part: pd.DataFrame, column: str) -> Tensor | None:
    """The categories of the samples (n,); None where they have none."""
    codes = torch.from_numpy(part[column].cat.codes.to_numpy(np.int64, copy=True)) if column in part else None
    return None if codes is None or bool((codes < 0).any()) else codes


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
