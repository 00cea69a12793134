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
from pathlib import Path
from typing import TYPE_CHECKING

from fedbench.core.errors import FedbenchError
from fedbench.core.federation import Dataset
from fedbench.datasets.classnames import chosen_classes, read_words, typed_words, words_for
from fedbench.datasets.content import dataset_of, numbered
from fedbench.datasets.readers.files import IMAGE_SUFFIXES, FileTree, TreeImages, open_tree
from fedbench.datasets.readers.listed import csv_table
from fedbench.datasets.sources import Asked, FolderOptions

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger(__name__)

TRAIN, WHOLE, TESTS = "train", "full", ("test", "val", "valid", "validation", "crossval")
SPLITS = {TRAIN, WHOLE, *TESTS}
UNLABELLED = {"images"}
"""The only folder in Tiny-ImageNet's splits without class folders."""
LAYOUTS = "domain/class/image, train/class/image and test/class/image, or domain/train/class/image and so on"


def load(asked: Asked[FolderOptions]) -> Dataset:
    """The images of the folder or archive, each split sorted by domain, class, and file name."""
    tree = open_tree(asked.find(asked.location, "image folder"))
    top, table = _table(tree, asked.options.layout)
    if not table["domain"].any():
        table = _annotated(tree, top, table)
    if asked.options.classes is not None:
        wanted = chosen_classes(asked.options.classes, sorted(set(table["label"])), str(tree.root))
        table = table[table["label"].isin(wanted)]
    table = _train_and_test(tree.root, table)
    raw = sorted(set(table["label"]))
    _tell_missing(tree.root, table, raw)
    classnames = words_for(raw, repr(asked.location), _own_words(asked, tree, top, raw))
    is_tested = table["split"].str.lower().isin(TESTS)
    table = table.assign(split=["test" if each else TRAIN for each in is_tested], label=numbered(table["label"], raw))
    if table["domain"].any():
        table["domain"] = numbered(table["domain"])
    else:
        del table["domain"]
    if asked.options.clients is not None:
        table["client"] = _clients(asked.find(asked.options.clients, "clients' table"), top, table)
    return dataset_of(table, lambda part: TreeImages(tree, part["path"].tolist()), classnames, asked)


def _clients(file: Path, top: str, table: pd.DataFrame) -> pd.Categorical:
    """Each image's client by a CSV file of path and client. Training images all need one, the others all or none."""
    clients = csv_table(file)
    if not {"path", "client"} <= set(clients):
        raise FedbenchError(
            f"{str(file)!r} names the columns {', '.join(clients.columns[:-1])}; it needs path and client."
        )
    paths = clients["path"].str.strip()
    for path in paths[paths.duplicated()]:
        raise FedbenchError(f"{str(file)!r} names the image {path!r} twice; delete a line.")
    client_of = dict(zip(paths, clients["client"].str.strip(), strict=True))
    owners = [client_of.get(path.removeprefix(top), client_of.get(path)) or None for path in table["path"]]
    lacks = table.assign(lacks=[owner is None for owner in owners]).groupby("split")["lacks"]
    for split, lacking in lacks:
        if lacking.any() and (split == TRAIN or not lacking.all()):
            image = table["path"][lacking.index[lacking]].iloc[0]
            raise FedbenchError(f"{str(file)!r} names no client of the image {image!r}; add the line.")
    return numbered(owners, sorted(set(client_of.values())))


def _table(tree: FileTree, layout: str | None) -> tuple[str, pd.DataFrame]:
    """The folders around everything ("" where there are none), and all images as path, domain, split and label.

    Of data without domains or splits these are "".
    """
    import pandas as pd  # takes half a second

    images = [name for name in tree.names if name.lower().endswith(IMAGE_SUFFIXES)]
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
        levels, rows = 2, [("", parts[0], parts[1]) for parts in paths]
    elif _has_splits(tree.root, images, paths):
        levels, rows = 3, [(parts[0], parts[1], parts[2]) for parts in paths]
    else:
        levels, rows = 2, [(parts[0], "", parts[1]) for parts in paths]
    table = pd.DataFrame(
        [(*row, name) for row, name in zip(rows, images, strict=True)],
        columns=["domain", "split", "label", "path"],
        dtype=object,
    )
    _refuse_deeper(tree.root, table, paths, levels)
    return top, table


def _splits_and_others(folders: Iterable[str]) -> tuple[list[str], list[str]]:
    """Which folders of one level are called as splits are, and which not; no splits where the former is by chance.

    A class may be called train (DomainNet), but not one of the same data test.
    """
    distinct = sorted(set(folders))
    splits = [folder for folder in distinct if folder.lower() in SPLITS]
    others = [folder for folder in distinct if folder.lower() not in SPLITS]
    called = {folder.lower() for folder in splits}
    return (splits, others) if not others or (TRAIN in called and len(called) > 1) else ([], distinct)


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


def _refuse_deeper(root: Path, table: pd.DataFrame, paths: Sequence[Sequence[str]], levels: int) -> None:
    """FedbenchError where a class folder holds several folders of images, or images lie at several depths of a split.

    What is read as classes may then be none (``domain/images/class``, ``split/domain/class``). One folder in every
    class, as Tiny-ImageNet's ``images``, is passed over; splits may differ in it.
    """
    first: dict[str, tuple[Sequence[str], str]] = {}
    for name, split, parts in zip(table["path"], table["split"], paths, strict=True):
        inside = parts[levels:-1]
        for folder, below in (("/".join(parts[:levels]), inside), (split, ["*"] * len(inside))):
            expected, other = first.setdefault(folder, (below, name))
            if below != expected:
                raise FedbenchError(
                    f"{str(root)!r}: it is not clear which folders are the classes of {other!r} and {name!r}; "
                    f"expected {LAYOUTS}, so move the images to where each class is one folder."
                )


def _annotated(tree: FileTree, top: str, table: pd.DataFrame) -> pd.DataFrame:
    """The table with Tiny-ImageNet's val labels from their file, and without splits that have no labels."""
    names = set(tree.names)
    for split in sorted(set(table["split"])):
        mine, file = table["split"] == split, f"{top}{split}/{split}_annotations.txt"
        if file in names:
            rows = [line.split("\t") for line in tree.read(file).decode(errors="replace").splitlines()]
            label_of = {row[0]: row[1] for row in rows if len(row) > 1}
            for path in table["path"][mine]:
                if Path(path).name not in label_of:
                    raise FedbenchError(f"{str(tree.root)!r}: {file!r} has no line for the image {path!r}.")
            table.loc[mine, "label"] = [label_of[Path(path).name] for path in table["path"][mine]]
        elif set(table["label"][mine]) == UNLABELLED:
            table = table[~mine]
    return table


def _train_and_test(root: Path, table: pd.DataFrame) -> pd.DataFrame:
    """The images to train on and, where there are any, those to test on, sorted; other splits are left out."""
    splits = table["split"].str.lower()
    distinct = sorted(set(splits))
    roles = distinct
    if distinct not in ([""], [WHOLE]):
        if TRAIN not in distinct:
            only = ", ".join(repr(name) for name in sorted(set(table["split"]))) or "images without labels"
            where = " in its domains" if table["domain"].any() else ""
            forced = "" if where else ", or type ?layout=domain"
            raise FedbenchError(f"{str(root)!r} has no folder 'train'{where}, only {only}; rename one{forced}.")
        roles = [TRAIN, *[name for name in TESTS if name in distinct][:1]]
    left_out = [name for name in distinct if name not in roles]
    if left_out:
        log.info("%s: read are %s; left out are %s", root, " and ".join(roles), " and ".join(left_out))
    for role in roles:
        lacking = sorted(set(table["domain"]) - set(table["domain"][splits == role]))
        if lacking:
            raise FedbenchError(
                f"{str(root)!r}: the domain {lacking[0]!r} has no images in the split {role!r}, which others have; "
                "complete the copy, or give all domains the same splits."
            )
    return table[splits.isin(roles)].sort_values(["domain", "split", "label", "path"])


def _tell_missing(root: Path, table: pd.DataFrame, raw: Sequence[str]) -> None:
    """Say which classes a domain or split lacks. That is allowed: the class list is that of all of them together."""
    present = set(zip(table["domain"], table["split"], table["label"], strict=True))
    places = sorted({place[:2] for place in present})
    missing = [
        "/".join(filter(None, (*place, label))) for place in places for label in raw if (*place, label) not in present
    ]
    if missing:
        shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        log.warning("%s has no images in %s; check that the copy is complete.", root, shown)


def _own_words(asked: Asked[FolderOptions], tree: FileTree, top: str, raw: Sequence[str]) -> dict[str, str] | None:
    """Words that come with the data or were named by the user."""
    typed = typed_words(asked, raw)
    if typed is not None:
        return typed
    names = set(tree.names)
    for name in (f"{top}classnames.json", f"{top}classnames.txt", "classnames.json", "classnames.txt"):
        if name in names:
            return read_words(f"{tree.root}/{name}", tree.read(name), raw)
    if f"{top}words.txt" in names:
        # Tiny-ImageNet: "n01443537<tab>goldfish, Carassius auratus"; the first synonym is the common name.
        words = tree.read(f"{top}words.txt")
        try:
            text = words.decode()
        except UnicodeDecodeError:
            text = words.decode("latin-1")  # which any bytes are
        rows = [line.split("\t") for line in text.splitlines()]
        return {row[0]: row[1].split(",")[0] for row in rows if len(row) > 1 and row[0] in raw}
    return None
