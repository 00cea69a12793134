"""The data sets that come with fedbench, as plug-ins. Each is read by a module of `fedbench.datasets.readers`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, ClassVar

from fedbench.core.method.base import NoParams
from fedbench.datasets.names import DatasetName
from fedbench.kinds.kinds import DatasetRequest, DatasetSource

if TYPE_CHECKING:
    from fedbench.core.federation import Dataset


class _Read(DatasetSource[NoParams]):
    """Read by a module with a function ``load``, which is imported when it is used."""

    reader: ClassVar[str]
    taken: ClassVar[tuple[str, ...]]
    """Names of options, whose values the reader checks."""

    @classmethod
    def options(cls) -> tuple[str, ...]:
        """The names of what may be typed behind the question mark."""
        return cls.taken

    def load(self, request: DatasetRequest) -> Dataset:
        """What the reader gives."""
        name = DatasetName(request.text, self.name, request.location, request.options, request.image_size)
        module = import_module(f"fedbench.datasets.readers.{self.reader}")
        dataset: Dataset = module.load(name, request.data_dir, request.cache_dir)
        return dataset


class Cifar10(_Read):
    """CIFAR-10 in torchvision's layout below --data-dir; ?download=true fetches it."""

    name = "cifar10"
    reader = "arrays"
    taken = ("download", "limit")


class Cifar100(_Read):
    """CIFAR-100 in torchvision's layout below --data-dir; ?download=true fetches it."""

    name = "cifar100"
    reader = "arrays"
    taken = ("download", "limit")


class FashionMnist(_Read):
    """Fashion-MNIST in torchvision's layout below --data-dir; ?download=true fetches it."""

    name = "fashion-mnist"
    reader = "arrays"
    taken = ("download", "limit")


class ImageFolder(_Read):
    """A folder or .tar of domain/class/* (PACS), split/class/* (CINIC-10) or domain/split/class/* (VLCS)."""

    name = "imagefolder"
    location = "PATH"
    reader = "imagefolder"
    taken = ("layout", "size", "classnames", "classes", "names", "clients", "limit")
    scales_images = True


class HuggingFace(_Read):
    """A Hugging Face data set, by its name on the Hub or as a local folder of parquet files."""

    name = "hf"
    location = "NAME_OR_PATH"
    reader = "huggingface"
    taken = ("config", "train", "test", "image", "label", "domain", "client", "size", "classnames", "names", "limit")
    scales_images = True


class ListFile(_Read):
    """Images named by train.txt and test.txt with lines 'path label' (ImageNet-LT), or by CoOp's split_zhou_*.json."""

    name = "listfile"
    location = "PATH"
    reader = "listed"
    taken = ("root", "test", "size", "classnames", "names", "limit")
    scales_images = True


class CsvFile(_Read):
    """Images named by a CSV file with columns path, label, domain, client and split."""

    name = "csv"
    location = "FILE"
    reader = "listed"
    taken = (
        *("path", "label", "domain", "client", "split", "test"),
        *("root", "suffix", "size", "classnames", "limit"),
    )
    scales_images = True


class Leaf(_Read):
    """FEMNIST as LEAF writes it: the characters of each writer, in train/*.json and test/*.json."""

    name = "leaf"
    location = "FOLDER"
    reader = "arrays"
    taken = ("limit",)
