"""The folders that published data sets unpack to, tiny: each is read as what it is, or refused with what to do."""

import json
from pathlib import Path

import pytest

from fedbench.core.errors import FedbenchError
from fedbench.datasets import load_dataset
from fedbench.datasets.catalogue import CARDS, card_of, same_data
from fedbench.kinds.registry import build
from tests.datasets.pictures import png

STYLES = ("art_painting", "cartoon", "photo", "sketch")
HOME, ROOMS, PETS = ("Art", "Real World"), ("Alarm_Clock", "TV"), ("cat", "dog")
TEN = ("bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass", "zebra")


def paths(*levels, files=("a.png", "b.png")):
    """Every path through the ``levels`` of folders."""
    result = [""]
    for level in (*levels, files):
        result = [f"{above}{name}/" for above in result for name in ([level] if isinstance(level, str) else level)]
    return [path.rstrip("/") for path in result]


def write(root: Path, names):
    for number, name in enumerate(names):
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(png(number % 7) if file.suffix in (".png", ".jpg") else b"")


HOMES, WORDS = paths("OfficeHomeDataset_10072016", HOME, ROOMS), ("alarm clock", "TV")
CLIPART = ("clipart", "real")
# fmt: off
READ = {
    # title: (files, what is typed, classes, domains, sizes of train and test)
    "PACS of DomainBed": (paths("PACS", STYLES, PETS), "imagefolder:PACS", PETS, STYLES, 16, 0),
    "PACS with kfold around": (paths("PACS/kfold", STYLES, PETS), "imagefolder:PACS", PETS, STYLES, 16, 0),
    "PACS of Dassl": ([*paths("pacs/images", STYLES, PETS), "pacs/splits/photo_train_kfold.txt"],
                      "imagefolder:pacs", PETS, STYLES, 16, 0),
    "Office-Home as released": (HOMES, "imagefolder:OfficeHomeDataset_10072016", WORDS, HOME, 8, 0),
    "Office-Home of Dassl": (paths("office_home_dg", ("art", "real_world"), ("train", "val"), ROOMS),
                             "imagefolder:office_home_dg", WORDS, ("art", "real_world"), 8, 8),
    "VLCS of DomainBed": (paths("VLCS", ("Caltech101", "SUN09"), ("bird", "car")),
                          "imagefolder:VLCS", ("bird", "car"), ("Caltech101", "SUN09"), 8, 0),
    "VLCS whole": (paths("VLCS", ("Caltech101", "SUN09"), "full", ("bird", "car")),
                   "imagefolder:VLCS", ("bird", "car"), ("Caltech101", "SUN09"), 8, 0),
    "Office-Caltech-10": (paths("office_caltech_10", ("amazon", "dslr"), ("back_pack", "laptop_computer")),
                          "imagefolder:office_caltech_10?size=8", ("backpack", "laptop computer"),
                          ("amazon", "dslr"), 8, 0),
    "DomainNet, ten classes": (paths("DomainNet", CLIPART, (*TEN, "The_Eiffel_Tower", "zigzag")),
                               "imagefolder:DomainNet?classes=domainnet-10",
                               tuple(name.replace("_", " ") for name in TEN), CLIPART, 40, 0),
    "DomainNet, two classes": (paths("DomainNet", CLIPART, (*TEN, "The_Eiffel_Tower")),
                               "imagefolder:DomainNet?classes=zebra,bird", ("bird", "zebra"), CLIPART, 8, 0),
    "Digits-5": (paths("digits", ("mnist", "svhn"), ("0", "1", "9")),
                 "imagefolder:digits?names=digits", ("zero", "one", "nine"), ("mnist", "svhn"), 12, 0),
    "CINIC-10": (paths("CINIC-10", ("train", "valid", "test"), PETS), "imagefolder:CINIC-10", PETS, (), 4, 4),
    "no test split": (paths("tiny", ("train", "val"), PETS), "imagefolder:tiny", PETS, (), 4, 4),
}
REFUSED = {
    # title: (files, what is typed, what is said)
    "VLCS as released": (paths("VLCS", ("CALTECH", "SUN"), ("full", "test", "train"), ("0", "1")),
                         "imagefolder:VLCS", "no words are known"),
    "DomainNet, all classes": (paths("DomainNet", CLIPART, ("bird", "The_Eiffel_Tower")),
                               "imagefolder:DomainNet", "'The_Eiffel_Tower'"),
    "DomainNet without a class": (paths("DomainNet", CLIPART, ("bird", "zebra")),
                                  "imagefolder:DomainNet?classes=domainnet-10", "unknown class of .* 'feather'"),
    "Digits-5 without names": (paths("digits", ("mnist", "svhn"), ("0", "1")),
                               "imagefolder:digits", r"type \?names=digits if they are digits"),
    "ImageNet with folders missing": (paths("imagenet", ("train", "val"), ("n01440764", "n01443537")),
                                      "imagefolder:imagenet?names=imagenet",
                                      "names the labels 0 to 999 or the 1,000 folders"),
    "FGVCAircraft as released": ([f"fgvc_aircraft/data/images_{kind}_train.txt" for kind in ("variant", "family")],
                                 "listfile:fgvc_aircraft/data", "holds several train lists"),
    "iNaturalist without names": (["iNaturalist18/train_val2018/a.jpg"],
                                  "listfile:iNaturalist18", "label 1 has no name; put classnames.txt"),
    "a folder of images alone": (["flowers/jpg/image_00001.jpg"], "imagefolder:flowers",
                                  "lies outside of domain/class"),
}
# fmt: on

COOP = {
    "caltech-101": ("Caltech101", "101_ObjectCategories/", "sea_horse"),
    "oxford_pets": ("OxfordPets", "images/", "maine_coon"),
    "stanford_cars": ("StanfordCars", "", "2012 Tesla Model S"),
    "oxford_flowers": ("OxfordFlowers", "jpg/", "bird of paradise"),
    "food-101": ("Food101", "images/", "apple_pie"),
    "sun397": ("SUN397", "SUN397/", "indoor casino"),
    "dtd": ("DescribableTextures", "dtd/images/", "polka-dotted"),
    "eurosat": ("EuroSAT", "2750/", "Sea or Lake"),
    "ucf101": ("UCF101", "UCF-101-midframes/", "Yo_Yo"),
}


@pytest.fixture
def load(tmp_path):
    return lambda name: load_dataset(name, data_dir=tmp_path, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("title", READ)
def test_published_folders_are_read(title, load, tmp_path):
    files, typed, classes, domains, train, test = READ[title]
    write(tmp_path, files)
    data = load(typed)
    assert (data.classnames, data.domain_names) == (tuple(classes), tuple(domains))
    assert (len(data.train), 0 if data.test is None else len(data.test)) == (train, test)


@pytest.mark.parametrize("title", REFUSED)
def test_what_would_be_read_wrongly_is_refused(title, load, tmp_path):
    files, typed, says = REFUSED[title]
    write(tmp_path, files)
    if "iNaturalist" in title:
        lists = tmp_path / "iNaturalist18"
        (lists / "classnames.json").write_text('{"0": "a finch"}')
        for split in ("train", "test"):
            (lists / f"iNaturalist18_{split}.txt").write_text("train_val2018/a.jpg 0\ntrain_val2018/a.jpg 1\n")
    with pytest.raises(FedbenchError, match=says):
        load(typed)


@pytest.mark.parametrize("folder", COOP)
def test_splits_of_coop_bring_names_and_find_their_images(folder, load, tmp_path):
    title, images, name = COOP[folder]
    rows = [[f"x/{number}.jpg", number % 2, ("other_kind", name)[number % 2]] for number in range(4)]
    write(tmp_path / folder, [f"{images}{path}" for path, _, _ in rows])
    split = {"train": rows[:2], "val": [["x/nowhere.jpg", 0, "other_kind"]], "test": rows[2:]}
    (tmp_path / folder / f"split_zhou_{title}.json").write_text(json.dumps(split))
    data = load(f"listfile:{folder}")
    assert data.classnames == ("other kind", name.replace("_", " "))
    assert data.train.labels.tolist() == data.test.labels.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"train": [["a.jpg", 0, "cat"]], "test": [["b.jpg", 0, "dog"]]}, "label 0 is called 'cat' and 'dog'"),
        ({"train": [["a.jpg", 0, "cat"]]}, "must hold the lists train, val and test"),
        ({"train": [["a.jpg", 0, "cat"]], "test": [["a.jpg", 2, "dog"]]}, "label 1 has no name; type"),
        (
            {"train": [["a.jpg", 0, "cat"]], "test": [["gone.jpg", 0, "cat"]]},
            "no file '.*/gone.jpg'; complete the data",
        ),
        ({"train": [["gone.jpg", 0, "cat"]], "test": [["a.jpg", 0, "cat"]]}, "no image 'gone.jpg' lies below"),
        (
            {"train": [["a.jpg", 0, "cat"]], "test": [["../a.jpg", 0, "cat"]]},
            "'../a.jpg' leads out of the image",
        ),
    ],
)
def test_damaged_splits_of_coop_are_refused(content, says, load, tmp_path):
    write(tmp_path / "pets", ["a.jpg"])
    write(tmp_path, ["a.jpg"])
    (tmp_path / "pets" / "split_zhou_Pets.json").write_text(json.dumps(content))
    with pytest.raises(FedbenchError, match=says):
        load("listfile:pets")


def test_imagenet_lt_and_imagenets_folders_have_published_names(load, tmp_path):
    write(tmp_path, ["ImageNet-LT/train/a.jpg"])
    for split in ("train", "test"):
        lines = [f"train/a.jpg {label}" for label in range(1000)]
        (tmp_path / "ImageNet-LT" / f"ImageNet_LT_{split}.txt").write_text("\n".join(lines))
    names = load("listfile:ImageNet-LT").classnames
    assert len(names) == 1000 and names[:2] == ("tench", "goldfish")
    write(tmp_path, paths("imagenet", ("train", "val"), [f"n{number:08d}" for number in range(1000)], files=("a.png",)))
    assert load("imagefolder:imagenet?names=imagenet").classnames == names


def test_a_limit_draws_alike_every_time_and_is_other_data(load, tmp_path):
    write(tmp_path, paths("CINIC-10", ("train", "test"), ("cat", "dog"), files=[f"{n}.png" for n in range(9)]))
    whole, some, again = (load(f"imagefolder:CINIC-10{end}") for end in ("", "?limit=5", "?limit=5"))
    assert some.content_hash == again.content_hash != whole.content_hash and len(some.train) == 5
    assert some.train.labels.tolist() == again.train.labels.tolist()
    assert len(load("imagefolder:CINIC-10?limit=500").train) == 18


def test_every_card_has_a_name_that_parses_and_one_set_of_images():

    for card in CARDS:
        assert card_of(card.typed) is card
        build("data set", card.typed)
        for name in card.names:
            assert same_data(name, card.typed.partition("?")[0]), name
    assert same_data("imagefolder:/data/OfficeHomeDataset_10072016", "imagefolder:OfficeHome")
    assert same_data("hf:flwrlabs/pacs?domain=domain", "imagefolder:PACS") and not same_data("cifar10", "cifar100")
