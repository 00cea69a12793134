"""The data sets that come with fedbench, as plug-ins. Each is read by a module of `fedbench.datasets.readers`."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Generic, Literal, TypeVar

from pydantic import Field

from fedbench.core.errors import NotHere
from fedbench.core.files import looked_up
from fedbench.core.method.base import NoParams
from fedbench.kinds.base import P
from fedbench.kinds.kinds import DatasetRequest, DatasetSource
from fedbench.kinds.options import Options

if TYPE_CHECKING:
    from fedbench.core.federation import Dataset


class Downloaded(Options):
    download: bool = Field(False, description="true fetches missing files")


class Files(Options):
    size: int | None = Field(None, ge=8, le=4096, description="side in pixels that images are brought to")
    classnames: str | None = Field(None, description="a,b,c or a file: the classes' words in label order")
    names: Literal["cifar10", "cifar100", "fashion-mnist", "digits", "imagenet"] | None = Field(
        None, description="data set whose published class names these are"
    )


class FolderOptions(Files):
    layout: Literal["domain", "split"] | None = Field(None, description="what the top folders are")
    classes: str | None = Field(None, description="a,b: the classes to read; domainnet-10: FedBN's ten")
    clients: str | None = Field(None, description="CSV file of path and client")


class TableOptions(Files):
    config: str | None = Field(None, description="configuration of the data set")
    train: str | None = Field(None, description="split to train on")
    test: str | None = Field(None, description="split to test on")
    image: str | None = Field(None, description="column of images")
    label: str | None = Field(None, description="column of classes")
    domain: str | None = Field(None, description="column of domains")
    client: str | None = Field(None, description="column of clients")


class ListOptions(Files):
    root: str | None = Field(None, description="folder that paths start from")
    test: str | None = Field(None, description="file of the test images")


class CsvOptions(ListOptions):
    path: str = Field("path", description="column of paths")
    label: str = Field("label", description="column of classes")
    domain: str = Field("domain", description="column of domains")
    client: str = Field("client", description="column of clients")
    split: str = Field("split", description="column of splits")
    suffix: str = Field("", description="ending added to the paths")


O_co = TypeVar("O_co", covariant=True)


@dataclass(frozen=True)
class Asked(Generic[O_co]):
    """A data set to be read: its name taken apart, its options checked, and where to look."""

    scheme: str
    text: str
    location: str
    options: O_co
    data_dir: Path
    cache_dir: Path
    image_size: int | None = None
    """The side in pixels that images of differing sizes are brought to where no option says it; None: the usual one."""

    def find(self, path: str, what: str) -> Path:
        """``path`` as typed where it exists, else below ``data_dir``; ``what`` names the thing in the error."""
        typed = looked_up(path, what)
        for candidate in (typed, self.data_dir / typed):
            if looked_up(candidate, what).exists():
                return candidate
        below = "" if typed.is_absolute() else f", here or below {str(self.data_dir)!r}"
        raise NotHere(f"{what} {path!r} does not exist{below}; check the path or put the data there.")


class _Read(DatasetSource[P]):
    reader: ClassVar[str]
    """The module that reads it, which is imported when it is used: its function ``load``."""

    def load(self, request: DatasetRequest) -> Dataset:
        module = import_module(f"fedbench.datasets.readers.{self.reader}")
        folders = (request.data_dir, request.cache_dir)
        asked = Asked(self.name, request.text, request.location, self.params, *folders, request.image_size)
        dataset: Dataset = module.load(asked)
        return dataset


class Cifar10(_Read[Downloaded]):
    """CIFAR-10 in torchvision's layout below --data-dir; ?download=true fetches it."""

    name = "cifar10"
    reader = "arrays"


class Cifar100(_Read[Downloaded]):
    """CIFAR-100 in torchvision's layout below --data-dir; ?download=true fetches it."""

    name = "cifar100"
    reader = "arrays"


class FashionMnist(_Read[Downloaded]):
    """Fashion-MNIST in torchvision's layout below --data-dir; ?download=true fetches it."""

    name = "fashion-mnist"
    reader = "arrays"


class ImageFolder(_Read[FolderOptions]):
    """A folder or .tar of domain/class/* (PACS), split/class/* (CINIC-10) or domain/split/class/* (VLCS)."""

    name = "imagefolder"
    location = "PATH"
    reader = "imagefolder"
    scales_images = True


class HuggingFace(_Read[TableOptions]):
    """A Hugging Face data set, by its name on the Hub or as a local folder of parquet files."""

    name = "hf"
    location = "NAME_OR_PATH"
    reader = "huggingface"
    scales_images = True


class ListFile(_Read[ListOptions]):
    """Images named by train.txt and test.txt with lines 'path label' (ImageNet-LT), or by CoOp's split_zhou_*.json."""

    name = "listfile"
    location = "PATH"
    reader = "listed"
    scales_images = True


class CsvFile(_Read[CsvOptions]):
    """Images named by a CSV file with columns path, label, domain, client and split."""

    name = "csv"
    location = "FILE"
    reader = "listed"
    scales_images = True


class Leaf(_Read[NoParams]):
    """FEMNIST as LEAF writes it: the characters of each writer, in train/*.json and test/*.json."""

    name = "leaf"
    location = "FOLDER"
    reader = "arrays"
