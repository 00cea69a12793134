"""Small files of images for folders of data, as published data sets and libraries write them."""

from __future__ import annotations

import hashlib
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def picture(number: int, size: tuple[int, int] = (12, 10), mode: str = "RGB") -> Image.Image:
    """Noise of (width, height), another for each number."""
    pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def png(number: int, size: tuple[int, int] = (12, 10), kind: str = "PNG") -> bytes:
    """The same as a file."""
    file = io.BytesIO()
    picture(number, size).save(file, kind)
    return file.getvalue()


def write_parquet(folder: Path, rows: dict[str, int], features: dict[str, Any] | None = None, **columns: list) -> Path:
    """Parquet files of ``rows`` by split as `datasets` writes them: images, labels 0 and 1 in turn, more columns."""
    import datasets

    folder.mkdir(exist_ok=True)
    types = datasets.Features(
        {"img": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"]), **(features or {})}
    )
    for split, count in rows.items():
        cells = {"img": [{"bytes": png(number), "path": None} for number in range(count)]}
        cells["label"] = [number % 2 for number in range(count)]
        data = datasets.Dataset.from_dict({**cells, **{k: v[:count] for k, v in columns.items()}}, features=types)
        data.to_parquet(str(folder / f"{split}-00000-of-00001.parquet"))
    return folder


def write_cifar(root: Path, set_table: Any) -> Path:
    """Five training batches of two images and a test batch; ``set_table`` sets the checksums torchvision expects."""
    from torchvision.datasets import CIFAR10

    from fedbench.datasets.classnames import LABEL_ORDERS

    folder = root / CIFAR10.base_folder
    folder.mkdir()
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    for number, name in enumerate(names):
        pixels = np.full((2, 3072), number, np.uint8)
        pixels[:, :1024] = 200  # the first plane is red
        (folder / name).write_bytes(pickle.dumps({"data": pixels, "labels": [number, 9 - number]}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list(LABEL_ORDERS["cifar10"])}))
    md5 = {file.name: hashlib.md5(file.read_bytes()).hexdigest() for file in folder.iterdir()}
    set_table(CIFAR10, "train_list", [[name, md5[name]] for name in names[:5]])
    set_table(CIFAR10, "test_list", [["test_batch", md5["test_batch"]]])
    set_table(CIFAR10, "meta", {**CIFAR10.meta, "md5": md5["batches.meta"]})
    return folder


def write_fashion(root: Path) -> Path:
    """The four idx files: a big-endian header of magic number and sizes, then bytes."""
    raw = root / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for split, count in (("train", 3), ("t10k", 2)):
        header = np.array([0x00000803, count, 28, 28], ">i4").tobytes()
        pixels = np.arange(count * 784, dtype=np.uint32).astype(np.uint8)
        (raw / f"{split}-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
        labels = np.array([0x00000801, count], ">i4").tobytes() + bytes(range(count))
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(labels)
    return raw
