"""Small data sets made of labels and domains; the images are blank but one pixel, which holds the sample's number."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from fedbench.core.federation import Dataset, Split, TensorImages

Counts = Sequence[int] | Sequence[Sequence[int]]


def split_of(counts: Counts, first_number: int = 0) -> Split:
    """``counts[c]`` samples of class c, or ``counts[domain][c]``, in shuffled order."""
    table = np.asarray(counts)
    rows = [(d, c) for d, c in np.ndindex(np.atleast_2d(table).shape) for _ in range(int(np.atleast_2d(table)[d, c]))]
    cells = np.random.default_rng(1).permutation(np.array(rows, dtype=np.int64))
    pixels = torch.zeros(len(cells), 3, 1, 1, dtype=torch.uint8)
    numbers = torch.arange(len(cells)) + first_number
    pixels[:, 0, 0, 0], pixels[:, 1, 0, 0] = (numbers // 256).byte(), (numbers % 256).byte()
    labels, domains = torch.from_numpy(cells[:, 1].copy()), torch.from_numpy(cells[:, 0].copy())
    return Split(TensorImages(pixels), labels, domains if table.ndim == 2 else None)


@pytest.fixture
def dataset() -> Callable[..., Dataset]:
    """Builds a data set from class counts of train and test; two-dimensional counts have domains."""

    def make(train: Counts, test: Counts | None = None, **more: object) -> Dataset:
        built = split_of(train)
        classes = np.asarray(train).shape[-1]
        names = ("art", "cartoon", "photo", "sketch", "toy", "print")
        domain_names = () if built.domains is None else names[: np.asarray(train).shape[0]]
        built_test = None if test is None else split_of(test, first_number=len(built))
        names_of_classes = tuple(f"class{c}" for c in range(classes))
        return Dataset("toy", names_of_classes, built, built_test, "hash", domain_names, **more)  # type: ignore[arg-type]

    return make
