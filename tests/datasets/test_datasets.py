"""Data sets by name: every source on small files of its real format, and every error by its text."""

import gzip
import hashlib
import io
import json
import logging
import os
import pickle
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedbench.core.errors import FedbenchError
from fedbench.core.federation import Dataset, Split, TensorImages
from fedbench.core.scenario import Scenario
from fedbench.core.spec import RunSpec
from fedbench.datasets import cache, content, dataset_names, load_dataset
from fedbench.datasets.classnames import CIFAR100, LABEL_ORDERS, words_for
from fedbench.datasets.content import ImageFiles
from fedbench.datasets.readers import arrays
from fedbench.kinds.registry import parted
from fedbench.runs.prepare import Settings, image_size_for, prepare
from fedbench_embedded import data as procedural
from fedbench_embedded.images import CLASSNAMES
from tests.datasets.pictures import picture, png, write_cifar, write_fashion, write_parquet


@pytest.fixture
def load(tmp_path):
    def load(name: str) -> Dataset:
        return load_dataset(name, data_dir=tmp_path, cache_dir=tmp_path / "cache")

    return load


def error_of(load, name: str) -> str:
    with pytest.raises(FedbenchError) as caught:
        load(name)
    return str(caught.value)


def write_folder(root: Path, groups: list[str], classes: list[str], size: tuple[int, int] = (12, 10)) -> Path:
    """Two pictures for every group/class, numbered in sorted order."""
    number = 0
    for group in sorted(groups):
        for label in sorted(classes):
            (root / group / label).mkdir(parents=True)
            for name in ("a.png", "b.png"):
                picture(number, size).save(root / group / label / name)
                number += 1
    return root


# --- names


def test_unknown_scheme_and_option_name_the_nearest(load):
    assert "unknown data set 'embeded'; did you mean 'embedded'?" in error_of(load, "embeded")
    assert "unknown option of data set 'embedded' 'sed'; did you mean 'seed'?" in error_of(load, "embedded?sed=1")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("embedded?classes=12", "option classes='12': input should be '10' or '20'"),
        ("embedded?train=many", "option train='many': input should be a valid integer"),
        ("embedded?train=-5", "option train='-5': input should be greater than or equal to 1"),
        ("embedded?seed", "'seed' is not option=value; type embedded?option=value"),
        ("embedded?seed=1&seed=2", "option 'seed' is given twice"),
        ("embedded:here", "nothing can follow the colon; type 'embedded'"),
        ("imagefolder", "is incomplete: type imagefolder:PATH"),
        ("hf:?train=x", "is incomplete: type hf:NAME_OR_PATH"),
    ],
)
def test_malformed_names(load, name, says):
    assert says in error_of(load, name)


def test_name_is_taken_apart():
    assert parted("data set", "hf:org/name?train=a&test=b") == ("hf", "org/name", {"train": "a", "test": "b"})


def test_listing_names_imports_nothing_heavy():
    assert {"embedded", "cifar10", "imagefolder:PATH", "hf:NAME_OR_PATH", "listfile:PATH"} <= set(dataset_names())
    heavy = "{'torch', 'torchvision', 'datasets', 'PIL', 'numpy'}"
    code = f"import sys, fedbench.datasets as d; d.dataset_names(); sys.exit(bool({heavy} & set(sys.modules)))"
    # without the third party's package, whose modules import what they like
    own = [entry for entry in sys.path if entry and not list(Path(entry).glob("fedbench_example_*"))]
    path = os.pathsep.join(own)
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}).returncode == 0


# --- class names


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ("back_pack", "backpack"),
        ("laptop_computer", "laptop computer"),
        ("ice_cream", "ice cream"),
        ("wine_glass", "wine glass"),
        ("Alarm_Clock", "alarm clock"),
        ("ToothBrush", "toothbrush"),
        ("TV", "TV"),
        ("T-shirt/top", "t-shirt"),
        ("Ankle boot", "ankle boot"),
        ("aquarium_fish", "aquarium fish"),
        ("lawn_mower", "lawn mower"),
        ("guitar", "guitar"),
        ("fire truck", "fire truck"),
    ],
)
def test_words_of_known_names(raw, words):
    assert words_for([raw], "data") == (words,)


@pytest.mark.parametrize("raw", ["sea_lion", "Walrus", "n01440764", "class2", "", " dog"])
def test_unknown_names_are_never_guessed(raw):
    with pytest.raises(FedbenchError) as caught:
        words_for(["dog", raw], "'pets'")
    assert f"'pets': no words are known for the class names {raw!r}" in str(caught.value)
    assert "classnames.json" in str(caught.value) and "?classnames=FILE" in str(caught.value)


def test_own_words_win_over_the_table():
    assert words_for(["dog", "TV"], "data", {"TV": "television"}) == ("dog", "television")


def test_label_orders_have_all_classes_once_and_words_for_each():
    assert {name: len(set(order)) for name, order in LABEL_ORDERS.items() if len(set(order)) == len(order)} == {
        "cifar10": 10,
        "cifar100": 100,
        "fashion-mnist": 10,
        "digits": 10,
    }
    assert list(CIFAR100) == sorted(CIFAR100)
    for order in LABEL_ORDERS.values():
        assert not any("_" in words for words in words_for(order, "data"))


# --- embedded


def test_embedded_is_balanced_over_class_and_domain_and_repeatable(load):
    data = load("embedded?train=400&test=80&seed=3")
    assert data.classnames == CLASSNAMES[:10] and data.domain_names == ("photo", "painting", "cartoon", "sketch")
    pairs = torch.bincount(data.train.labels * 4 + data.train.domains, minlength=40)
    assert pairs.tolist() == [10] * 40
    assert data.train.images.read(torch.arange(3)).shape == (3, 3, 32, 32)
    again = load("embedded?train=400&test=80&seed=3")  # from the cache
    assert again.content_hash == data.content_hash
    assert torch.equal(again.train.images.read(torch.arange(400)), data.train.images.read(torch.arange(400)))


def test_embedded_seeds_splits_and_parts_differ(load):
    data, other = load("embedded?train=100&test=100"), load("embedded?train=100&test=100&seed=1")
    everything = torch.arange(100)
    pixels = [s.images.read(everything) for s in (data.train, data.test, other.train, other.test)]
    assert len({hashlib.sha256(p.numpy().tobytes()).hexdigest() for p in pixels}) == 4


def test_embedded_has_twenty_classes_on_request(load):
    assert load("embedded?classes=20&train=80&test=20").classnames == CLASSNAMES


def test_embedded_in_two_processes_equals_one(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(procedural, "PART", 50)
    parallel = procedural._render(tuple(range(10)), 0, 100, 20)
    assert "rendering in this process" not in caplog.text
    monkeypatch.setattr(procedural, "ProcessPoolExecutor", refuse_processes)
    alone = procedural._render(tuple(range(10)), 0, 100, 20)
    assert "rendering in this process" in caplog.text
    assert all(torch.equal(parallel[name], alone[name]) for name in alone) and set(parallel) == set(alone)
    assert not torch.equal(alone["train.images"][:50], alone["train.images"][50:])


def refuse_processes(*_, **__):
    raise OSError("no processes here")


@pytest.mark.parametrize("damage", ["truncated", "one byte changed", "empty"])
def test_damaged_cache_is_named_and_never_replaced(load, tmp_path, damage):
    load("embedded?train=40&test=40")
    (file,) = (tmp_path / "cache" / "datasets").iterdir()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes({"truncated": data[:-1000], "one byte changed": data, "empty": b""}[damage])
    before = file.read_bytes()
    # as a new process: one that has found a file whole reads it again only when its time of change says so
    cache.forget()
    message = error_of(load, "embedded?train=40&test=40")
    assert f"{str(file)!r} is damaged" in message and f"delete it and run again: rm {file}" in message
    assert file.read_bytes() == before


def test_cache_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FedbenchError, match="can't write the data cache .*another --cache-dir"):
        load_dataset("embedded?train=40&test=40", data_dir=tmp_path, cache_dir=tmp_path / "file")


# --- image folders


def test_domain_layout_has_domains_and_no_test_split(load, tmp_path):
    write_folder(tmp_path / "PACS", ["sketch", "photo"], ["horse", "dog"])
    data = load("imagefolder:PACS")
    assert data.classnames == ("dog", "horse") and data.domain_names == ("photo", "sketch") and data.test is None
    assert data.train.labels.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert data.train.domains.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    # Pictures are written in the order they must be read in.
    expected = np.stack([np.asarray(picture(number)).transpose(2, 0, 1) for number in range(8)])
    assert np.array_equal(data.train.images.read(torch.arange(8)).numpy(), expected)
    assert data.train.images.content_hash() == TensorImages(torch.from_numpy(expected)).content_hash()


def test_split_layout_has_train_and_test(load, tmp_path):
    write_folder(tmp_path / "cinic", ["train", "valid", "test"], ["cat", "dog"])
    data = load("imagefolder:cinic")
    assert data.domain_names == () and data.train.domains is None
    # In sorted order test is written before train: pictures 0-3, then 4-7.
    assert torch.equal(data.test.images.read(torch.tensor([1]))[0], torch.from_numpy(channels_first(1)))
    assert torch.equal(data.train.images.read(torch.tensor([1]))[0], torch.from_numpy(channels_first(5)))


def channels_first(number: int) -> np.ndarray:
    return np.array(picture(number)).transpose(2, 0, 1)


def test_layout_can_be_forced(load, tmp_path):
    write_folder(tmp_path / "toys", ["train", "test"], ["cat", "dog"])
    assert load("imagefolder:toys?layout=domain").domain_names == ("test", "train")
    write_folder(tmp_path / "art", ["photo", "sketch"], ["cat", "dog"])
    assert "has no folder 'train', only 'photo', 'sketch'" in error_of(load, "imagefolder:art?layout=split")


VLCS = [f"{domain}/{split}" for domain in ("CALTECH", "SUN") for split in ("crossval", "full", "test", "train")]


def test_splits_within_domains_are_splits_and_no_classes(load, tmp_path):
    write_folder(tmp_path / "VLCS", VLCS, ["0_bird", "1_car"])
    data = load("imagefolder:VLCS")
    assert data.classnames == ("bird", "car") and data.domain_names == ("CALTECH", "SUN")
    for split in (data.train, data.test):
        assert split.labels.tolist() == [0, 0, 1, 1] * 2 and split.domains.tolist() == [0] * 4 + [1] * 4
    # four pictures per folder in the order of VLCS: what is in full or crossval alone is in no split
    for split, first in ((data.train, (12, 28)), (data.test, (8, 24))):
        expected = np.stack([channels_first(number + more) for number in first for more in range(4)])
        assert np.array_equal(split.images.read(torch.arange(8)).numpy(), expected)
    tar_of(tmp_path / "VLCS", tmp_path / "VLCS.tar", prefix="./data/VLCS/")
    assert load("imagefolder:VLCS.tar").content_hash == data.content_hash


def test_one_domain_of_splits_is_read_alike(load, tmp_path):
    write_folder(tmp_path / "CALTECH", ["crossval", "full", "test", "train"], ["bird", "car"])
    data = load("imagefolder:CALTECH")
    assert data.classnames == ("bird", "car") and data.domain_names == ()
    assert torch.equal(data.train.images.read(torch.tensor([0]))[0], torch.from_numpy(channels_first(12)))
    assert torch.equal(data.test.images.read(torch.tensor([0]))[0], torch.from_numpy(channels_first(8)))


def test_a_class_may_be_called_train(load, tmp_path):
    write_folder(tmp_path / "DomainNet", ["clipart", "sketch"], ["train", "bus"])
    assert load("imagefolder:DomainNet").classnames == ("bus", "train")


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (["a/train/dog/1", "a/test/dog/1", "b/dog/1"], "'b/dog/1.png' as domain/class/image; keep one"),
        (
            ["a/train/dog/1", "a/test/dog/1", "b/extra/dog/1"],
            "'a/test/dog/1.png' reads as domain/split/class/image and",
        ),
        (["train/dog/1", "test/dog/1", "extra/dog/1"], "holds the splits test, train and, beside them, extra; type"),
        (["a/train/dog/1", "a/test/1", "b/train/dog/1"], "'a/test/1.png' lies in a split of a domain, but in no class"),
        (["a/train/dog/1", "a/test/1", "b/train/dog/1"], "in no class folder, unlike 'a/train/dog/1.png'"),
        (["a/train/1", "b/test/1"], "'a/train/1.png' lies in a split of a domain, but in no class folder; expected"),
        (["a/train/dog/1", "a/test/dog/1", "b/train/dog/1"], "the domain 'b' has no images in the split 'test'"),
        (["train/images/1", "test/images/2"], "has no folder 'train', only images without labels; rename one, or type"),
        (["a/test/dog/1", "b/test/dog/1"], "has no folder 'train' in its domains, only 'test'; rename one."),
        (["a/images/cat/1", "a/images/dog/1", "b/images/cat/1"], "'a/images/cat/1.png' and 'a/images/dog/1.png'"),
        (["train/a/cat/1", "train/a/dog/1", "test/b/cat/1"], "'train/a/cat/1.png' and 'train/a/dog/1.png'"),
        (
            ["a/dog/1", "a/dog/more/2", "b/dog/1"],
            "which folders are the classes of 'a/dog/1.png' and 'a/dog/more/2.png'",
        ),
        (["a/dog/1", "b/images/dog/2"], "which folders are the classes of 'a/dog/1.png' and 'b/images/dog/2.png'"),
    ],
)
def test_folders_that_read_in_two_ways_are_refused(load, tmp_path, files, says):
    for number, file in enumerate(files):
        (tmp_path / "d" / file).parent.mkdir(parents=True, exist_ok=True)
        picture(number).save(tmp_path / "d" / f"{file}.png")
    message = error_of(load, "imagefolder:d")
    assert says in message and str(tmp_path / "d") in message


def test_tiny_imagenet_labels_its_validation_images_in_a_file(load, tmp_path):
    root = write_folder(tmp_path / "tiny", ["train"], ["n01", "n02"])
    (root / "val" / "images").mkdir(parents=True)
    (root / "test" / "images").mkdir(parents=True)
    picture(20).save(root / "val" / "images" / "val_0.png")
    picture(21).save(root / "test" / "images" / "test_0.png")
    (root / "val" / "val_annotations.txt").write_text("val_0.png\tn02\t0\t0\t1\t1\n")
    (root / "words.txt").write_bytes(b"n01\tgoldfish, Carassius auratus\nn02\ttabby cat\nn03\tcaf\xe9\n")
    data = load("imagefolder:tiny")
    assert data.classnames == ("goldfish", "tabby cat") and data.test.labels.tolist() == [1]


def tar_of(folder: Path, file: Path, prefix: str = "", reverse: bool = False) -> Path:
    with tarfile.open(file, "w") as archive:
        for path in sorted(folder.rglob("*"), reverse=reverse):
            if path.is_file():
                archive.add(path, prefix + path.relative_to(folder).as_posix())
    return file


def test_a_tar_equals_its_folder_whatever_the_order_within(load, tmp_path):
    folder = write_folder(tmp_path / "PACS", ["photo", "sketch"], ["dog", "horse"])
    tar_of(folder, tmp_path / "plain.tar")
    tar_of(folder, tmp_path / "wrapped.tar", prefix="./data/PACS/", reverse=True)
    hashes = {load(f"imagefolder:{name}").content_hash for name in ("PACS", "plain.tar", "wrapped.tar")}
    assert len(hashes) == 1


def test_a_tar_is_never_unpacked_and_hostile_members_are_passed_over(load, tmp_path):
    folder = write_folder(tmp_path / "x" / "PACS", ["photo", "sketch"], ["dog", "horse"])
    with tarfile.open(tar_of(folder, tmp_path / "evil.tar"), "a") as archive:
        for name in ("../outside/dog/a.png", "/absolute/dog/a.png", "photo/dog/._a.png", "__MACOSX/photo/dog/b.png"):
            member = tarfile.TarInfo(name)
            member.size = len(png(0))
            archive.addfile(member, io.BytesIO(png(0)))
        link = tarfile.TarInfo("photo/dog/link.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    before = {path for path in tmp_path.rglob("*") if "cache" not in path.parts}
    assert len(load("imagefolder:evil.tar").train) == 8
    assert {path for path in tmp_path.rglob("*") if "cache" not in path.relative_to(tmp_path).parts} == before


def test_truncated_and_compressed_archives_are_refused(load, tmp_path):
    folder = write_folder(tmp_path / "PACS", ["photo", "sketch"], ["dog", "horse"])
    whole = tar_of(folder, tmp_path / "whole.tar").read_bytes()
    (tmp_path / "short.tar").write_bytes(whole[:2000])
    message = error_of(load, "imagefolder:short.tar")
    assert "short.tar' can't be read as an uncompressed .tar archive" in message and "copy it again" in message
    with tarfile.open(tmp_path / "small.tar.gz", "w:gz") as archive:
        archive.add(folder, "PACS")
    assert "unpack it if it is compressed" in error_of(load, "imagefolder:small.tar.gz")


def test_images_of_differing_sizes_become_224_and_size_forces_another(load, tmp_path):
    write_folder(tmp_path / "d", ["photo"], ["cat", "dog"])
    write_folder(tmp_path / "d", ["sketch"], ["cat", "dog"], size=(30, 50))
    assert load("imagefolder:d").train.images.read(torch.tensor([0])).shape == (1, 3, 224, 224)
    assert load("imagefolder:d?size=16").train.images.read(torch.tensor([7])).shape == (1, 3, 16, 16)
    assert "option size='7': input should be greater than or equal to 8" in error_of(load, "imagefolder:d?size=7")


def test_images_of_differing_sizes_follow_the_backbone_and_others_stay(load, tmp_path):
    write_folder(tmp_path / "d", ["photo"], ["cat", "dog"])
    write_folder(tmp_path / "d", ["sketch"], ["cat", "dog"], size=(30, 50))
    write_folder(tmp_path / "same", ["photo", "sketch"], ["cat", "dog"])

    def loaded(name: str, **spec: str) -> Dataset:
        asked = image_size_for(RunSpec(dataset=f"imagefolder:{name}", **spec))
        return load_dataset(f"imagefolder:{name}", data_dir=tmp_path, cache_dir=tmp_path / "cache", image_size=asked)

    for backbone, side in (
        ("clip:embedded", 32), ("clip:ViT-B-32@openai", 224), ("clip:ViT-L-14-336@openai", 336), ("resnet8", 32),
        ("resnet18", 224), ("resnet18?stem=cifar", 32), ("alexnet?resize=64", 64),
    ):  # fmt: skip
        assert loaded("d", backbone=backbone).train.images.read(torch.tensor([0, 7])).shape == (2, 3, side, side)
        assert loaded("same", backbone=backbone).content_hash == load("imagefolder:same").content_hash
        assert loaded("d?size=16", backbone=backbone).train.images.read(torch.tensor([0])).shape == (1, 3, 16, 16)
    # a teacher reads the same images
    taught = loaded("d", backbone="resnet8", teacher="clip:ViT-B-32@openai")
    assert taught.content_hash == load("imagefolder:d").content_hash
    assert image_size_for(RunSpec(dataset="cifar10")) is None
    assert load("imagefolder:d").shortest_side == load("imagefolder:same").shortest_side == 10


def test_splits_of_differing_sizes_are_brought_to_one(load, tmp_path):
    write_folder(tmp_path / "d", ["train"], ["cat", "dog"])
    write_folder(tmp_path / "d", ["test"], ["cat", "dog"], size=(20, 20))
    data = load("imagefolder:d")
    assert data.train.images.read(torch.tensor([0])).shape == data.test.images.read(torch.tensor([0])).shape


def test_resizing_keeps_the_centre():
    pixels = np.zeros((10, 30, 3), np.uint8)
    pixels[:, 10:20] = 200  # the middle third of a wide image
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    assert (content.decode(file.getvalue(), "x", (10, 10)) == 200).all()


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1"])
def test_every_colour_mode_becomes_three_channels(mode):
    file = io.BytesIO()
    picture(0, mode=mode).save(file, "PNG")
    assert content.decode(file.getvalue(), "x", (10, 12)).shape == (3, 10, 12)


@pytest.mark.parametrize(("values", "ending"), [(np.uint16, "png"), (np.int32, "tiff"), (np.float32, "tiff")])
def test_more_than_8_bits_a_pixel_are_refused_not_cut_off(load, tmp_path, values, ending):
    (tmp_path / "d" / "x" / "grey").mkdir(parents=True)
    Image.fromarray(np.linspace(0, 60_000, 120).reshape(10, 12).astype(values)).save(f"{tmp_path}/d/x/grey/0.{ending}")
    assert f"0.{ending}' can't be decoded (grey values of 16 or 32 bits" in error_of(load, "imagefolder:d")


@pytest.mark.parametrize(
    ("pixels", "labels", "says"),
    [
        (torch.rand(2, 3, 8, 8), torch.tensor([0, 1]), "images of the shape (3, 8, 8) and the type torch.float32"),
        (torch.zeros(2, 8, 8, 3, dtype=torch.uint8), torch.tensor([0, 1]), "images of the shape (8, 8, 3)"),
        (torch.zeros(2, 3, 8, dtype=torch.uint8), torch.tensor([0, 1]), "images of the shape (3, 8)"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.tensor([0.0, 1.0]), "labels of the type torch.float32"),
    ],
)
def test_an_own_data_set_of_another_type_is_refused(pixels, labels, says):
    with pytest.raises(FedbenchError, match=re.escape(says)):
        content.dataset("mine", ("cat", "dog"), Split(TensorImages(pixels), labels), None)


def test_formats_that_start_other_programs_are_not_opened():
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n"
    with pytest.raises(FedbenchError, match="no known image format"):
        content.decode(postscript, "x.png", (10, 10))


def test_large_sets_are_decoded_on_demand(load, tmp_path, monkeypatch):
    write_folder(tmp_path / "d", ["photo", "sketch"], ["cat", "dog"])
    small = load("imagefolder:d").train.images.read(torch.tensor([5, 0, 5]))
    monkeypatch.setattr(content, "MEMORY_LIMIT", 100)
    data = load("imagefolder:d")
    assert isinstance(data.train.images, ImageFiles)
    assert torch.equal(data.train.images.read(torch.tensor([5, 0, 5])), small)
    tar_of(tmp_path / "d", tmp_path / "d.tar")
    assert load("imagefolder:d.tar").content_hash == data.content_hash
    assert load("imagefolder:d?size=8").content_hash != data.content_hash


def test_decoded_once_and_again_when_a_file_changes(load, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    root = write_folder(tmp_path / "d", ["photo", "sketch"], ["cat", "dog"])
    first = load("imagefolder:d").content_hash
    assert "decoding 8 images" in caplog.text
    caplog.clear()
    assert load("imagefolder:d").content_hash == first and "images" not in caplog.text
    picture(99).save(root / "photo" / "cat" / "a.png")
    os.utime(root / "photo" / "cat" / "a.png", (1, 1))
    assert load("imagefolder:d").content_hash != first


@pytest.mark.parametrize("where", ["header", "pixels"])
def test_truncated_image_is_named(load, tmp_path, where):
    root = write_folder(tmp_path / "d", ["photo", "sketch"], ["cat", "dog"])
    file = root / "sketch" / "dog" / "b.png"
    file.write_bytes(file.read_bytes()[: 10 if where == "header" else 150])
    assert f"image {str(file)!r} can't be decoded" in error_of(load, "imagefolder:d")


def test_missing_empty_and_flat_folders(load, tmp_path):
    message = error_of(load, "imagefolder:nowhere")
    assert f"'nowhere' does not exist, here or below {str(tmp_path)!r}" in message
    (tmp_path / "empty").mkdir()
    assert "holds no images; expected domain/class/image" in error_of(load, "imagefolder:empty")
    (tmp_path / "flat" / "cat").mkdir(parents=True)
    picture(0).save(tmp_path / "flat" / "cat" / "a.png")
    assert "the image 'cat/a.png' lies outside of domain/class/image" in error_of(load, "imagefolder:flat")


def test_a_class_missing_in_a_domain_is_said(load, tmp_path, caplog):
    root = write_folder(tmp_path / "d", ["photo", "sketch"], ["cat", "dog"])
    for file in (root / "sketch" / "dog").iterdir():
        file.unlink()
    assert load("imagefolder:d").classnames == ("cat", "dog")
    assert "has no images in sketch/dog" in caplog.text


def test_own_class_names_beside_the_data_or_by_option(load, tmp_path):
    root = write_folder(tmp_path / "d", ["photo", "sketch"], ["Sea_Lion", "dog"])
    assert "no words are known for the class names 'Sea_Lion'" in error_of(load, "imagefolder:d")
    (tmp_path / "names.json").write_text(json.dumps({"Sea_Lion": "sea lion"}))
    assert load("imagefolder:d?classnames=names.json").classnames == ("sea lion", "dog")
    (root / "classnames.json").write_text(json.dumps({"Sea_Lion": "sea lion"}))
    assert load("imagefolder:d").classnames == ("sea lion", "dog")
    tar_of(root, tmp_path / "d.tar", prefix="outer/")
    assert load("imagefolder:d.tar").classnames == ("sea lion", "dog")
    (root / "classnames.json").write_text("{")
    assert "classnames.json' can't be read" in error_of(load, "imagefolder:d")
    (root / "classnames.json").write_text('{"Sea_Lion": 3}')
    assert "are not all words" in error_of(load, "imagefolder:d")


def test_content_hash_depends_on_names_labels_and_domains(load, tmp_path):
    write_folder(tmp_path / "a", ["photo", "sketch"], ["cat", "dog"])
    write_folder(tmp_path / "b", ["photo", "sketch"], ["cat", "horse"])
    write_folder(tmp_path / "c", ["photo", "cartoon"], ["cat", "dog"])
    assert len({load(f"imagefolder:{name}").content_hash for name in "abc"}) == 3


def test_files_of_differing_sizes_have_a_hash_of_their_own_at_whatever_size_they_are_decoded(load, tmp_path):
    write_folder(tmp_path / "d", ["train"], ["cat", "dog"])
    write_folder(tmp_path / "d", ["test"], ["cat", "dog"], size=(30, 50))

    def at(size: int) -> Dataset:
        return load_dataset("imagefolder:d", data_dir=tmp_path, cache_dir=tmp_path / "cache", image_size=size)

    small, large = at(16), at(24)
    assert small.content_hash != large.content_hash
    assert small.files_hash == large.files_hash != ""
    # runs tell it, each beside what it has decoded
    spec = RunSpec(backbone="convnet", scenario=Scenario(clients=2))
    infos = [prepare(spec, Settings(tmp_path, tmp_path / "cache"), dataset=data).info for data in (small, large)]
    assert [info.data_hash for info in infos] == [small.content_hash, large.content_hash]
    assert {info.files_hash for info in infos} == {small.files_hash}
    # where the size is fixed, the hash of the content says it all
    write_folder(tmp_path / "same", ["train", "test"], ["cat", "dog"])
    assert [load(f"imagefolder:{name}").files_hash for name in ("same", "d?size=16")] == ["", ""]
    # the tested images in another order
    a, b = sorted((tmp_path / "d" / "test" / "cat").iterdir())[:2]
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)
    assert at(16).files_hash != small.files_hash


# --- list files


def write_lists(root: Path) -> Path:
    root.mkdir(exist_ok=True)
    (root / "train").mkdir()
    (root / "test").mkdir()
    for number in range(3):
        picture(number).save(root / "train" / f"{number} x.png")
    picture(3).save(root / "test" / "3.png")
    (root / "LT_train.txt").write_text("train/2 x.png 1\ntrain/0 x.png 0\n\ntrain/1 x.png 1\n")
    (root / "LT_test.txt").write_text("test/3.png 0\n")
    (root / "classnames.txt").write_text("sea lion\nwalrus\n")
    return root


def test_list_files_are_read_in_their_order(load, tmp_path):
    write_lists(tmp_path / "lt")
    data = load("listfile:lt")
    assert data.classnames == ("sea lion", "walrus") and dict(data.list_groups) == {}
    assert data.train.labels.tolist() == [1, 0, 1] and data.test.labels.tolist() == [0]
    assert torch.equal(data.train.images.read(torch.tensor([0]))[0], torch.from_numpy(channels_first(2)))


def test_list_files_by_name_with_another_root_and_groups(load, tmp_path):
    write_lists(tmp_path / "lt")
    lists = tmp_path / "lists"
    lists.mkdir()
    for name in ("LT_train.txt", "LT_test.txt", "classnames.txt"):
        (tmp_path / "lt" / name).rename(lists / name)
    (lists / "groups.json").write_text('{"many": [1], "few": [0]}')
    data = load("listfile:lists/LT_train.txt?test=lists/LT_test.txt&root=lt&size=16")
    assert data.list_groups == {"many": (1,), "few": (0,)} and len(data.test) == 1
    assert data.train.images.read(torch.tensor([0])).shape == (1, 3, 16, 16)
    (lists / "groups.json").write_text('{"many": [5]}')
    assert "labels go from 0 to 1" in error_of(load, "listfile:lists?root=lt")
    (lists / "groups.json").write_text('{"many": [1], "few": [0, 1]}')
    assert "a label is listed twice" in error_of(load, "listfile:lists?root=lt")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("train/0 x.png zero", "line 5: 'train/0 x.png zero' is not 'relative/path.jpg label'"),
        ("../secret.png 0", "line 5: '../secret.png' leads out of the image folder"),
        ("/etc/secret.png 0", "line 5: '/etc/secret.png' leads out of the image folder"),
        ("train/9.png 0", "line 5: there is no file"),
        ("train/0 x.png 99999999", "is not 'relative/path.jpg label'"),
    ],
)
def test_bad_lines_of_list_files(load, tmp_path, line, says):
    root = write_lists(tmp_path / "lt")
    with open(root / "LT_train.txt", "a") as file:
        file.write(line + "\n")
    assert says in error_of(load, "listfile:lt")


def test_list_files_missing_several_or_without_class_names(load, tmp_path):
    root = write_lists(tmp_path / "lt")
    (root / "classnames.txt").unlink()
    assert "label 0 has no name; put classnames.txt with 2 names" in error_of(load, "listfile:lt")
    (root / "classnames.txt").write_text("sea lion\n")
    assert "has 1 class names for 2 classes" in error_of(load, "listfile:lt")
    (root / "train.txt").write_text("")
    assert "holds several train lists: LT_train.txt, train.txt" in error_of(load, "listfile:lt")
    assert "train.txt' is empty" in error_of(load, "listfile:lt/train.txt")
    (tmp_path / "none").mkdir()
    assert "holds no train.txt and no *_train.txt" in error_of(load, "listfile:none")


# --- Hugging Face


def test_parquet_columns_are_found_by_type(load, tmp_path):
    write_parquet(tmp_path / "pets", {"train": 5, "test": 2})
    data = load("hf:pets")
    assert data.classnames == ("cat", "dog") and data.domain_names == ()
    assert data.train.labels.tolist() == [0, 1, 0, 1, 0] and data.test.labels.tolist() == [0, 1]
    assert torch.equal(data.train.images.read(torch.tensor([3]))[0], torch.from_numpy(channels_first(3)))
    assert load("hf:pets").content_hash == data.content_hash
    assert (tmp_path / "cache" / "huggingface").is_dir()


def test_parquet_in_a_folder_of_a_configuration(load, tmp_path):
    (tmp_path / "pets").mkdir()
    write_parquet(tmp_path / "pets" / "plain_text", {"train": 3})
    data = load("hf:pets?size=8")
    assert data.test is None and data.train.images.read(torch.tensor([0])).shape == (1, 3, 8, 8)


def test_parquet_domains_by_class_label_and_by_string(load, tmp_path):
    import datasets

    features = {"style": datasets.ClassLabel(names=["photo", "sketch"]), "site": datasets.Value("string")}
    write_parquet(tmp_path / "pets", {"train": 4}, features, style=[1, 1, 0, 0], site=["b", "a", "b", "b"])
    message = error_of(load, "hf:pets")
    assert "has several label columns (label, style); choose with ?label=COLUMN" in message
    data = load("hf:pets?label=label&domain=style")
    assert data.domain_names == ("photo", "sketch") and data.train.domains.tolist() == [1, 1, 0, 0]
    data = load("hf:pets?domain=site&label=style")
    assert data.domain_names == ("a", "b") and data.train.domains.tolist() == [1, 0, 1, 1]
    assert data.classnames == ("photo", "sketch")
    assert "did you mean 'style'" in error_of(load, "hf:pets?domain=styl")
    assert "column 'label' holds no images" in error_of(load, "hf:pets?image=label&label=style")
    assert "holds no class labels, no strings and no whole numbers" in error_of(load, "hf:pets?label=img")


def test_string_labels_are_classes_when_chosen(load, tmp_path):
    import datasets

    write_parquet(tmp_path / "p", {"train": 3}, {"kind": datasets.Value("string")}, kind=["wine_glass", "dog", "dog"])
    data = load("hf:p?label=kind")
    assert data.classnames == ("dog", "wine glass") and data.train.labels.tolist() == [1, 0, 0]


def write_untyped(folder: Path, labels: list[int]) -> None:
    """Parquet of another tool: a struct of bytes and path, plain integers, no feature types."""
    import pyarrow
    import pyarrow.parquet

    folder.mkdir()
    cells = [{"bytes": png(number), "path": None} for number in range(len(labels))]
    pyarrow.parquet.write_table(pyarrow.table({"img": cells, "label": labels}), folder / "train.parquet")


def test_integer_labels_need_names(load, tmp_path):
    write_untyped(tmp_path / "untyped", [1, 0, 1])
    assert "label 0 has no name; put classnames.txt with 2 names" in error_of(load, "hf:untyped")
    assert load("hf:untyped?classnames=sea lion,walrus").classnames == ("sea lion", "walrus")
    (tmp_path / "untyped" / "classnames.json").write_text('["seal", "walrus"]')
    data = load("hf:untyped")
    assert data.classnames == ("seal", "walrus") and data.train.labels.tolist() == [1, 0, 1]
    assert load("hf:untyped?names=cifar10").classnames[9] == "truck"
    assert "did you mean" in error_of(load, "hf:untyped?nmes=cifar10")


def test_integer_labels_of_a_data_set_called_cifar10_get_its_published_names_if_their_number_fits(load, tmp_path):
    write_untyped(tmp_path / "cifar10", list(range(10)))
    assert load("hf:cifar10").classnames == LABEL_ORDERS["cifar10"]
    write_untyped(tmp_path / "fashion_mnist", [0, 1, 2])
    assert "label 0 has no name; put classnames.txt with 3 names" in error_of(load, "hf:fashion_mnist")


def test_labels_below_zero_are_refused(load, tmp_path):
    write_untyped(tmp_path / "untyped", [0, -1])
    assert "column 'label' has labels below 0" in error_of(load, "hf:untyped?names=cifar10")


def test_splits_are_chosen_by_name(load, tmp_path):
    write_parquet(tmp_path / "pets", {"train": 4, "validation": 3, "test": 2})
    assert len(load("hf:pets").test) == 2 and len(load("hf:pets?test=validation").test) == 3
    assert "has no split 'dev'; type ?test=NAME with one of" in error_of(load, "hf:pets?test=dev")


def test_a_single_split_is_the_training_split(load, tmp_path):
    write_parquet(tmp_path / "pets", {"test": 2})
    data = load("hf:pets")
    assert len(data.train) == 2 and data.test is None


def test_truncated_and_missing_parquet(load, tmp_path):
    file = write_parquet(tmp_path / "pets", {"train": 4, "test": 2}) / "test-00000-of-00001.parquet"
    file.write_bytes(file.read_bytes()[:-40])
    assert f"{str(file)!r} is not a whole parquet file" in error_of(load, "hf:pets")
    (tmp_path / "empty").mkdir()
    assert "holds no parquet files" in error_of(load, "hf:empty")
    assert "data set folder './nowhere' does not exist" in error_of(load, "hf:./nowhere")


def test_damaged_image_in_a_table_is_named_by_row(load, tmp_path):
    import datasets

    (tmp_path / "pets").mkdir()
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=["cat"])})
    cells = {"img": [{"bytes": png(0), "path": None}, {"bytes": png(1)[:200], "path": None}], "label": [0, 0]}
    datasets.Dataset.from_dict(cells, features=features).to_parquet(str(tmp_path / "pets" / "train.parquet"))
    assert "image 'pets: train, row 1' can't be decoded" in error_of(load, "hf:pets")


def test_the_hub_out_of_reach_is_said_at_once(load, monkeypatch):
    from huggingface_hub import HfApi

    def no_network(*_, **__):
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(HfApi, "dataset_info", no_network)
    message = error_of(load, "hf:somebody/pets")
    assert "the Hugging Face Hub can't be reached (Name or service not known)" in message
    assert "no earlier download of 'somebody/pets'" in message and "check the network or the path" in message


# --- torchvision's layouts


def test_cifar10_in_torchvisions_layout(load, tmp_path, monkeypatch):
    write_cifar(tmp_path, monkeypatch.setattr)
    data = load("cifar10")
    assert data.classnames == LABEL_ORDERS["cifar10"] and len(data.train) == 10
    assert data.train.labels.tolist() == [0, 9, 1, 8, 2, 7, 3, 6, 4, 5] and data.test.labels.tolist() == [5, 4]
    pixels = data.test.images.read(torch.tensor([0]))
    assert pixels.dtype == torch.uint8 and pixels.shape == (1, 3, 32, 32)
    assert (pixels[0, 0] == 200).all() and (pixels[0, 1:] == 5).all()


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("unpickled",)


def test_a_cifar_file_with_another_checksum_is_never_unpickled(load, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = write_cifar(tmp_path, monkeypatch.setattr)
    for name in ("data_batch_3", "batches.meta"):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(pickle.dumps(Bomb()))
        message = error_of(load, "cifar10")
        assert f"{str(folder / name)!r} is not the published file" in message and "wasn't opened" in message
        (folder / name).write_bytes(whole)
    assert not (tmp_path / "unpickled").exists()


def test_missing_torchvision_data_names_folder_and_remedy(load, tmp_path, monkeypatch):
    for name, folder in (("cifar10", "cifar-10-batches-py"), ("cifar100", "cifar-100-python")):
        message = error_of(load, name)
        assert str(tmp_path) in message and folder in message and f"type {name}?download=true" in message
    (write_cifar(tmp_path, monkeypatch.setattr) / "data_batch_2").unlink()
    assert "data_batch_2' is missing; type cifar10?download=true" in error_of(load, "cifar10")


def test_fashion_mnist_is_repeated_to_three_channels(load, tmp_path):
    write_fashion(tmp_path)
    data = load("fashion-mnist")
    pixels = data.train.images.read(torch.arange(3))
    assert pixels.shape == (3, 3, 28, 28) and torch.equal(pixels[:, 0], pixels[:, 2])
    assert pixels[0, 1, 0, :4].tolist() == [0, 1, 2, 3] and data.train.labels.tolist() == [0, 1, 2]
    assert data.classnames[0] == "t-shirt" and data.classnames[9] == "ankle boot"


def test_short_and_missing_fashion_mnist_files(load, tmp_path):
    raw = write_fashion(tmp_path)
    file = raw / "train-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:500])
    assert "fashion-mnist can't be read from" in error_of(load, "fashion-mnist")
    file.unlink()
    assert "train-images-idx3-ubyte' is missing" in error_of(load, "fashion-mnist")


def test_fashion_mnist_is_found_where_debian_puts_it(load, tmp_path, monkeypatch):
    packed = tmp_path / "debian"
    monkeypatch.setattr(arrays, "DEBIAN", packed)
    assert "install Debian's package dataset-fashion-mnist" in error_of(load, "fashion-mnist")
    packed.mkdir()
    assert "train-images-idx3-ubyte.gz' can't be unpacked" in error_of(load, "fashion-mnist")
    for file in write_fashion(tmp_path / "elsewhere").iterdir():
        (packed / f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
    assert load("fashion-mnist").train.labels.tolist() == [0, 1, 2]


def test_debians_own_fashion_mnist(load, monkeypatch):
    shared = Path(__file__).parents[3] / "shared" / "data" / "fashion-mnist"
    found = next((folder for folder in (arrays.DEBIAN, shared) if folder.is_dir()), None)
    if found is None:
        pytest.skip("Debian's package dataset-fashion-mnist is not installed")
    monkeypatch.setattr(arrays, "DEBIAN", found)
    data = load("fashion-mnist")
    assert torch.bincount(data.train.labels).tolist() == [6000] * 10
    assert torch.bincount(data.test.labels).tolist() == [1000] * 10


# --- real data


@pytest.fixture
def scratch(tmp_path):
    """A folder that is emptied at once: the caches of real data are large, and pytest keeps three runs' folders."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.slow
def test_real_cifar10_parquet(shared_data, scratch):
    if not (shared_data / "cifar10").is_dir():
        pytest.skip(f"no CIFAR-10 parquet in {shared_data}")
    name = f"hf:{shared_data / 'cifar10'}"
    data = load_dataset(name, data_dir=scratch, cache_dir=scratch)
    assert data.classnames == LABEL_ORDERS["cifar10"] and data.test is not None
    for split in (data.train, data.test):
        assert split.images.read(torch.tensor([0, len(split) - 1])).shape == (2, 3, 32, 32)
        assert split.labels.unique().tolist() == list(range(10)) and len(split.images) == len(split.labels)


@pytest.mark.slow
def test_real_pacs_archive(shared_data, scratch):
    if not (shared_data / "pacs128.tar").is_file():
        pytest.skip(f"no PACS archive in {shared_data}")
    data = load_dataset(f"imagefolder:{shared_data / 'pacs128.tar'}", data_dir=scratch, cache_dir=scratch)
    assert data.classnames == ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
    assert data.domain_names == ("art_painting", "cartoon", "photo", "sketch") and data.test is None
    assert len(data.train) == len(data.train.labels) == 9991
    assert data.train.images.read(torch.tensor([9990])).shape == (1, 3, 128, 128)
