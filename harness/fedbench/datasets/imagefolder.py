"""``imagefolder:PATH``: a folder or uncompressed .tar of ``domain/class/*`` or ``split/class/*`` images.

Which of the two is seen from the top folders: where all are called train, test, val or valid they are splits, else
domains (and there is no official test split). With both a test and a validation folder, test is the test split and
validation is left out. Single folders around everything are skipped. Options: ``layout=domain|split`` decides it by
hand; ``size=N`` brings images to N x N, by default they keep the size they share, or become 224 x 224 where sizes
differ; ``classnames=FILE`` gives the classes' words, as does ``classnames.json`` at the top of the data.

Tiny-ImageNet's own files are understood: ``val_annotations.txt`` in place of class folders, ``words.txt`` for words,
and a test folder without labels, which is passed over.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fedbench.datasets.classnames import read_words, words_for, words_in
from fedbench.datasets.content import dataset
from fedbench.datasets.images import load_images
from fedbench.datasets.names import DatasetName, find
from fedbench.datasets.trees import FileTree, TreeImages, is_image, open_tree
from fedbench.errors import FedbenchError
from fedbench.types import Dataset, Split

log = logging.getLogger(__name__)

TRAIN, TESTS = "train", ("test", "val", "valid", "validation")
SPLITS = {TRAIN, *TESTS}
UNLABELLED = {"images"}
"""The only folder in Tiny-ImageNet's splits without class folders."""
LAYOUTS = "domain/class/image or train/class/image and test/class/image"


@dataclass(frozen=True, order=True)
class Entry:
    """One image: its domain or split, its raw class name, its file."""

    group: str
    label: str
    name: str


def load(asked: DatasetName, data_dir: Path, cache_dir: Path) -> Dataset:
    """The images of the folder or archive, sorted by domain or split, class, and file name."""
    tree = open_tree(find(asked.location, data_dir, "image folder"))
    top, entries = _entries(tree)
    groups = sorted({entry.group for entry in entries})
    layout = asked.choice("layout", ("domain", "split"))
    if layout is None:
        layout = "split" if {group.lower() for group in groups} <= SPLITS else "domain"
    if layout == "split":
        entries = _annotated(tree, top, entries)
        groups = _train_and_test(tree.root, sorted({entry.group for entry in entries}))
        entries = [entry for entry in entries if entry.group in groups]
    raw = sorted({entry.label for entry in entries})
    _tell_missing(tree.root, entries, groups, raw)
    classnames = words_for(raw, repr(asked.location), _own_words(asked, data_dir, tree, top, raw))

    chosen = [sorted(entries)]
    if layout == "split":
        chosen = [[entry for entry in chosen[0] if entry.group == group] for group in groups]
    images = load_images(
        [TreeImages(tree, tuple(entry.name for entry in part)) for part in chosen], asked.size(), cache_dir
    )
    label_of, group_of = ({name: index for index, name in enumerate(names)} for names in (raw, groups))
    labels = [torch.tensor([label_of[entry.label] for entry in part]) for part in chosen]
    if layout == "domain":
        domains = torch.tensor([group_of[entry.group] for entry in chosen[0]])
        return dataset(asked.text, classnames, Split(images[0], labels[0], domains), None, tuple(groups))
    splits = [Split(*part) for part in zip(images, labels, strict=True)]
    return dataset(asked.text, classnames, splits[0], splits[1] if len(splits) == 2 else None)


def _entries(tree: FileTree) -> tuple[str, list[Entry]]:
    """The folders around everything ("" where there are none), and all images as domain-or-split, class, file."""
    images = [name for name in tree.names if is_image(name)]
    if not images:
        raise FedbenchError(f"{str(tree.root)!r} holds no images; expected {LAYOUTS}.")
    split = [name.split("/") for name in images]
    top = ""
    while len({parts[0] for parts in split}) == 1 and min(map(len, split)) >= 4 and split[0][0].lower() not in SPLITS:
        top += split[0][0] + "/"
        split = [parts[1:] for parts in split]
    for name, parts in zip(images, split, strict=True):
        if len(parts) < 3:
            raise FedbenchError(
                f"{str(tree.root)!r}: the image {name!r} lies outside of {LAYOUTS}; move or delete it, or name the "
                "folder that holds the domains or splits."
            )
    return top, [Entry(parts[0], parts[1], name) for name, parts in zip(images, split, strict=True)]


def _annotated(tree: FileTree, top: str, entries: Sequence[Entry]) -> list[Entry]:
    """Entries with Tiny-ImageNet's val labels from their file, and without splits that have no labels."""
    known = set(tree.names)
    kept = []
    for group in sorted({entry.group for entry in entries}):
        mine = [entry for entry in entries if entry.group == group]
        file = f"{top}{group}/{group}_annotations.txt"
        if file in known:
            rows = [line.split("\t") for line in tree.read(file).decode(errors="replace").splitlines()]
            labels = {row[0]: row[1] for row in rows if len(row) > 1}
            for entry in mine:
                label = labels.get(Path(entry.name).name)
                if label is None:
                    raise FedbenchError(f"{str(tree.root)!r}: {file!r} has no line for the image {entry.name!r}.")
                kept.append(Entry(group, label, entry.name))
        elif {entry.label for entry in mine} != UNLABELLED:
            kept += mine
    return kept


def _train_and_test(root: Path, groups: Sequence[str]) -> list[str]:
    by_name = {group.lower(): group for group in groups}
    if TRAIN not in by_name:
        found = ", ".join(repr(group) for group in groups)
        raise FedbenchError(f"{str(root)!r} has no folder 'train', only {found}; rename one, or type ?layout=domain.")
    return [by_name[TRAIN], *[by_name[name] for name in TESTS if name in by_name][:1]]


def _tell_missing(root: Path, entries: Sequence[Entry], groups: Sequence[str], raw: Sequence[str]) -> None:
    """Say which classes a domain or split lacks. That is allowed: the class list is that of all of them together."""
    present = {(entry.group, entry.label) for entry in entries}
    missing = [f"{group}/{label}" for group in groups for label in raw if (group, label) not in present]
    if missing:
        shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        log.warning("%s has no images in %s; check that the copy is complete.", root, shown)


def _own_words(
    asked: DatasetName, data_dir: Path, tree: FileTree, top: str, raw: Sequence[str]
) -> dict[str, str] | None:
    """Words that come with the data or were named by the user."""
    if "classnames" in asked.options:
        return words_in(find(asked.options["classnames"], data_dir, "class names file"), raw)
    known = set(tree.names)
    for name in (f"{top}classnames.json", f"{top}classnames.txt", "classnames.json", "classnames.txt"):
        if name in known:
            return read_words(f"{tree.root}/{name}", tree.read(name), raw)
    if f"{top}words.txt" in known:
        # Tiny-ImageNet: "n01443537<tab>goldfish, Carassius auratus"; the first synonym is the common name.
        rows = [line.split("\t") for line in tree.read(f"{top}words.txt").decode().splitlines()]
        return {row[0]: row[1].split(",")[0] for row in rows if len(row) > 1 and row[0] in raw}
    return None
