"""``csv:FILE``: images named by a CSV file with the columns path, label and, where known, domain, client and split.

``?path=COLUMN`` and so on name other columns. Labels are words, which are the class names in alphabetical order, or
numbers, which ``classnames=a,b,c`` or ``classnames=FILE`` names (or ``classnames.txt``, ``classnames.json`` beside
the file). ``split`` has train, test or validation (val, valid); samples for validation are trained on where there are
test samples, and are the test split where there are none. ``test=FILE`` is another CSV file whose samples are all
tested. ``client`` says whom a sample comes from: the centres of a hospital's data (FLamby), the users of a platform.
``root=DIR`` is what the paths are relative to (default: the file's folder), ``suffix=.jpg`` what is added to them,
``size=N`` as for image folders.

iNaturalist-User-120k and Landmarks-User-160k (Hsu, Qi and Brown, 2020) are read by
``csv:federated_train_user_120k.csv?test=test.csv&path=image_id&label=class&client=user_id&suffix=.jpg&root=images``.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedbench.core.errors import FedbenchError, unknown_name
from fedbench.core.federation import Dataset, Split
from fedbench.core.files import read_bytes
from fedbench.datasets.classnames import listed_words, words_beside, words_for, words_in
from fedbench.datasets.content import MOST_CLASSES, dataset
from fedbench.datasets.images import load_images
from fedbench.datasets.names import DatasetName, find
from fedbench.datasets.readers.inside import Inside
from fedbench.datasets.readers.trees import Folder, TreeImages

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("path", "label", "domain", "client", "split")
_NEEDED = ("path", "label")
_SPLITS = {"train": "train", "test": "test", "validation": "validation", "val": "validation", "valid": "validation"}


def load(parsed: DatasetName, data_dir: Path, cache_dir: Path) -> Dataset:
    """The images of the file, in its order."""
    file = find(parsed.location, data_dir, "CSV file")
    root = find(parsed.options["root"], data_dir, "image folder") if "root" in parsed.options else file.parent
    tables = [_read(file, parsed)]
    if "test" in parsed.options:
        if "split" in tables[0]:
            raise FedbenchError(f"{str(file)!r} has a column of splits of its own; leave ?test= out.")
        tables.append(_read(find(parsed.options["test"], data_dir, "CSV file"), parsed, lacks=("client", "domain")))
    else:
        tables = _splits(tables[0], file)
    inside, suffix = Inside(root), parsed.options.get("suffix", "")
    paths = [
        tuple(
            inside.require(f"{path}{suffix}", f"{where!r}, line {line}")
            for path, where, line in zip(table["path"], table["file"], table["line"], strict=True)
        )
        for table in tables
    ]
    classnames, labels = _labels([table["label"] for table in tables], parsed, data_dir, file)
    domain_names, domains = _categories(tables, "domain")
    client_names, clients = _categories(tables, "client")
    images = load_images([TreeImages(Folder(root, names), names) for names in paths], parsed, cache_dir)
    parts = [Split(*each) for each in zip(images.splits, labels, domains, clients, strict=True)]
    return dataset(
        parsed.text,
        classnames,
        parts[0],
        parts[1] if len(parts) == 2 else None,
        domain_names,
        shortest_side=images.shortest_side,
        file_digests=images.file_digests,
        client_names=client_names,
    )


def _read(file: Path, parsed: DatasetName, lacks: Sequence[str] = ()) -> pd.DataFrame:
    """The known columns by their usual names, with the line and the file that each sample is from."""
    import pandas as pd  # takes half a second

    header, lines, rows = csv_rows(file)
    whole = pd.DataFrame(rows, columns=header, dtype=str)
    found: dict[str, pd.Series[str]] = {}
    for name in COLUMNS:
        column = parsed.options.get(name, name)
        if column in whole:
            found[name] = whole[column].str.strip()
        elif name in _NEEDED or (name in parsed.options and name not in lacks):
            hint = f"Name it with ?{name}=COLUMN."
            raise unknown_name(f"column of {str(file)!r}", column, map(str, whole.columns), hint)
    if whole.empty:
        raise FedbenchError(f"{str(file)!r} has no samples below its first line, which names the columns.")
    for name, values in found.items():
        for line, value in zip(lines, values, strict=True):
            if not value:
                raise FedbenchError(
                    f"{str(file)!r}, line {line}: no {name}; give every sample one, or drop the column."
                )
    return pd.DataFrame(found).assign(line=lines, file=str(file))


def csv_rows(file: Path) -> tuple[list[str], list[int], list[list[str]]]:
    """The names of the columns, and the samples with their lines."""
    try:
        reader = csv.reader(io.StringIO(read_bytes(file).decode("utf-8-sig"), newline=""), strict=True)
        header = next(reader, [])
        lines, rows = [], []
        for row in reader:
            if row and len(row) != len(header):
                raise csv.Error(f"line {reader.line_num} has {len(row)} cells, and the first line names {len(header)}")
            if row:
                lines.append(reader.line_num)
                rows.append(row)
    except (OSError, ValueError, csv.Error) as error:  # UnicodeDecodeError is a ValueError
        raise FedbenchError(f"{str(file)!r} can't be read as CSV ({error}); check the path and the file.") from None
    if len(set(header)) < len(header):
        raise FedbenchError(f"{str(file)!r} names a column twice in its first line; rename one.")
    return header, lines, rows


def _splits(table: pd.DataFrame, file: Path) -> list[pd.DataFrame]:
    """The samples to train on and, where there are some, those to test."""
    if "split" not in table:
        return [table]
    for line, given in zip(table["line"], table["split"], strict=True):
        if given.lower() not in _SPLITS:
            raise FedbenchError(f"{str(file)!r}, line {line}: {unknown_name('split', given, _SPLITS)}")
    split = table["split"].str.lower().map(_SPLITS)
    tested = "test" if (split == "test").any() else "validation"
    train, test = table[split != tested], table[split == tested]
    if train.empty:
        raise FedbenchError(f"{str(file)!r} has no sample of the split train.")
    return [train] if test.empty else [train, test]


def _labels(
    columns: Sequence[pd.Series], parsed: DatasetName, data_dir: Path, file: Path
) -> tuple[tuple[str, ...], list[Tensor]]:
    """The class names, and labels (n,) of each split."""
    values = sorted({value for column in columns for value in column})
    where = repr(parsed.location)
    are_numbers = all(value.isascii() and value.isdigit() and len(value) < len(str(MOST_CLASSES)) for value in values)
    raw = [str(number) for number in range(max(map(int, values)) + 1)] if are_numbers else values
    given = parsed.options.get("classnames")
    if given is not None and "," in given:
        own = listed_words(given.split(","), raw, f"{where}: option classnames={given!r}")
    elif given is not None:
        own = words_in(find(given, data_dir, "class names file"), raw)
    else:
        own = words_beside(file.parent, raw) or {}
    if are_numbers and not own:
        raise FedbenchError(
            f"{where}: the labels are the numbers 0 to {len(raw) - 1} without names; type ?classnames=a,b,c or "
            "?classnames=FILE, or put classnames.txt beside the file."
        )
    index = {value: number for number, value in enumerate(raw)}
    numbers = (str(int(value)) if are_numbers else value for column in columns for value in column)
    every = torch.tensor([index[value] for value in numbers], dtype=torch.int64)
    return words_for(raw, where, own), list(torch.split(every, [len(column) for column in columns]))


def _categories(tables: Sequence[pd.DataFrame], name: str) -> tuple[tuple[str, ...], list[Tensor | None]]:
    """The values of a column in alphabetical order, and their numbers (n,) in each split that has it."""
    if name not in tables[0]:
        return (), [None] * len(tables)
    names = sorted({value for table in tables if name in table for value in table[name]})
    index = {value: number for number, value in enumerate(names)}
    return tuple(names), [
        torch.tensor([index[value] for value in table[name]], dtype=torch.int64) if name in table else None
        for table in tables
    ]
