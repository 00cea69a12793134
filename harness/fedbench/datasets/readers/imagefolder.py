"""``imagefolder:PATH``: a folder or uncompressed .tar of ``domain/class/*``, ``split/class/*`` or
``domain/split/class/*`` images.

Which of them is seen from the folders. Where all top folders are called train, test, val (valid, validation, crossval)
or full they are splits, else domains; where all folders below the domains are called so, these are splits, else
classes (and there is no official test split). Of the splits, train is trained on and test tested on. Validation is
tested on where there is no test, else left out: it may overlap with train. ``full`` is all of the others together and
read only where it stands alone. Single folders around everything are skipped.

Options: ``layout=domain|split`` says by hand what the top folders are; ``size=N`` brings images to N x N, by default
they keep the size they share, or are brought to the one that the run's backbone takes where sizes differ;
``classes=a,b`` reads these classes only (``classes=domainnet-10``: FedBN's ten); ``names=imagenet`` or ``digits`` gives
published words; ``classnames=FILE`` gives the classes' words, as does ``classnames.json`` at the top of the data;
``clients=FILE`` is a CSV file of path and client, whom each image comes from.

Tiny-ImageNet's own files are understood: ``val_annotations.txt`` in place of class folders, ``words.txt`` for words,
and a test folder without labels, which is passed over.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fedbench.core.errors import FedbenchError
from fedbench.core.federation import Dataset, Split
from fedbench.datasets.classnames import NAMED, chosen_classes, published_words, read_words, words_for, words_in
from fedbench.datasets.content import dataset
from fedbench.datasets.images import load_images
from fedbench.datasets.names import DatasetName, find
from fedbench.datasets.readers.csv_file import csv_rows
from fedbench.datasets.readers.trees import FileTree, TreeImages, is_image, open_tree

log = logging.getLogger(__name__)

TRAIN, WHOLE, TESTS = "train", "full", ("test", "val", "valid", "validation", "crossval")
SPLITS = {TRAIN, WHOLE, *TESTS}
UNLABELLED = {"images"}
"""The only folder in Tiny-ImageNet's splits without class folders."""
LAYOUTS = "domain/class/image, train/class/image and test/class/image, or domain/train/class/image and so on"


@dataclass(frozen=True, order=True)
class Entry:
    """One image: its domain and split ("" where there is none), its raw class name, its file."""

    domain: str
    split: str
    label: str
    name: str


def load(parsed: DatasetName, data_dir: Path, cache_dir: Path) -> Dataset:
    """The images of the folder or archive, each split sorted by domain, class, and file name."""
    tree = open_tree(find(parsed.location, data_dir, "image folder"))
    top, entries = _entries(tree, parsed.choice("layout", ("domain", "split")))
    if not entries[0].domain:
        entries = _annotated(tree, top, entries)
    if "classes" in parsed.options:
        wanted = chosen_classes(parsed.options["classes"], sorted({one.label for one in entries}), str(tree.root))
        entries = [entry for entry in entries if entry.label in wanted]
    chosen = _train_and_test(tree.root, entries)
    read = [entry for part in chosen for entry in part]
    raw = sorted({entry.label for entry in read})
    domains = sorted({entry.domain for entry in read if entry.domain})
    _tell_missing(tree.root, read, raw)
    classnames = words_for(raw, repr(parsed.location), _own_words(parsed, data_dir, tree, top, raw))

    encoded = [TreeImages(tree, tuple(entry.name for entry in part)) for part in chosen]
    images = load_images(encoded, parsed, cache_dir)
    label_of, domain_of = ({name: index for index, name in enumerate(names)} for names in (raw, domains))
    client_names, clients = _clients(parsed, data_dir, top, chosen)
    splits = [
        Split(
            images.splits[number],
            torch.tensor([label_of[entry.label] for entry in part]),
            torch.tensor([domain_of[entry.domain] for entry in part]) if domains else None,
            clients[number],
        )
        for number, part in enumerate(chosen)
    ]
    test = splits[1] if len(splits) == 2 else None
    return dataset(
        parsed.text,
        classnames,
        splits[0],
        test,
        tuple(domains),
        shortest_side=images.shortest_side,
        file_digests=images.file_digests,
        client_names=client_names,
    )


def _clients(
    parsed: DatasetName, data_dir: Path, top: str, chosen: Sequence[Sequence[Entry]]
) -> tuple[tuple[str, ...], list[Tensor | None]]:
    """The clients of ``?clients=FILE``, a CSV file of path and client, and their numbers (n,) in each split.

    Every training image needs a client; of the test images all or none.
    """
    if "clients" not in parsed.options:
        return (), [None] * len(chosen)
    file = find(parsed.options["clients"], data_dir, "clients' table")
    header, _, rows = csv_rows(file)
    if not {"path", "client"} <= set(header):
        raise FedbenchError(f"{str(file)!r} names the columns {', '.join(header)}; it needs path and client.")
    path, client = header.index("path"), header.index("client")
    known = {row[path].strip(): row[client].strip() for row in rows}
    names = tuple(sorted(set(known.values())))
    place = {name: number for number, name in enumerate(names)}
    found: list[Tensor | None] = []
    for number, part in enumerate(chosen):
        owners = [known.get(entry.name.removeprefix(top), known.get(entry.name)) for entry in part]
        missing = [entry.name for entry, owner in zip(part, owners, strict=True) if not owner]
        if missing and (number == 0 or len(missing) < len(part)):
            raise FedbenchError(f"{str(file)!r} names no client of the image {missing[0]!r}; add the line.")
        found.append(None if missing else torch.tensor([place[owner] for owner in owners if owner]))
    return names, found


def _entries(tree: FileTree, layout: str | None) -> tuple[str, list[Entry]]:
    """The folders around everything ("" where there are none), and all images as domain, split, class, file."""
    images = [name for name in tree.names if is_image(name)]
    if not images:
        raise FedbenchError(f"{str(tree.root)!r} holds no images; expected {LAYOUTS}.")
    paths = [name.split("/") for name in images]
    top = ""
    while len({parts[0] for parts in paths}) == 1 and min(map(len, paths)) >= 4 and paths[0][0].lower() not in SPLITS:
        top += paths[0][0] + "/"
        paths = [parts[1:] for parts in paths]
    for name, parts in zip(images, paths, strict=True):
        if len(parts) < 3:
            raise FedbenchError(
                f"{str(tree.root)!r}: the image {name!r} lies outside of {LAYOUTS}; move or delete it, or name the "
                "folder that holds the domains or splits."
            )
    if layout is None:
        splits, others = _splits_and_others(parts[0] for parts in paths)
        if splits and others:
            raise FedbenchError(
                f"{str(tree.root)!r} holds the splits {', '.join(splits)} and, beside them, {', '.join(others)}; type "
                "?layout=split to read the splits only, or ?layout=domain if all of them are domains."
            )
        layout = "split" if splits else "domain"
    if layout == "split":
        entries = [Entry("", parts[0], parts[1], name) for name, parts in zip(images, paths, strict=True)]
    elif _has_splits(tree.root, images, paths):
        entries = [Entry(parts[0], parts[1], parts[2], name) for name, parts in zip(images, paths, strict=True)]
    else:
        entries = [Entry(parts[0], "", parts[1], name) for name, parts in zip(images, paths, strict=True)]
    _refuse_deeper(tree.root, top, entries)
    return top, entries


def _splits_and_others(folders: Iterable[str]) -> tuple[list[str], list[str]]:
    """Which folders of one level are called as splits are, and which not; no splits where the former is by chance.

    A class may be called train (DomainNet), but not one of the same data test.
    """
    found = sorted(set(folders))
    splits = [folder for folder in found if folder.lower() in SPLITS]
    others = [folder for folder in found if folder.lower() not in SPLITS]
    called = {folder.lower() for folder in splits}
    return (splits, others) if not others or (TRAIN in called and len(called) > 1) else ([], found)


def _has_splits(root: Path, images: Sequence[str], paths: Sequence[Sequence[str]]) -> bool:
    """Whether the folders below the domains are splits; FedbenchError where only some are."""
    splits, others = _splits_and_others(parts[1] for parts in paths)
    if not splits:
        return False
    if others:
        by_folder = {parts[1]: name for name, parts in zip(images, paths, strict=True)}
        raise FedbenchError(
            f"{str(root)!r}: {by_folder[splits[0]]!r} reads as domain/split/class/image and {by_folder[others[0]]!r} "
            "as domain/class/image; keep one of the two, or move the other out of the folder."
        )
    flat = [name for name, parts in zip(images, paths, strict=True) if len(parts) == 3]
    if flat:
        deep = [name for name, parts in zip(images, paths, strict=True) if len(parts) > 3]
        beside = f", unlike {deep[0]!r}" if deep else ""
        raise FedbenchError(
            f"{str(root)!r}: {flat[0]!r} lies in a split of a domain, but in no class folder{beside}; expected "
            "domain/split/class/image."
        )
    return True


def _refuse_deeper(root: Path, top: str, entries: Sequence[Entry]) -> None:
    """FedbenchError where a class folder holds several folders of images, or images lie at several depths of a split.

    What is read as classes may then be none (``domain/images/class``, ``split/domain/class``). One folder in every
    class, as Tiny-ImageNet's ``images``, is passed over; splits may differ in it.
    """
    first: dict[str, tuple[list[str], str]] = {}
    for entry in entries:
        parts = entry.name.removeprefix(top).split("/")
        levels = 3 if entry.domain and entry.split else 2
        inside = parts[levels:-1]
        for place, below in (("/".join(parts[:levels]), inside), (entry.split, ["*"] * len(inside))):
            expected, other = first.setdefault(place, (below, entry.name))
            if below != expected:
                raise FedbenchError(
                    f"{str(root)!r}: it is not clear which folders are the classes of {other!r} and {entry.name!r}; "
                    f"expected {LAYOUTS}, so move the images to where each class is one folder."
                )


def _annotated(tree: FileTree, top: str, entries: Sequence[Entry]) -> list[Entry]:
    """Entries with Tiny-ImageNet's val labels from their file, and without splits that have no labels."""
    known = set(tree.names)
    kept = []
    for split in sorted({entry.split for entry in entries}):
        mine = [entry for entry in entries if entry.split == split]
        file = f"{top}{split}/{split}_annotations.txt"
        if file in known:
            rows = [line.split("\t") for line in tree.read(file).decode(errors="replace").splitlines()]
            labels = {row[0]: row[1] for row in rows if len(row) > 1}
            for entry in mine:
                label = labels.get(Path(entry.name).name)
                if label is None:
                    raise FedbenchError(f"{str(tree.root)!r}: {file!r} has no line for the image {entry.name!r}.")
                kept.append(replace(entry, label=label))
        elif {entry.label for entry in mine} != UNLABELLED:
            kept += mine
    return kept


def _train_and_test(root: Path, entries: Sequence[Entry]) -> list[list[Entry]]:
    """The images to train on and, where there are any, those to test on, sorted; other splits are left out."""
    by_split: dict[str, list[Entry]] = {}
    for entry in entries:
        by_split.setdefault(entry.split.lower(), []).append(entry)
    roles = [*by_split]
    if roles not in ([""], [WHOLE]):
        if TRAIN not in by_split:
            found = (
                ", ".join(repr(name) for name in sorted({entry.split for entry in entries})) or "images without labels"
            )
            where = " in its domains" if any(entry.domain for entry in entries) else ""
            forced = "" if where else ", or type ?layout=domain"
            raise FedbenchError(f"{str(root)!r} has no folder 'train'{where}, only {found}; rename one{forced}.")
        roles = [TRAIN, *[name for name in TESTS if name in by_split][:1]]
    left_out = sorted(set(by_split) - set(roles))
    if left_out:
        log.info("%s: read are %s; left out are %s", root, " and ".join(roles), " and ".join(left_out))
    domains = sorted({entry.domain for entry in entries})
    for role in roles:
        lacking = sorted(set(domains) - {entry.domain for entry in by_split[role]})
        if lacking:
            raise FedbenchError(
                f"{str(root)!r}: the domain {lacking[0]!r} has no images in the split {role!r}, which others have; "
                "complete the copy, or give all domains the same splits."
            )
    return [sorted(by_split[role]) for role in roles]


def _tell_missing(root: Path, entries: Sequence[Entry], raw: Sequence[str]) -> None:
    """Say which classes a domain or split lacks. That is allowed: the class list is that of all of them together."""
    present = {(entry.domain, entry.split, entry.label) for entry in entries}
    places = sorted({place[:2] for place in present})
    missing = [
        "/".join(filter(None, (*place, label))) for place in places for label in raw if (*place, label) not in present
    ]
    if missing:
        shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        log.warning("%s has no images in %s; check that the copy is complete.", root, shown)


def _own_words(
    parsed: DatasetName, data_dir: Path, tree: FileTree, top: str, raw: Sequence[str]
) -> dict[str, str] | None:
    """Words that come with the data or were named by the user."""
    known_as = parsed.choice("names", NAMED)
    if known_as is not None:
        return published_words(known_as, raw, repr(parsed.location))
    if "classnames" in parsed.options:
        return words_in(find(parsed.options["classnames"], data_dir, "class names file"), raw)
    known = set(tree.names)
    for name in (f"{top}classnames.json", f"{top}classnames.txt", "classnames.json", "classnames.txt"):
        if name in known:
            return read_words(f"{tree.root}/{name}", tree.read(name), raw)
    if f"{top}words.txt" in known:
        # Tiny-ImageNet: "n01443537<tab>goldfish, Carassius auratus"; the first synonym is the common name.
        rows = [line.split("\t") for line in tree.read(f"{top}words.txt").decode().splitlines()]
        return {row[0]: row[1].split(",")[0] for row in rows if len(row) > 1 and row[0] in raw}
    return None
