"""Every form of image data is read into one table, and the table is made into a data set here.

A table has a sample in each row: ``label`` and, where the data have them, ``domain`` and ``client`` are categories,
which are numbered in their order; ``split`` is train or test. Where samples are files, ``path`` names them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedbench.core.federation import Dataset, Split
from fedbench.datasets.content import dataset
from fedbench.datasets.images import EncodedImages, load_images
from fedbench.datasets.names import DatasetName

if TYPE_CHECKING:
    import pandas as pd

SPLITS = ("train", "test")


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
        labels = _numbers(part, "label")
        assert labels is not None, "every sample has a label"
        splits.append(Split(source, labels, _numbers(part, "domain"), _numbers(part, "client")))
    return dataset(
        parsed.text,
        classnames,
        splits[0],
        splits[1] if len(splits) == 2 else None,
        _names(table, "domain"),
        groups,
        images.shortest_side,
        images.file_digests,
        _names(table, "client"),
    )


def _names(table: pd.DataFrame, column: str) -> tuple[str, ...]:
    return tuple(map(str, table[column].cat.categories)) if column in table else ()


def _numbers(part: pd.DataFrame, column: str) -> Tensor | None:
    """The categories of the samples (n,); None where they have none."""
    codes = torch.from_numpy(part[column].cat.codes.to_numpy(np.int64, copy=True)) if column in part else None
    return None if codes is None or bool((codes < 0).any()) else codes
