"""Federations that exist, from files to a finished run: LEAF's FEMNIST, iNaturalist-User, a hospital's CSV, parquet."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from fedbench.cli.app import app
from fedbench.core.errors import FedbenchError
from fedbench.core.federation import Dataset
from fedbench.core.scenario import Scenario
from fedbench.datasets import load_dataset
from fedbench.scenarios import build_federation

RNG = np.random.default_rng(0)


def picture(file: Path, level: int, side: int = 12) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    noise = RNG.integers(0, 40, (side, side, 3))
    Image.fromarray((noise + level).astype(np.uint8)).save(file)


def femnist(folder: Path) -> str:
    """Three writers with 6, 4 and 2 training samples, two of whom have test samples."""
    sizes = {"train": {"f0001_41": 6, "f0002_07": 4, "f0003_99": 2}, "test": {"f0001_41": 3, "f0002_07": 2}}
    for split, users in sizes.items():
        data = {
            user: {"x": RNG.random((count, 784)).round(3).tolist(), "y": [(10 * n) % 62 for n in range(count)]}
            for user, count in users.items()
        }
        content = {"users": list(users), "num_samples": list(users.values()), "user_data": data}
        (folder / split).mkdir(parents=True)
        (folder / split / "all_data_0.json").write_text(json.dumps(content))
    return f"leaf:{folder}"


def inaturalist_user(folder: Path) -> str:
    """Users with 5, 3 and 1 photos, and a test list without users, as Hsu et al. published them."""
    rows = [("57", n) for n in range(5)] + [("102", n) for n in range(5, 8)] + [("9", 8)]
    lines = [f"{user},img{number},{number % 3}" for user, number in rows]
    tests = [f"test{number},{number % 3}" for number in range(6)]
    for name in (line.split(",")[-2] for line in (*lines, *tests)):
        picture(folder / "images" / f"{name}.jpg", 60)
    (folder / "federated_train_user_120k.csv").write_text("\n".join(["user_id,image_id,class", *lines, ""]))
    (folder / "test.csv").write_text("\n".join(["image_id,class", *tests, ""]))
    (folder / "classnames.txt").write_text("wren\nrobin\nfinch\n")
    return (
        f"csv:{folder}/federated_train_user_120k.csv?test={folder}/test.csv&path=image_id&label=class&client=user_id"
        f"&suffix=.jpg&root={folder}/images"
    )


def hospitals(folder: Path) -> str:
    """Two centres with train, test and validation samples each, labels in words."""
    lines = ["image,diagnosis,centre,age,split"]
    for number in range(24):
        centre, label = ("Bern", "Basel")[number % 2], ("healthy", "melanoma")[number // 2 % 2]
        split = ("train", "train", "train", "test", "train", "val")[number // 4]
        picture(folder / "scans" / f"{number}.png", 30 if label == "healthy" else 150)
        lines.append(f"scans/{number}.png,{label},{centre},{40 + number},{split}")
    (folder / "centres.csv").write_text("\n".join(lines) + "\n")
    return f"csv:{folder}/centres.csv?path=image&label=diagnosis&client=centre"


LAYOUTS: dict[str, tuple[Callable[[Path], str], dict[str, tuple[int, int | None]]]] = {
    # writers or centres -> training and test samples; None where all share one test split
    "femnist": (femnist, {"f0001_41": (6, 3), "f0002_07": (4, 2), "f0003_99": (2, 0)}),
    "inaturalist-user": (inaturalist_user, {"102": (3, None), "57": (5, None), "9": (1, None)}),
    "hospitals": (hospitals, {"Basel": (10, 2), "Bern": (10, 2)}),
}


def loaded(name: str, folder: Path) -> Dataset:
    return load_dataset(name, data_dir=folder, cache_dir=folder / "cache")


def said(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_clients_are_the_datas_own(layout: str, tmp_path: Path) -> None:
    make, expected = LAYOUTS[layout]
    data = loaded(make(tmp_path), tmp_path)
    federation = build_federation(data, Scenario(partition="natural"), 0)
    assert {
        name: (len(shard.indices), None if shard.test_indices is None else len(shard.test_indices))
        for name, shard in zip(federation.client_names, federation.clients, strict=True)
    } == expected
    again = loaded(data.name, tmp_path)
    assert again.content_hash == data.content_hash


@pytest.mark.parametrize("layout", LAYOUTS)
def test_end_to_end_from_the_files_to_a_table_that_gives_the_same_federation(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = LAYOUTS[layout][0](tmp_path)
    monkeypatch.setenv("FEDBENCH_DATA", str(tmp_path))
    monkeypatch.setenv("FEDBENCH_CACHE", str(tmp_path / "cache"))
    drawn = tmp_path / "drawn.csv"
    shown = said("scenario", "show", "natural", "--dataset", name, "--output", str(drawn))
    assert "natural" in shown and f"partition=table:{drawn}" in shown
    data = loaded(name, tmp_path)
    natural = build_federation(data, Scenario(partition="natural"), 0)
    read = build_federation(data, Scenario(partition=f"table:{drawn}"), 0)
    assert read.client_names == natural.client_names
    for one, other in zip(natural.clients, read.clients, strict=True):
        assert torch.equal(one.indices, other.indices)
        assert (
            one.test_indices is None or not len(one.test_indices) or torch.equal(one.test_indices, other.test_indices)
        )
    budget = ("--set", "rounds=1", "backbone=fedavg-cnn", "batch_size=4", "lr=0.01")
    run = ("run", "--method", "fedavg", "--scenario", "natural", "--dataset", name, *budget)
    done = said(*run, "--store", str(tmp_path / "store"), "--engine", "in-process")
    assert "fedavg" in done and f"{len(natural.clients)} clients" in done


def test_small_clients_are_left_out_by_rule(tmp_path: Path) -> None:
    data = loaded(femnist(tmp_path), tmp_path)
    federation = build_federation(data, Scenario(partition="natural?min_samples=3"), 0)
    assert federation.client_names == ("f0001_41", "f0002_07")


def test_a_letter_is_read_as_it_was_written(tmp_path: Path) -> None:
    data = loaded(femnist(tmp_path), tmp_path)
    stored = json.loads((tmp_path / "train" / "all_data_0.json").read_text())["user_data"]["f0001_41"]["x"][1]
    image = data.train.images.read(torch.tensor([1]))[0]
    assert image.shape == (3, 28, 28) and torch.equal(image[0], image[2])
    assert abs(int(image[0, 0, 5]) - 255 * stored[5]) <= 0.5
    assert data.classnames[10] == "capital letter A" and len(data.classnames) == 62


def test_domains_labels_and_validation_of_a_csv(tmp_path: Path) -> None:
    name = hospitals(tmp_path)
    data = loaded(f"{name}&domain=centre", tmp_path)
    assert data.classnames == ("healthy", "melanoma") and data.domain_names == ("Basel", "Bern")
    assert data.test is not None and len(data.train) == 20 and len(data.test) == 4
    # where there is no test split, what is for validation is tested
    text = (tmp_path / "centres.csv").read_text().replace(",test\n", ",train\n")
    (tmp_path / "centres.csv").write_text(text)
    assert [len(split) for split in (loaded(name, tmp_path).train, loaded(name, tmp_path).test)] == [20, 4]  # type: ignore[arg-type]


def test_a_client_column_of_parquet(tmp_path: Path) -> None:
    import datasets

    folder = tmp_path / "phones"
    folder.mkdir()
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=["cat", "dog"]),
            "phone": datasets.Value("int64"),
        }
    )
    for split, phones in (("train", [12, 3, 3, 12]), ("test", [3, 12])):
        rows = {
            "image": [Image.fromarray(np.full((8, 8, 3), 9 * n, np.uint8)) for n in range(len(phones))],
            "label": [n % 2 for n in range(len(phones))],
            "phone": phones,
        }
        datasets.Dataset.from_dict(rows, features).to_parquet(str(folder / f"{split}-0.parquet"))
    federation = build_federation(loaded(f"hf:{folder}?client=phone", tmp_path), Scenario(partition="natural"), 0)
    assert federation.client_names == ("3", "12")
    assert [shard.indices.tolist() for shard in federation.clients] == [[1, 2], [0, 3]]
    assert [shard.test_indices.tolist() for shard in federation.clients] == [[0], [1]]  # type: ignore[union-attr]
    without = loaded(f"hf:{folder}?label=label", tmp_path)
    assert without.client_names == () and without.content_hash != federation.train.images.content_hash()
    with pytest.raises(FedbenchError, match="unknown column of .* 'phones'; did you mean 'phone'"):
        loaded(f"hf:{folder}?client=phones", tmp_path)


def test_an_image_folder_with_a_clients_table(tmp_path: Path) -> None:
    lines = ["path,client"]
    for split, classes in (("train", ("cat", "dog")), ("test", ("cat", "dog"))):
        for label in classes:
            for number in range(2):
                picture(tmp_path / "pets" / split / label / f"{number}.png", 90)
                lines.append(f"{split}/{label}/{number}.png,{('zoo', 'farm')[number]}")
    (tmp_path / "who.csv").write_text("\n".join(lines))
    name = "imagefolder:pets?clients=who.csv"
    federation = build_federation(loaded(name, tmp_path), Scenario(partition="natural"), 0)
    assert federation.client_names == ("farm", "zoo")
    assert [shard.indices.tolist() for shard in federation.clients] == [[1, 3], [0, 2]]
    assert [shard.test_indices.tolist() for shard in federation.clients] == [[1, 3], [0, 2]]  # type: ignore[union-attr]
    # of the test images none may have a client, but not some
    (tmp_path / "who.csv").write_text("\n".join(line for line in lines if not line.startswith("test")))
    assert build_federation(loaded(name, tmp_path), Scenario(partition="natural"), 0).clients[0].test_indices is None
    for kept, message in (
        (lines[:-1], "names no client of the image"),
        (["path,who", "a,b"], "needs path and client"),
        ([*lines, "train/cat/0.png,farm"], "names the image 'train/cat/0.png' twice"),
    ):
        (tmp_path / "who.csv").write_text("\n".join(kept))
        with pytest.raises(FedbenchError, match=message):
            loaded(name, tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path,labels\na.png,x\n", "unknown column of .* 'label'; did you mean 'labels'"),
        ("path,label\n", "has no samples below its first line"),
        ("path,label\n../a.png,x\n", "line 2: '../a.png' leads out of the image folder"),
        ("path,label\nb.png,x\n", "line 2: there is no file"),
        ("path,label\na.png,\n", "line 2: no label"),
        ("path,label,split\na.png,x,trian\n", "line 2: unknown split 'trian'; did you mean 'train'"),
        ("path,label,split\na.png,x,test\n", "has no sample of the split train"),
        ("path,label\na.png,3\n", "label 0 has no name; put classnames.txt with 4 names"),
        ("path,label\na.png,x,y,z\n", "line 2 has 4 cells, and the first line names 2"),
    ],
)
def test_a_wrong_csv_is_named_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    picture(tmp_path / "a.png", 9)
    (tmp_path / "wrong.csv").write_text(text)
    with pytest.raises(FedbenchError, match=message):
        loaded("csv:wrong.csv", tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no file of LEAF's FEMNIST"),
        ('{"users": ["a"]}', "no 'user_data'"),
        ('{"users": ["a"], "user_data": {"a": {"x": [[0.5]], "y": [1, 2]}}}', "1 images and 2 labels"),
        ('{"users": ["a"], "user_data": {"a": {"x": [[0.5]], "y": [1]}}}', "does not have 784 pixels"),
        ('{"users": ["a"], "user_data": {"a": {"x": [{}], "y": [1]}}}', "is no file of LEAF's FEMNIST"),
        ('{"users": ["a"], "user_data": {"a": {"x": [[' + "2," * 783 + '0]], "y": [1]}}}', "pixels outside 0 to 1"),
        ('{"users": ["a"], "user_data": {"a": {"x": [[' + "1," * 783 + '0]], "y": [Infinity]}}}', "is no file of LEAF"),
    ],
)
def test_a_damaged_leaf_folder_is_named(content: str, message: str, tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "all.json").write_text(content)
    with pytest.raises(FedbenchError, match=message):
        loaded(f"leaf:{tmp_path}", tmp_path)


def test_a_leaf_folder_without_a_test_split_says_how_to_make_it(tmp_path: Path) -> None:
    name = femnist(tmp_path)
    (tmp_path / "test" / "all_data_0.json").unlink()
    with pytest.raises(FedbenchError, match=r"holds no test/\*.json; make them with LEAF's"):
        loaded(name, tmp_path)
