"""Images that come as arrays: ``cifar10``, ``cifar100``, ``fashion-mnist`` and ``leaf:FOLDER``.

The first three are torchvision's files below ``data_dir``, or with ``?download=true``. ``fashion-mnist`` is also read
from where Debian's package ``dataset-fashion-mnist`` puts it, packed. CIFAR comes as pickles: torchvision compares each
file's checksum with the published one before it opens any.

``leaf:FOLDER`` is FEMNIST as LEAF writes it (Caldas et al., LEAF: A Benchmark for Federated Settings, 2018):
``train/*.json`` and ``test/*.json`` with the samples of each writer. Each file is ``{"users": [...], "num_samples":
[...], "user_data": {user: {"x": [[784 numbers in 0..1], ...], "y": [...]}}}``. The 62 classes are the digits, the
capital and the small letters. Images are 28 x 28, grey.
"""

from __future__ import annotations

import gzip
import json
import string
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedbench.core.errors import FedbenchError, NotHere
from fedbench.core.federation import Dataset, Split, TensorImages
from fedbench.core.files import read_bytes
from fedbench.datasets.classnames import words_for
from fedbench.datasets.content import dataset
from fedbench.datasets.sources import Asked, Downloaded

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
"""Debian's package ``dataset-fashion-mnist`` puts its four archives here."""
SIDE = 28
CLASSES = (
    *(f"digit {digit}" for digit in string.digits),
    *(f"capital letter {letter}" for letter in string.ascii_uppercase),
    *(f"small letter {letter}" for letter in string.ascii_lowercase),
)
Samples = tuple[np.ndarray, list[int], list[str]]
"""Images (n, 28 * 28) uint8, labels and writers, sample by sample."""


def load(asked: Asked[Any]) -> Dataset:
    """The data set called by its scheme, both splits in memory."""
    return _of_torchvision(asked, asked.options.download) if isinstance(asked.options, Downloaded) else _of_leaf(asked)


# --- torchvision's files


def _of_torchvision(asked: Asked[Any], download: bool) -> Dataset:
    from torchvision import datasets as torchvision_datasets

    of_scheme = {
        "cifar10": torchvision_datasets.CIFAR10,
        "cifar100": torchvision_datasets.CIFAR100,
        "fashion-mnist": torchvision_datasets.FashionMNIST,
    }
    kind = of_scheme[asked.scheme]
    folder = asked.data_dir / (kind.__name__ if asked.scheme == "fashion-mnist" else kind.base_folder)
    if asked.scheme == "fashion-mnist" and not download and not folder.is_dir() and DEBIAN.is_dir():
        with tempfile.TemporaryDirectory() as unpacked:
            _unpack(kind, Path(unpacked, kind.__name__, "raw"))
            return _read(asked, kind, Path(unpacked), DEBIAN, download=False)
    if not download:
        _check_files(asked.scheme, kind, folder)
    return _read(asked, kind, asked.data_dir, folder, download=download)


def _unpack(kind: Any, raw: Path) -> None:
    """Debian's archives as torchvision's files; FedbenchError for one that is missing or damaged."""
    raw.mkdir(parents=True)
    for name, _ in kind.resources:
        try:
            (raw / Path(name).stem).write_bytes(gzip.decompress(read_bytes(DEBIAN / name)))
        except (OSError, EOFError, zlib.error) as error:
            raise FedbenchError(
                f"fashion-mnist: {str(DEBIAN / name)!r} can't be unpacked ({error}); install the package "
                "dataset-fashion-mnist again."
            ) from error


def _read(asked: Asked[Any], kind: Any, data_dir: Path, folder: Path, *, download: bool) -> Dataset:
    try:
        train, test = (kind(str(data_dir), train=is_train, download=download) for is_train in (True, False))
    # torchvision raises RuntimeError for files that are missing or fail their checksum and OSError (URLError) for
    # downloads, but its reader of Fashion-MNIST's files nearly anything where they are damaged.
    except Exception as error:
        reason = str(error) or "a file is cut short"
        todo = "check the network, or copy the files there" if download else f"delete it and {_todo(asked.scheme)}"
        raise FedbenchError(f"{asked.scheme} can't be read from {str(folder)!r} ({reason}); {todo}.") from error
    return dataset(
        asked.text, words_for(train.classes, str(folder)), _torchvision_split(train), _torchvision_split(test)
    )


def _check_files(scheme: str, kind: Any, folder: Path) -> None:
    """An error for the first file that is missing or not the published one."""
    from torchvision.datasets.utils import check_integrity

    if not folder.is_dir():
        raise NotHere(f"{scheme} is not in {str(folder.parent)!r}: no folder {folder.name!r} there; {_todo(scheme)}.")
    if scheme == "fashion-mnist":
        # Unpacked, these files have no published checksum; they are plain arrays, and a short one fails to load.
        published = [(f"raw/{Path(name).stem}", None) for name, _ in kind.resources]
    else:
        published = [*kind.train_list, *kind.test_list, (kind.meta["filename"], kind.meta["md5"])]
    for name, md5 in published:
        file = folder / name
        if not file.is_file():
            raise FedbenchError(f"{scheme}: {str(file)!r} is missing; {_todo(scheme)}.")
        if not check_integrity(str(file), md5):
            raise FedbenchError(
                f"{scheme}: {str(file)!r} is not the published file (its checksum differs) and wasn't opened; "
                f"delete it and {_todo(scheme)}."
            )


def _todo(scheme: str) -> str:
    package = ", install Debian's package dataset-fashion-mnist" if scheme == "fashion-mnist" else ""
    here = "point --data-dir (FEDBENCH_DATA) at the folder that holds its files"
    return f"type {scheme}?download=true to download it{package}, or {here}"


def _torchvision_split(source: Any) -> Split:
    pixels = torch.from_numpy(np.array(source.data))
    if pixels.ndim == 3:
        pixels = pixels[..., None].expand(-1, -1, -1, 3)  # grey to three equal channels
    return Split(
        TensorImages(pixels.permute(0, 3, 1, 2).contiguous()), torch.as_tensor(source.targets, dtype=torch.int64)
    )


# --- LEAF


def _of_leaf(asked: Asked[Any]) -> Dataset:
    """The writers' samples; test samples of writers who have no training sample count as anybody's."""
    folder = asked.find(asked.location, "LEAF folder")
    train, test = (_leaf_samples(folder, split) for split in ("train", "test"))
    names = tuple(sorted({*train[2], *test[2]}))
    return dataset(asked.text, CLASSES, _leaf_split(train, names), _leaf_split(test, names), client_names=names)


def _leaf_samples(folder: Path, split: str) -> Samples:
    files = sorted((folder / split).glob("*.json"))
    if not files:
        raise NotHere(
            f"{str(folder)!r} holds no {split}/*.json; make them with LEAF's ./preprocess.sh -s niid --sf 1.0 -k 0 -t "
            "sample, or name the folder that holds train and test."
        )
    images = [np.empty((0, SIDE * SIDE), np.uint8)]
    labels: list[int] = []
    writers: list[str] = []
    for file in files:
        try:
            content = json.loads(read_bytes(file))
            for writer in content["users"]:
                own = content["user_data"][writer]
                if len(own["x"]) != len(own["y"]):
                    raise ValueError(f"writer {writer} has {len(own['x'])} images and {len(own['y'])} labels")
                images.append(_pixels(own["x"]))
                labels += map(int, own["y"])
                writers += [str(writer)] * len(own["y"])
        except (OSError, ValueError, LookupError, TypeError, OverflowError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else error
            raise FedbenchError(f"{str(file)!r} is no file of LEAF's FEMNIST ({reason}); get it again.") from None
    return np.concatenate(images), labels, writers


def _pixels(images: list[Any]) -> np.ndarray:
    """A writer's images as bytes, which take a thirtieth of the memory of Python's numbers."""
    try:
        grey = np.asarray(images, dtype=np.float32).reshape(len(images), SIDE * SIDE)
    except ValueError:
        raise ValueError(f"an image does not have {SIDE * SIDE} pixels") from None
    if not bool(((grey >= 0) & (grey <= 1)).all()):
        raise ValueError("an image has pixels outside 0 to 1")
    return np.round(255 * grey).astype(np.uint8)


def _leaf_split(samples: Samples, names: tuple[str, ...]) -> Split:
    images, labels, writers = samples
    pixels = torch.from_numpy(images).reshape(-1, 1, SIDE, SIDE)
    number_of = {name: number for number, name in enumerate(names)}
    clients = torch.tensor([number_of[writer] for writer in writers], dtype=torch.int64)
    return Split(TensorImages(pixels.repeat(1, 3, 1, 1)), torch.tensor(labels, dtype=torch.int64), clients=clients)
