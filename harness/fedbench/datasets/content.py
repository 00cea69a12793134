"""Putting a data set together, with the digest that says what is in it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from fedbench.types import Dataset, Split


def dataset(
    name: str,
    classnames: tuple[str, ...],
    train: Split,
    test: Split | None,
    domain_names: tuple[str, ...] = (),
    list_groups: Mapping[str, tuple[int, ...]] | None = None,
) -> Dataset:
    """A ``Dataset`` whose content hash covers images, labels, domains, class names and groups of both splits."""
    groups = dict(list_groups or {})
    digest = hashlib.sha256(json.dumps([classnames, domain_names, groups], sort_keys=True).encode())
    for split in (train, test):
        if split is None:
            digest.update(b"no split")
            continue
        digest.update(split.images.content_hash().encode())
        for index in (split.labels, split.domains):
            digest.update(b"none" if index is None else index.contiguous().numpy().tobytes())
    return Dataset(name, classnames, train, test, digest.hexdigest(), domain_names, groups)
