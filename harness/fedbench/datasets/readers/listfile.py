"""``listfile:PATH``: images named by list files with lines ``relative/path.jpg label``, as ImageNet-LT's.

PATH is a folder holding ``train.txt`` and ``test.txt`` (or ``*_train.txt`` and ``*_test.txt``), or the training list
itself, with ``test=FILE`` for the other; or it holds CoOp's ``split_zhou_*.json``, which brings its class names.
Options: ``root=DIR`` is what the paths are relative to (default: the lists' folder); ``size=N`` as for image folders;
``names=imagenet`` gives published class names; ``classnames=FILE``, by default ``classnames.txt`` (one name a line, in
label order) or ``classnames.json`` ({"0": name, ...}) beside the lists. ``groups.json`` beside the lists, where there
is one, gives the head / mid / tail (or many / medium / few) classes as {name: [labels]}. A folder called as ImageNet-LT
is, with a thousand classes and no names beside it, has ImageNet's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from fedbench.core.errors import FedbenchError
from fedbench.core.federation import Dataset, Split
from fedbench.core.files import read_bytes
from fedbench.core.metric_names import GROUPS
from fedbench.datasets.catalogue import card_of
from fedbench.datasets.classnames import NAMED, published_words, words_beside, words_in
from fedbench.datasets.content import MOST_CLASSES, dataset
from fedbench.datasets.images import load_images
from fedbench.datasets.names import DatasetName, find
from fedbench.datasets.readers.coop_split import image_root, read_split, split_file
from fedbench.datasets.readers.inside import Inside
from fedbench.datasets.readers.trees import Folder, TreeImages

Rows = tuple[tuple[str, ...], tuple[int, ...]]
"""Paths and labels of one list."""


def load(parsed: DatasetName, data_dir: Path, cache_dir: Path) -> Dataset:
    """The images of the lists, in the lists' order."""
    path = find(parsed.location, data_dir, "list file")
    folder = path if path.is_dir() else path.parent
    split = split_file(path)
    if split is not None:
        return _of_split(split, parsed, data_dir, cache_dir)
    train = _list_in(path, "train") if path.is_dir() else path
    if train is None:
        raise FedbenchError(f"{str(path)!r} holds no train.txt and no *_train.txt; put the list there or name it.")
    test = _list_in(path, "test") if path.is_dir() else None
    if "test" in parsed.options:
        test = find(parsed.options["test"], data_dir, "list file")
    root = find(parsed.options["root"], data_dir, "image folder") if "root" in parsed.options else folder
    rows = [_read_list(file, root) for file in (train, test) if file is not None]
    classes = 1 + max(label for _, labels in rows for label in labels)

    classnames = _classnames(parsed, data_dir, folder, classes)
    groups = _groups(folder / "groups.json", classes)
    return _read(rows, classnames, groups, root, parsed, cache_dir)


def _of_split(file: Path, parsed: DatasetName, data_dir: Path, cache_dir: Path) -> Dataset:
    parts, words = read_split(file)
    root = image_root(file, parts[0][0][0])
    if "root" in parsed.options:
        root = find(parsed.options["root"], data_dir, "image folder")
    inside = Inside(root)
    rows = []
    for part in parts:
        for name, _ in part:
            if name.startswith("/") or ".." in name.split("/") or inside.kind(name) != "file":
                raise FedbenchError(
                    f"{str(file)!r}: there is no file {name!r} in {str(root)!r}; complete the data, or name the folder "
                    "that the paths start from with ?root=DIR."
                )
        rows.append((tuple(name for name, _ in part), tuple(label for _, label in part)))
    classes = 1 + max(label for _, labels in rows for label in labels)
    numbers = [str(label) for label in range(classes)]
    own = (
        words_in(find(parsed.options["classnames"], data_dir, "class names file"), numbers)
        if "classnames" in parsed.options
        else words
    )
    missing = [number for number in numbers if number not in own]
    if missing:
        raise FedbenchError(f"{str(file)!r}: label {missing[0]} has no image and no name; get the split again.")
    return _read(rows, tuple(own[number] for number in numbers), {}, root, parsed, cache_dir)


def _read(
    rows: Sequence[Rows],
    classnames: tuple[str, ...],
    groups: dict[str, tuple[int, ...]],
    root: Path,
    parsed: DatasetName,
    cache_dir: Path,
) -> Dataset:
    images = load_images([TreeImages(Folder(root, names), names) for names, _ in rows], parsed, cache_dir)
    splits = [Split(images.splits[index], torch.tensor(labels)) for index, (_, labels) in enumerate(rows)]
    official = splits[1] if len(splits) == 2 else None
    return dataset(
        parsed.text,
        classnames,
        splits[0],
        official,
        list_groups=groups,
        shortest_side=images.shortest_side,
        file_digests=images.file_digests,
    )


def _list_in(folder: Path, split: str) -> Path | None:
    found = sorted({*folder.glob(f"{split}.txt"), *folder.glob(f"*_{split}.txt")})
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise FedbenchError(
            f"{str(folder)!r} holds several {split} lists: {names}; name one of them: listfile:FILE?test=FILE."
        )
    return found[0] if found else None


def _read_list(file: Path, root: Path) -> Rows:
    try:
        lines = read_bytes(file).decode("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise FedbenchError(f"the list {str(file)!r} can't be read ({error}); check the path and the file.") from error
    names, labels = [], []
    inside = Inside(root)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        name, _, label = line.strip().rpartition(" ")
        is_label = label.isascii() and label.isdigit() and len(label) < len(str(MOST_CLASSES))
        if not name or not is_label or not name.isprintable():
            raise FedbenchError(f"{str(file)!r}, line {number}: {line!r} is not 'relative/path.jpg label'; correct it.")
        names.append(inside.require(name.strip(), f"{str(file)!r}, line {number}"))
        labels.append(int(label))
    if not names:
        raise FedbenchError(f"the list {str(file)!r} is empty; it must hold lines 'relative/path.jpg label'.")
    return tuple(names), tuple(labels)


def _classnames(parsed: DatasetName, data_dir: Path, folder: Path, classes: int) -> tuple[str, ...]:
    numbers = [str(label) for label in range(classes)]
    known = parsed.choice("names", NAMED)
    if "classnames" in parsed.options:
        own = words_in(find(parsed.options["classnames"], data_dir, "class names file"), numbers)
    elif known is not None:
        own = published_words(known, numbers, repr(parsed.location))
    else:
        own = words_beside(folder, numbers) or {}
        card = card_of(f"listfile:{folder.resolve().name}")
        if not own and card is not None and card.title == "ImageNet-LT" and classes == card.classes:
            own = published_words("imagenet", numbers, repr(parsed.location))
    missing = [number for number in numbers if number not in own]
    if missing:
        raise FedbenchError(
            f"{parsed.location!r}: label {missing[0]} has no name; put classnames.txt with {classes} names, one a line "
            f"in label order, into {str(folder)!r}, or type ?classnames=FILE."
        )
    return tuple(own[number] for number in numbers)


def _groups(file: Path, classes: int) -> dict[str, tuple[int, ...]]:
    if not file.exists():
        return {}
    try:
        read = json.loads(read_bytes(file).decode("utf-8"))
        groups = {str(name): tuple(labels) for name, labels in read.items()}
        if not all(type(label) is int and 0 <= label < classes for labels in groups.values() for label in labels):
            raise ValueError(f"labels go from 0 to {classes - 1}")
        if not set(groups) <= set(GROUPS):
            raise ValueError(f"groups are called {', '.join(GROUPS)}")
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise FedbenchError(
            f'{str(file)!r} can\'t be used ({error}); write {{"many": [0, 1], "few": [2]}} or delete it.'
        ) from error
    return groups
