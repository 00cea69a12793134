"""``hf:NAME_OR_PATH``: a data set of the Hugging Face Hub, or a local folder of parquet files, through ``datasets``.

Columns are found by feature type: the one Image column, the one ClassLabel column. Where a file was written without
feature types, an image is a struct of ``bytes`` and ``path``, and the one integer column is the label. Options:
``image=``, ``label=``, ``domain=``, ``client=`` name columns; ``train=``, ``test=`` name splits (default ``train``, and
``test`` or ``validation`` where there is one); ``config=`` a configuration of the data set; ``size=N`` as for folders;
``classnames=FILE`` or ``classnames=a,b,c`` (in label order), by default ``classnames.json`` or ``classnames.txt`` in a
local folder.

Integer labels have no names. A folder or Hub data set called cifar10, cifar100 or fashion-mnist gets the published ones
if their number fits, and ``names=cifar10`` says so of a data set called otherwise; all others need ``classnames=`` or a
file of names.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedbench.core.errors import FedbenchError
from fedbench.core.federation import Dataset, Split
from fedbench.datasets.cache import read_json, write_json
from fedbench.datasets.classnames import (
    LABEL_ORDERS,
    NAMED,
    label_order,
    listed_words,
    words_beside,
    words_for,
    words_in,
)
from fedbench.datasets.content import MOST_CLASSES, dataset
from fedbench.datasets.images import load_images
from fedbench.datasets.names import DatasetName, find
from fedbench.datasets.readers.columns import Columns, choose_columns, images_of, remedy
from fedbench.datasets.readers.hub import load_splits

log = logging.getLogger(__name__)

TESTS = ("test", "validation", "valid", "val")


def load(parsed: DatasetName, data_dir: Path, cache_dir: Path) -> Dataset:
    """The data set's train and test splits."""
    folder = _local(parsed.location, data_dir)
    splits = load_splits(parsed, folder, cache_dir / "huggingface")
    train = _choose_split(parsed, splits, "train", ("train",))
    test = _choose_split(parsed, splits, "test", [name for name in TESTS if name != train])
    chosen = [name for name in (train, test) if name is not None]
    columns = choose_columns(parsed, splits[chosen[0]].features)
    for name in chosen:
        _check_columns(splits[name], columns)
    raw, labels = _categories(parsed, splits, chosen, columns.label)
    domain_names, domains = _categories(parsed, splits, chosen, columns.domain) if columns.domain else ([], {})
    client_names, clients = _clients(parsed, splits, chosen, columns.client)
    files = [file["filename"] for name in chosen for file in splits[name].cache_files]
    content = hashlib.sha256(json.dumps([raw, domain_names, len(labels), len(domains)]).encode())
    content.update(json.dumps(client_names).encode() if client_names else b"")
    for index in (*labels.values(), *domains.values(), *clients.values()):
        content.update(index.numpy().tobytes())
    _check_copy(cache_dir, files, columns, content.hexdigest())
    classnames = _classnames(parsed, data_dir, folder, raw, labels)
    from huggingface_hub.constants import HF_HUB_CACHE

    roots = [Path(os.path.realpath(root)) for root in (folder, cache_dir / "huggingface", HF_HUB_CACHE) if root]
    encoded = [images_of(splits[name], f"{parsed.location}: {name}", columns.image, roots) for name in chosen]
    images = load_images(encoded, parsed, cache_dir)
    parts = [
        Split(of_split, labels[name], domains.get(name), clients.get(name))
        for of_split, name in zip(images.splits, chosen, strict=True)
    ]
    official = parts[1] if len(parts) == 2 else None
    return dataset(
        parsed.text,
        classnames,
        parts[0],
        official,
        tuple(domain_names),
        shortest_side=images.shortest_side,
        file_digests=images.file_digests,
        client_names=client_names,
    )


def _clients(
    parsed: DatasetName, splits: Mapping[str, Any], chosen: Sequence[str], column: str | None
) -> tuple[tuple[str, ...], dict[str, Tensor]]:
    """The clients' names in order, numbers by size, and their places (n,) in every chosen split that has the column."""
    if column is None:
        return (), {}
    having = [name for name in chosen if column in splits[name].features]
    values = {name: splits[name].data.column(column).to_pylist() for name in having}
    everything = {value for name in having for value in values[name]}
    if None in everything or chosen[0] not in having:
        raise FedbenchError(
            f"{parsed.location!r}: column {column!r} has empty cells, or is not in the split {chosen[0]!r}; every "
            "sample to train on needs its client."
        )
    of_feature = getattr(splits[chosen[0]].features[column], "names", None)
    names = list(range(len(of_feature))) if of_feature else sorted(everything)
    place = {value: number for number, value in enumerate(names)}
    called = tuple(map(str, of_feature or names))
    return called, {name: torch.tensor([place[value] for value in values[name]]) for name in having}


def _local(location: str, data_dir: Path) -> Path | None:
    """The folder meant by ``location``; None where it can only be a name on the Hub."""
    is_path = location.startswith((".", "/", "~")) or location.count("/") > 1
    if not is_path and not Path(location).exists() and not (data_dir / location).exists():
        return None
    folder = find(location, data_dir, "data set folder")
    if not folder.is_dir():
        raise FedbenchError(f"{str(folder)!r} is not a folder; name the folder that holds the parquet files.")
    return folder


def _choose_split(parsed: DatasetName, splits: Mapping[str, Any], role: str, names: Sequence[str]) -> str | None:
    known = ", ".join(splits)
    wanted = parsed.options.get(role)
    if wanted is not None:
        if wanted not in splits:
            raise FedbenchError(f"{parsed.location!r} has no split {wanted!r}; type ?{role}=NAME with one of {known}.")
        return wanted
    found = [name for name in names if name in splits][:1]
    if role == "train" and not found:
        if len(splits) > 1:
            raise FedbenchError(f"{parsed.location!r} has no split 'train'; type ?train=NAME with one of {known}.")
        found = list(splits)
    return found[0] if found else None


def _check_columns(split: Any, columns: Columns) -> None:
    """FedbenchError where the library's copy of a split is damaged such that reading it would crash."""
    import pyarrow

    try:
        for column in filter(None, (columns.image, columns.label, columns.domain, columns.client)):
            if column in split.features:
                split.data.column(column).validate(full=True)
    except pyarrow.ArrowException as error:
        files = [file["filename"] for file in split.cache_files]
        raise FedbenchError(f"the copy of the data in {files[0]!r} is damaged; {remedy(files)}.") from error


def _check_copy(cache_dir: Path, files: Sequence[str], columns: Columns, digest: str) -> None:
    """FedbenchError where labels and names in the library's copy are not those that were read from it before."""
    # a column that came later: copies read without it are known by the others
    read = [columns.label, columns.domain, *([columns.client] if columns.client else [])]
    key = hashlib.sha256(json.dumps([*files, *read]).encode()).hexdigest()
    kept = cache_dir / "datasets" / f"scan-{key[:32]}.json"
    if not kept.exists():
        write_json(kept, {"digest": digest})
    elif read_json(kept)["digest"] != digest:
        raise FedbenchError(
            f"labels or names in {files[0]!r} are not what they were when they were first read; {remedy(files)}."
        )


def _categories(
    parsed: DatasetName, splits: Mapping[str, Any], chosen: Sequence[str], column: str
) -> tuple[list[str], dict[str, Tensor]]:
    """The names of a column's values, and its values as indices into them (n,) for every chosen split."""
    values = {}
    for name in chosen:
        if column not in splits[name].features:
            raise FedbenchError(f"{parsed.location!r}: split {name!r} has no column {column!r}; choose another split.")
        values[name] = splits[name].data.column(column).to_pylist()
        if not values[name] or None in values[name]:
            raise FedbenchError(
                f"{parsed.location!r}: column {column!r} of split {name!r} has empty cells; choose another one."
            )
    feature = splits[chosen[0]].features[column]
    everything = [value for name in chosen for value in values[name]]
    if hasattr(feature, "names"):
        names = list(feature.names)
    elif isinstance(everything[0], str):
        names = sorted(set(everything))
        index = {value: number for number, value in enumerate(names)}
        values = {name: [index[value] for value in values[name]] for name in chosen}
        everything = list(index.values())
    else:
        if max(everything) >= MOST_CLASSES:
            raise FedbenchError(
                f"{parsed.location!r}: column {column!r} has the label {max(everything)}, which is no class; choose "
                "another column with ?label=COLUMN, or get the data again."
            )
        names = [str(number) for number in range(max(everything) + 1)]
    if min(everything) < 0:
        raise FedbenchError(f"{parsed.location!r}: column {column!r} has labels below 0; choose another split.")
    return names, {name: torch.tensor(values[name], dtype=torch.int64) for name in chosen}


def _classnames(
    parsed: DatasetName, data_dir: Path, folder: Path | None, raw: list[str], labels: Mapping[str, Tensor]
) -> tuple[str, ...]:
    where = repr(parsed.location)
    are_numbers = raw == [str(number) for number in range(len(raw))]
    known = parsed.choice("names", NAMED)
    if known is not None:
        order = label_order(known)
        if not are_numbers or len(raw) > len(order):
            found = f"labels up to {len(raw) - 1}" if are_numbers else "class names of its own"
            raise FedbenchError(f"{where} has {found}, so option names={known!r} doesn't fit; leave it out.")
        # A copy may lack the last classes; the class list is that of the data set all the same.
        return order if known == "imagenet" else words_for(order, where)
    given = parsed.options.get("classnames")
    own = None
    if given is not None and "," in given:
        own = listed_words(given.split(","), raw, f"{where}: option classnames={given!r}")
    elif given is not None:
        own = words_in(find(given, data_dir, "class names file"), raw)
    elif folder is not None:
        own = words_beside(folder, raw)
    if own is None and are_numbers:
        called = (folder or Path(parsed.location)).resolve().name.lower().replace("_", "-")
        order = LABEL_ORDERS.get(called, ())
        if len(order) == len(raw):
            log.info("%s: labels are numbers; taking the published class names of %s", where, called)
            return words_for(order, where)
        fitting = " or ".join(f"?names={name}" for name, order in LABEL_ORDERS.items() if len(order) == len(raw))
        maybe = f"{fitting} if they are that data set, or " if fitting else ""
        raise FedbenchError(
            f"{where}: the labels are the numbers 0 to {len(raw) - 1} without names; type {maybe}?classnames=a,b,c "
            "or ?classnames=FILE, or "
            'put classnames.json (["first", "second", ...]) beside the data.'
        )
    return words_for(raw, where, own)
