"""Images that files name: ``csv:FILE`` and ``listfile:PATH``.

``csv:FILE`` has the columns path, label and, where known, domain, client and split. ``?path=COLUMN`` and so on name
other columns. Labels are words, which are the class names in alphabetical order, or numbers, which
``classnames=a,b,c`` or ``classnames=FILE`` names (or ``classnames.txt``, ``classnames.json`` beside the file).
``split`` has train, test or validation (val, valid); samples for validation are trained on where there are test
samples, and are the test split where there are none. ``test=FILE`` is another CSV file whose samples are all tested.
``client`` says whom a sample comes from: the centres of a hospital's data (FLamby), the users of a platform.
``suffix=.jpg`` is added to the paths. iNaturalist-User-120k and Landmarks-User-160k (Hsu, Qi and Brown, 2020) are read
by ``csv:federated_train_user_120k.csv?test=test.csv&path=image_id&label=class&client=user_id&suffix=.jpg&root=images``.

``listfile:PATH`` has lines ``relative/path.jpg label``, as ImageNet-LT's. PATH is a folder holding ``train.txt`` and
``test.txt`` (or ``*_train.txt`` and ``*_test.txt``), or the training list itself, with ``test=FILE`` for the other.
``names=imagenet`` gives published class names; ``classnames=FILE``, by default ``classnames.txt`` (one name a line, in
label order) or ``classnames.json`` ({"0": name, ...}) beside the lists. ``groups.json`` beside the lists, where there
is one, gives the head / mid / tail (or many / medium / few) classes as {name: [labels]}. A folder called as ImageNet-LT
is, with a thousand classes and no names beside it, has ImageNet's.

Or PATH holds ``split_zhou_*.json``, the split in which CoOp (Zhou et al., IJCV 2022) and the methods after it compare
prompts: an object with the lists ``train``, ``val`` and ``test`` of [path, label, class name]. Paths start from a
folder of images that each data set calls otherwise; underscores in class names are spaces, as in CoOp's code.

Of all, ``root=DIR`` is what the paths are relative to (default: the file's folder), ``size=N`` as for image folders.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbench.core.errors import FedbenchError, unknown_name
from fedbench.core.federation import Dataset
from fedbench.core.files import read_bytes
from fedbench.core.metric_names import GROUPS
from fedbench.datasets.catalogue import card_of
from fedbench.datasets.classnames import class_words, published_words
from fedbench.datasets.content import MOST_CLASSES, dataset_of, numbered
from fedbench.datasets.readers.files import Folder, Inside, TreeImages
from fedbench.datasets.sources import Asked, CsvOptions, ListOptions

if TYPE_CHECKING:
    import pandas as pd

WHERE = "(line)"
"""The column that says in which line of which file a sample stands, for errors."""
COLUMNS = ("path", "label", "domain", "client", "split")
_NEEDED = ("path", "label")
_VALIDATION = ("validation", "val", "valid")
_SPLITS = ("train", "test", *_VALIDATION)
COOP = "split_zhou_*.json"
_DEPTH = 2
"""Folders between CoOp's file and the images."""


def load(asked: Asked[ListOptions]) -> Dataset:
    """The images that the file names, in its order."""
    if isinstance(asked.options, CsvOptions):
        return _of_csv(asked, asked.options)
    path = asked.find(asked.location, "list file")
    split = _coop_file(path)
    if split is not None:
        return _of_coop(split, asked)
    return _of_lists(path, asked)


def _read(
    table: pd.DataFrame,
    root: Path,
    classes: tuple[Sequence[str], tuple[str, ...]],
    asked: Asked[ListOptions],
    groups: Mapping[str, tuple[int, ...]] | None = None,
) -> Dataset:
    """The data set of a table of paths, labels and splits; ``classes`` are the raw names in label order, and words."""
    import pandas as pd  # takes half a second

    inside = Inside(root)
    paths = [inside.require(*each) for each in zip(table["path"], table[WHERE], strict=True)]
    columns = {name: numbered(table[name]) for name in ("domain", "client") if name in table}
    whole = table[["split"]].assign(
        path=pd.Series(paths, table.index, object), label=numbered(table["label"], classes[0]), **columns
    )

    def images(part: pd.DataFrame) -> TreeImages:
        return TreeImages(Folder(root, ()), part["path"].tolist())

    return dataset_of(whole, images, classes[1], asked, groups)


def _root(asked: Asked[ListOptions], default: Path) -> Path:
    return default if asked.options.root is None else asked.find(asked.options.root, "image folder")


def _table(rows: Sequence[Sequence[Any]], columns: Sequence[str]) -> pd.DataFrame:
    import pandas as pd  # takes half a second

    return pd.DataFrame(rows, columns=list(columns), dtype=object)


# --- CSV


def _of_csv(asked: Asked[ListOptions], options: CsvOptions) -> Dataset:
    import pandas as pd

    file = asked.find(asked.location, "CSV file")
    table = _columns(file, options)
    if asked.options.test is not None:
        if "split" in table:
            raise FedbenchError(f"{str(file)!r} has a column of splits of its own; leave ?test= out.")
        tested = _columns(asked.find(asked.options.test, "CSV file"), options, lacks=("client", "domain"))
        whole = pd.concat([table.assign(split="train"), tested.assign(split="test")], ignore_index=True)
        # a test file may lack whole columns of the other, and what it has beside them is not read
        table = whole[[*table, "split"]]
    else:
        table = table.assign(split=_splits(table, file))
    table["path"] += options.suffix
    raw = sorted(set(table["label"]))
    are_numbers = all(_is_label(value) for value in raw)
    if are_numbers:
        table["label"] = [str(int(value)) for value in table["label"]]
        raw = [str(number) for number in range(max(map(int, raw)) + 1)]
    return _read(table, _root(asked, file.parent), (raw, class_words(asked, raw, file.parent)), asked)


def _columns(file: Path, options: CsvOptions, lacks: Sequence[str] = ()) -> pd.DataFrame:
    """The known columns by their usual names, and where each sample stands."""
    whole = csv_table(file)
    columns: dict[str, Any] = {WHERE: whole[WHERE]}
    for name in COLUMNS:
        column = getattr(options, name)
        if column in whole:
            columns[name] = whole[column].str.strip()
        elif name in _NEEDED or (column != name and name not in lacks):
            hint = f"Name it with ?{name}=COLUMN."
            raise unknown_name(f"column of {str(file)!r}", column, map(str, whole.columns.drop(WHERE)), hint)
    if whole.empty:
        raise FedbenchError(f"{str(file)!r} has no samples below its first line, which names the columns.")
    for name, values in columns.items():
        for where in whole[WHERE][values == ""][:1]:
            raise FedbenchError(f"{where}: no {name}; give every sample one, or drop the column.")
    return whole[[]].assign(**columns)


def csv_table(file: Path) -> pd.DataFrame:
    """A CSV file as text, with the column `WHERE` behind its own."""
    try:
        reader = csv.reader(io.StringIO(read_bytes(file).decode("utf-8-sig"), newline=""), strict=True)
        header = next(reader, [])
        rows = []
        for row in reader:
            if row and len(row) != len(header):
                raise csv.Error(f"line {reader.line_num} has {len(row)} cells, and the first line names {len(header)}")
            if row:
                rows.append([*row, f"{str(file)!r}, line {reader.line_num}"])
    except (OSError, ValueError, csv.Error) as error:  # UnicodeDecodeError is a ValueError
        raise FedbenchError(f"{str(file)!r} can't be read as CSV ({error}); check the path and the file.") from None
    if len(set(header)) < len(header):
        raise FedbenchError(f"{str(file)!r} names a column twice in its first line; rename one.")
    return _table(rows, [*header, WHERE])


def _splits(table: pd.DataFrame, file: Path) -> Sequence[str]:
    """Train or test for every sample."""
    if "split" not in table:
        return ["train"] * len(table)
    for where, given in zip(table[WHERE], table["split"], strict=True):
        if given.lower() not in _SPLITS:
            raise FedbenchError(f"{where}: {unknown_name('split', given, _SPLITS)}")
    given = table["split"].str.lower()
    tested = ("test",) if (given == "test").any() else _VALIDATION
    split = ["test" if each in tested else "train" for each in given]
    if "train" not in split:
        raise FedbenchError(f"{str(file)!r} has no sample of the split train.")
    return split


def _is_label(text: str) -> bool:
    """Whether the text is a number that can be a class."""
    return text.isascii() and text.isdigit() and len(text) < len(str(MOST_CLASSES))


# --- list files


def _of_lists(path: Path, asked: Asked[ListOptions]) -> Dataset:
    folder = path if path.is_dir() else path.parent
    train = _list_in(path, "train") if path.is_dir() else path
    if train is None:
        raise FedbenchError(f"{str(path)!r} holds no train.txt and no *_train.txt; put the list there or name it.")
    test = _list_in(path, "test") if path.is_dir() else None
    if asked.options.test is not None:
        test = asked.find(asked.options.test, "list file")
    rows = [row for file, split in ((train, "train"), (test, "test")) if file for row in _read_list(file, split)]
    raw = [str(label) for label in range(1 + max(int(label) for _, label, *_ in rows))]
    card = card_of(f"listfile:{folder.resolve().name}")
    is_imagenet = card is not None and card.title == "ImageNet-LT" and len(raw) == card.classes
    published = published_words("imagenet", raw, repr(asked.location)) if is_imagenet else None
    words = class_words(asked, raw, folder, published)
    groups = _groups(folder / "groups.json", len(raw))
    table = _table(rows, ("path", "label", "split", WHERE))
    return _read(table, _root(asked, folder), (raw, words), asked, groups)


def _list_in(folder: Path, split: str) -> Path | None:
    lists = sorted({*folder.glob(f"{split}.txt"), *folder.glob(f"*_{split}.txt")})
    if len(lists) > 1:
        names = ", ".join(file.name for file in lists)
        raise FedbenchError(
            f"{str(folder)!r} holds several {split} lists: {names}; name one of them: listfile:FILE?test=FILE."
        )
    return lists[0] if lists else None


def _read_list(file: Path, split: str) -> list[tuple[str, str, str, str]]:
    """Path, label, split and place of every line."""
    try:
        lines = read_bytes(file).decode("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise FedbenchError(f"the list {str(file)!r} can't be read ({error}); check the path and the file.") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        name, _, label = line.strip().rpartition(" ")
        where = f"{str(file)!r}, line {number}"
        if line.strip():
            if not name or not _is_label(label) or not name.isprintable():
                raise FedbenchError(f"{where}: {line!r} is not 'relative/path.jpg label'; correct it.")
            rows.append((name.strip(), str(int(label)), split, where))
    if not rows:
        raise FedbenchError(f"the list {str(file)!r} is empty; it must hold lines 'relative/path.jpg label'.")
    return rows


def _groups(file: Path, classes: int) -> dict[str, tuple[int, ...]]:
    if not file.exists():
        return {}
    try:
        read = json.loads(read_bytes(file).decode("utf-8"))
        groups = {str(name): tuple(labels) for name, labels in read.items()}
        if not all(type(label) is int and 0 <= label < classes for labels in groups.values() for label in labels):
            raise ValueError(f"labels go from 0 to {classes - 1}")
        if len({label for labels in groups.values() for label in labels}) < sum(map(len, groups.values())):
            raise ValueError("a label is listed twice")
        if not set(groups) <= set(GROUPS):
            raise ValueError(f"groups are called {', '.join(GROUPS)}")
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise FedbenchError(
            f'{str(file)!r} can\'t be used ({error}); write {{"many": [0, 1], "few": [2]}} or delete it.'
        ) from error
    return groups


# --- CoOp's splits


def _coop_file(path: Path) -> Path | None:
    """The split that ``path``, a file or a folder, means; None where it is none. FedbenchError for several."""
    if path.is_file():
        return path if path.match(COOP) else None
    files = sorted(path.glob(COOP))
    if len(files) > 1:
        raise FedbenchError(f"{str(path)!r} holds {', '.join(file.name for file in files)}; name one of them.")
    return files[0] if files else None


def _of_coop(file: Path, asked: Asked[ListOptions]) -> Dataset:
    """Train and test; ``val`` is left out."""
    try:
        content: dict[str, list[list[Any]]] = json.loads(read_bytes(file).decode("utf-8"))
        rows = [
            (str(path), label, str(name), part) for part in ("train", "test") for path, label, name in content[part]
        ]
        is_whole = content["train"] and content["test"]
        if not is_whole or not all(type(label) is int and 0 <= label < MOST_CLASSES for _, label, *_ in rows):
            raise ValueError("a split is empty, or a label no number")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FedbenchError(
            f"{str(file)!r} can't be read ({type(error).__name__}: {error}); it must hold the lists train, val and "
            "test of [path, label, class name], as CoOp's release does."
        ) from error
    words: dict[str, str] = {}
    for _, label, name, _ in rows:
        word = name.replace("_", " ").strip()
        if words.setdefault(str(label), word) != word:
            raise FedbenchError(f"{str(file)!r}: label {label} is called {words[str(label)]!r} and {word!r}.")
    raw = [str(label) for label in range(1 + max(label for _, label, *_ in rows))]
    classnames = class_words(asked, raw, None, words)
    table = _table(
        [(path, str(label), part, repr(str(file))) for path, label, _, part in rows], ("path", "label", "split", WHERE)
    )
    root = _root(asked, file.parent) if asked.options.root is not None else _image_root(file, rows[0][0])
    return _read(table, root, (raw, classnames), asked)


def _image_root(file: Path, first: str) -> Path:
    """The folder beside or up to two levels below the split's own in which the image ``first`` lies."""
    folders = [file.parent]
    for _ in range(_DEPTH + 1):
        root = next((folder for folder in folders if (folder / first).is_file()), None)
        if root is not None:
            return root
        folders = [below for folder in folders for below in sorted(folder.iterdir()) if below.is_dir()]
    raise FedbenchError(
        f"{str(file)!r}: no image {first!r} lies below {str(file.parent)!r}; put the images there, or name the folder "
        "that the paths start from with ?root=DIR."
    )
