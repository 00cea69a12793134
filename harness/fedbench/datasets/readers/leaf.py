"""``leaf:FOLDER``: FEMNIST as LEAF writes it: ``train/*.json`` and ``test/*.json`` with the samples of each writer.

Each file is ``{"users": [...], "num_samples": [...], "user_data": {user: {"x": [[784 numbers in 0..1], ...], "y":
[...]}}}``. The 62 classes are the digits, the capital and the small letters. Images are 28 x 28, grey.

Caldas et al., LEAF: A Benchmark for Federated Settings, 2018.
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedbench.core.errors import FedbenchError, NotHere
from fedbench.core.federation import Dataset, Split, TensorImages
from fedbench.core.files import read_bytes
from fedbench.datasets.content import dataset
from fedbench.datasets.names import DatasetName, find

SIDE = 28
CLASSES = (
    *(f"digit {digit}" for digit in string.digits),
    *(f"capital letter {letter}" for letter in string.ascii_uppercase),
    *(f"small letter {letter}" for letter in string.ascii_lowercase),
)
Samples = tuple[list[Any], list[int], list[str]]
"""Images, labels and writers, sample by sample."""


def load(parsed: DatasetName, data_dir: Path, cache_dir: Path) -> Dataset:
    """The writers' samples; test samples of writers who have no training sample count as anybody's."""
    folder = find(parsed.location, data_dir, "LEAF folder")
    train, test = (_read(folder, split) for split in ("train", "test"))
    names = tuple(sorted({*train[2], *test[2]}))
    return dataset(parsed.text, CLASSES, _split(train, names), _split(test, names), client_names=names)


def _read(folder: Path, split: str) -> Samples:
    files = sorted((folder / split).glob("*.json"))
    if not files:
        raise NotHere(
            f"{str(folder)!r} holds no {split}/*.json; make them with LEAF's ./preprocess.sh -s niid --sf 1.0 -k 0 -t "
            "sample, or name the folder that holds train and test."
        )
    images: list[Any] = []
    labels: list[int] = []
    writers: list[str] = []
    for file in files:
        try:
            content = json.loads(read_bytes(file))
            for writer in content["users"]:
                own = content["user_data"][writer]
                if len(own["x"]) != len(own["y"]):
                    raise ValueError(f"writer {writer} has {len(own['x'])} images and {len(own['y'])} labels")
                images += own["x"]
                labels += map(int, own["y"])
                writers += [str(writer)] * len(own["y"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else error
            raise FedbenchError(f"{str(file)!r} is no file of LEAF's FEMNIST ({reason}); get it again.") from None
    return images, labels, writers


def _split(samples: Samples, names: tuple[str, ...]) -> Split:
    images, labels, writers = samples
    try:
        grey = np.asarray(images, dtype=np.float32).reshape(len(images), SIDE * SIDE)
    except ValueError:
        raise FedbenchError(
            f"an image of LEAF's FEMNIST does not have {SIDE * SIDE} pixels; get the data again."
        ) from None
    if not bool(((grey >= 0) & (grey <= 1)).all()):
        raise FedbenchError("an image of LEAF's FEMNIST has pixels outside 0 to 1; get the data again.")
    pixels = torch.from_numpy(np.round(255 * grey).astype(np.uint8)).reshape(-1, 1, SIDE, SIDE)
    place = {name: number for number, name in enumerate(names)}
    clients = torch.tensor([place[writer] for writer in writers], dtype=torch.int64)
    return Split(TensorImages(pixels.repeat(1, 3, 1, 1)), torch.tensor(labels, dtype=torch.int64), clients=clients)
