"""Data sets by name: ``load_dataset("embedded", ...)``, ``load_dataset("imagefolder:PACS.tar", ...)``.

A name is ``scheme[:location][?option=value&...]``. Each scheme is one module of this package with a function
``load``; the modules are imported only when used, so listing the names stays cheap and needs no torch.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from fedbench.datasets.names import Source, parse_name

if TYPE_CHECKING:
    from fedbench.core.federation import Dataset

__all__ = ["dataset_names", "load_dataset", "takes_image_size"]

TORCHVISION, BELOW = "readers.torchvision_layout", "in torchvision's layout below --data-dir; ?download=true fetches it"

SOURCES = {
    "embedded": Source(
        "readers.embedded",
        "32 x 32 images of 10 or 20 shapes in four styles, rendered here; needs no files and no network",
        options=("classes", "train", "test", "seed"),
    ),
    "cifar10": Source(TORCHVISION, f"CIFAR-10 {BELOW}", options=("download", "limit")),
    "cifar100": Source(TORCHVISION, f"CIFAR-100 {BELOW}", options=("download", "limit")),
    "fashion-mnist": Source(TORCHVISION, f"Fashion-MNIST {BELOW}", options=("download", "limit")),
    "imagefolder": Source(
        "readers.imagefolder",
        "a folder or .tar of domain/class/* (PACS), split/class/* (CINIC-10) or domain/split/class/* (VLCS)",
        options=("layout", "size", "classnames", "classes", "names", "limit"),
        location="PATH",
    ),
    "hf": Source(
        "readers.huggingface",
        "a Hugging Face data set, by its name on the Hub or as a local folder of parquet files",
        options=("config", "train", "test", "image", "label", "domain", "size", "classnames", "names", "limit"),
        location="NAME_OR_PATH",
    ),
    "listfile": Source(
        "readers.listfile",
        "images named by train.txt and test.txt with lines 'path label' (ImageNet-LT), or by CoOp's split_zhou_*.json",
        options=("root", "test", "size", "classnames", "names", "limit"),
        location="PATH",
    ),
}


def dataset_names() -> dict[str, str]:
    """Every kind of data set as it is typed, with one line on what it is."""
    return {source.usage(scheme): source.description for scheme, source in SOURCES.items()}


def takes_image_size(name: str) -> bool:
    """Whether ``load_dataset`` may need to know which size the images are for: its files may differ in it."""
    parsed = parse_name(name, SOURCES)
    return "size" in SOURCES[parsed.scheme].options and "size" not in parsed.options


def load_dataset(name: str, *, data_dir: Path, cache_dir: Path, image_size: int | None = None) -> Dataset:
    """The data set called ``name``, see ``dataset_names``.

    Paths in the name are taken as typed where they exist, else below ``data_dir``. What was rendered or decoded once
    is kept in ``cache_dir``. Images of differing sizes are brought to ``image_size`` pixels square (224 where it is
    None), unless the name says a size; images that share one keep it. ``?limit=N`` takes N images of each split, drawn
    at random and alike every time.
    """
    parsed = replace(parse_name(name, SOURCES), image_size=image_size)
    dataset: Dataset = import_module(f"fedbench.datasets.{parsed.module}").load(parsed, data_dir, cache_dir)
    limit = parsed.integer("limit", 1, 10**9)
    if limit is None:
        return dataset
    from fedbench.datasets.content import limited

    return limited(dataset, limit)
