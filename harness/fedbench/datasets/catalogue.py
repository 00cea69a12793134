"""The data sets of the papers and of the prompt methods' usual comparison: what to get, how it lies, what to type."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath
from urllib.parse import parse_qsl


@dataclass(frozen=True)
class DataCard:
    """One data set. ``folders`` are those that its releases unpack to, the one that suites name first."""

    title: str
    typed: str
    """As ``--set dataset=`` takes it."""
    get: str
    """The archive, and where it is published."""
    layout: str
    """Name of the folder below --data-dir."""
    classes: int
    domains: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    hub: tuple[str, ...] = ()
    """Copies on the Hugging Face Hub, with the options that they need."""

    @property
    def names(self) -> frozenset[str]:
        """Every name of the data set, without options."""
        scheme = self.typed.partition(":")[0].partition("?")[0]
        below = {f"{scheme}:{folder}" for folder in self.folders}
        return frozenset({self.typed.partition("?")[0], *below, *(f"hf:{name.partition('?')[0]}" for name in self.hub)})


_SPLITS = "split_zhou_*.json of CoOp beside the images"
_STYLES = "domain/class/*.jpg"
_TV = "the files as torchvision keeps them"


def _coop(title: str, folder: str, get: str, classes: int, hub: str = "") -> DataCard:
    return DataCard(title, f"listfile:{folder}", get, _SPLITS, classes, folders=(folder,), hub=(hub,) if hub else ())


CARDS = (
    DataCard("CIFAR-10", "cifar10", "cifar-10-python.tar.gz; ?download=true fetches it", f"cifar-10-batches-py, {_TV}",
             10, hub=("uoft-cs/cifar10", "cifar10")),
    DataCard("CIFAR-100", "cifar100", "cifar-100-python.tar.gz; ?download=true fetches it", f"cifar-100-python, {_TV}",
             100, hub=("uoft-cs/cifar100", "cifar100")),
    DataCard("Fashion-MNIST", "fashion-mnist", "four archives; ?download=true fetches them", f"FashionMNIST/raw, {_TV}",
             10, hub=("zalando-datasets/fashion_mnist", "fashion_mnist")),
    DataCard("ImageNet-LT", "listfile:ImageNet-LT",
             "ILSVRC 2012 (image-net.org) and ImageNet_LT_train.txt, ImageNet_LT_test.txt of its authors' release",
             "the two lists, and train/ and val/ as the lists have them", 1000,
             folders=("ImageNet-LT", "ImageNet_LT", "imagenet-lt", "imagenet_lt")),
    DataCard("ImageNet", "imagefolder:imagenet?names=imagenet", "ILSVRC 2012 (image-net.org), val by class",
             "train/n01440764/*.JPEG and val/n01440764/*.JPEG", 1000, folders=("imagenet", "ILSVRC2012")),
    DataCard("Tiny-ImageNet", "imagefolder:tiny-imagenet-200", "tiny-imagenet-200.zip (cs231n.stanford.edu)",
             "as the archive unpacks", 200, folders=("tiny-imagenet-200",), hub=("zh-plus/tiny-imagenet",)),
    DataCard("CINIC-10", "imagefolder:CINIC-10", "CINIC-10.tar.gz (University of Edinburgh DataShare)",
             "train/class/*.png, valid/ and test/", 10, folders=("CINIC-10", "cinic-10", "CINIC10", "cinic10")),
    DataCard("PACS", "imagefolder:PACS", "PACS.zip of DomainBed, or pacs/images of Dassl", _STYLES, 7,
             ("art_painting", "cartoon", "photo", "sketch"), ("PACS", "pacs", "pacs_data"),
             ("flwrlabs/pacs?domain=domain",)),
    DataCard("VLCS", "imagefolder:VLCS", "VLCS.tar.gz of DomainBed; the original release and Dassl's are read too",
             f"{_STYLES}, or domain/split/class", 5, ("Caltech101", "LabelMe", "SUN09", "VOC2007"), ("VLCS", "vlcs")),
    DataCard("Office-Home", "imagefolder:OfficeHome", "OfficeHomeDataset_10072016.zip (hemanthdv.org)", _STYLES, 65,
             ("Art", "Clipart", "Product", "Real World"),
             ("OfficeHome", "Office-Home", "OfficeHomeDataset_10072016", "office_home", "office_home_dg"),
             ("flwrlabs/office-home?domain=domain",)),
    DataCard("Office-Caltech-10", "imagefolder:office_caltech_10?size=256", "office_caltech_10.zip of FedBN's release",
             _STYLES, 10, ("amazon", "caltech", "dslr", "webcam"), ("office_caltech_10", "Office-Caltech-10")),
    DataCard("DomainNet", "imagefolder:DomainNet?size=256&classes=domainnet-10",
             "six archives (ai.bu.edu/M3SDA), side by side; classes=domainnet-10 takes FedBN's ten of 345", _STYLES,
             345, ("clipart", "infograph", "painting", "quickdraw", "real", "sketch"),
             ("DomainNet", "domainnet", "domain_net")),
    DataCard("Digits-5", "imagefolder:digits?names=digits",
             "the digits archive of FedBN or digits_dg of Dassl, as images",
             f"{_STYLES}, or domain/split/class, classes 0 to 9", 10, ("mnist", "mnist_m", "svhn", "syn", "usps"),
             ("digits", "digits-5", "digits_dg", "Digits-Five")),
    DataCard("iNaturalist 2018", "listfile:iNaturalist18", "train_val2018.tar.gz, iNaturalist18_train.txt, "
             "iNaturalist18_val.txt", "the lists, train_val2018/ and classnames.txt", 8142,
             folders=("iNaturalist18", "inaturalist")),
    _coop("Caltech101", "caltech-101", "caltech-101.zip (data.caltech.edu) and split_zhou_Caltech101.json", 100),
    _coop("OxfordPets", "oxford_pets", "images.tar.gz (robots.ox.ac.uk) and split_zhou_OxfordPets.json", 37),
    _coop("StanfordCars", "stanford_cars", "cars_train, cars_test and split_zhou_StanfordCars.json", 196),
    _coop("Flowers102", "oxford_flowers", "102flowers.tgz (robots.ox.ac.uk) and split_zhou_OxfordFlowers.json", 102),
    _coop("Food101", "food-101", "food-101.tar.gz (data.vision.ee.ethz.ch) and split_zhou_Food101.json",
             101, "ethz/food101"),
    _coop("FGVCAircraft", "fgvc_aircraft",
             "fgvc-aircraft-2013b.tar.gz; its own lists of variants become list files", 100),
    _coop("SUN397", "sun397", "SUN397.tar.gz and split_zhou_SUN397.json", 397),
    _coop("DTD", "dtd", "dtd-r1.0.1.tar.gz (robots.ox.ac.uk) and split_zhou_DescribableTextures.json", 47),
    _coop("EuroSAT", "eurosat", "EuroSAT.zip and split_zhou_EuroSAT.json", 10),
    _coop("UCF101", "ucf101", "UCF-101-midframes.zip and split_zhou_UCF101.json", 101),
)  # fmt: skip


def card_of(name: str) -> DataCard | None:
    """The card of the data set called ``name``, options and place aside; None for one that is not listed."""
    plain = plain_name(name)
    return next((card for card in CARDS if plain in card.names), None)


def plain_name(name: str) -> str:
    """``name`` without options, and of a folder its own name alone, wherever it lies."""
    scheme, colon, place = name.partition("?")[0].partition(":")
    if scheme in ("imagefolder", "listfile"):
        place = PurePosixPath(place).name.removesuffix(".tar")
    return f"{scheme}{colon}{place}"


def alike(name: str) -> Iterable[str]:
    """All plain names of the same images as the plain ``name``."""
    card = card_of(name)
    return {name} if card is None else card.names


_WHERE = frozenset({"download", "layout", "classnames", "names", "image", "label", "domain", "root"})
"""Options that say where things are and what they are called, not which images there are."""


def same_data(first: str, second: str) -> bool:
    """Whether two names are of the same images; options that only say where they are do not count."""
    return images_of(first) == images_of(second)


def images_of(text: str) -> tuple[str, dict[str, str]]:
    """The images that a name stands for: the data set, by the first of its names, and the options that change them."""
    name, options = name_and_options(text)
    return min(alike(plain_name(name))), {key: value for key, value in options.items() if key not in _WHERE}


def name_and_options(text: str) -> tuple[str, dict[str, str]]:
    """The name of a data set or backbone, and the options behind its question mark."""
    name, _, options = text.partition("?")
    return name, dict(parse_qsl(options, keep_blank_values=True))
