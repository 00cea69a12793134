"""What files and names of strangers can't do: run code, leave their folder, write to the terminal, fill the memory."""

from __future__ import annotations

import ast
import io
import json
import multiprocessing
import os
import pickle
import re
import resource
import signal
import socket
import sqlite3
import struct
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image
from rich.text import Text
from safetensors.torch import save_file

import fedbench
from fedbench.cli.commands import reading as ui_command
from fedbench.core.errors import FedbenchError
from fedbench.core.federation import Dataset
from fedbench.datasets import load_dataset
from fedbench.datasets.cache import kept
from fedbench.models import load_backbone
from fedbench.models.clip.loading import published_digest
from fedbench.models.text.vectors import transformers_encoder
from fedbench.models.weight_files import check_digest
from fedbench.rounds.state import read_saved
from fedbench.suites.suite import parse_suite
from fedbench.tracking.databases import check_database, shown
from fedbench.tracking.recording import begin_run, end_run, log, metrics_at
from fedbench.tracking.schema import SEAL, seal_of, store_uri
from fedbench.tracking.store import experiment_of, open_store, runs_of
from fedbench.tuning.storage import open_storage
from fedbench.workflow.console import cell, complain, console, say, table
from fedbench_boards.leaderboard.results import load_results
from fedbench_embedded import weights as shipped

HARNESS = Path(fedbench.__file__).parent
TINY = {
    "embed_dim": 8,
    "vision_cfg": {"image_size": 16, "patch_size": 8, "width": 8, "layers": 1, "head_width": 8},
    "text_cfg": {"context_length": 8, "vocab_size": 49408, "width": 8, "heads": 1, "layers": 1},
}


class Bomb:
    """Makes the folder ``run`` where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("run",)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "fbtarget", TINY)


def load(name: str) -> Dataset:
    return load_dataset(name, data_dir=Path.cwd(), cache_dir=Path("cache").absolute())


def refused(name: str) -> str:
    with pytest.raises(FedbenchError) as caught:
        load(name)
    return str(caught.value)


def png(size: tuple[int, int] = (8, 8)) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.zeros((*size, 3), np.uint8)).save(file, "PNG")
    return file.getvalue()


def write_images(root: Path) -> Path:
    for name in ("photo/cat", "photo/dog", "sketch/cat", "sketch/dog"):
        (root / name).mkdir(parents=True)
        (root / name / "a.png").write_bytes(png())
    return root


# --- code


def test_a_bomb_goes_off_where_it_is_unpickled() -> None:
    pickle.loads(pickle.dumps(Bomb()))
    assert Path("run").is_dir()


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".npz", ".npy", ".safetensors"])
@pytest.mark.parametrize("way", ["torch", "old torch", "pickle", "numpy"])
def test_weights_are_never_unpickled(suffix: str, way: str) -> None:
    file = Path(f"weights{suffix}").absolute()
    if way == "numpy":
        with file.open("wb") as opened:
            np.save(opened, np.array([Bomb()], dtype=object), allow_pickle=True)
    elif way == "pickle":
        file.write_bytes(pickle.dumps({"state_dict": Bomb()}))
    else:
        torch.save({"state_dict": Bomb()}, file, _use_new_zipfile_serialization=way == "torch")
    with pytest.raises(FedbenchError, match=file.name):
        load_backbone(f"clip:fbtarget:{file}", data_dir=Path(), seed=0)
    assert not Path("run").exists()


@pytest.mark.parametrize("name", ["data.pkl", "train.npy", "pets.py", "train.pt"])
def test_a_folder_for_hugging_face_runs_nothing(name: str) -> None:
    folder = Path("pets")
    folder.mkdir()
    code = "import os\nos.mkdir('run')\n"
    (folder / name).write_bytes(code.encode() if name.endswith(".py") else pickle.dumps(Bomb()))
    assert "'pets'" in refused("hf:pets")
    assert not Path("run").exists()


def test_a_text_encoder_runs_nothing() -> None:
    from transformers import BertConfig, BertModel, BertTokenizer

    folder = Path("encoder").absolute()
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]))
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    BertModel(BertConfig(vocab_size=13, **shape)).save_pretrained(folder)
    assert transformers_encoder(f"text:hf/{folder}")[1].config.hidden_size == 8

    weights, config = folder / "model.safetensors", folder / "config.json"
    whole, plain = weights.read_bytes(), config.read_text()
    weights.write_bytes(whole[:100])
    with pytest.raises(FedbenchError, match="encoder"):
        transformers_encoder(f"text:hf/{folder}")
    weights.unlink()
    torch.save({"weight": Bomb()}, folder / "pytorch_model.bin")
    with pytest.raises(FedbenchError, match="encoder"):
        transformers_encoder(f"text:hf/{folder}")
    (folder / "pytorch_model.bin").unlink()
    weights.write_bytes(whole)
    (folder / "own.py").write_text("import os\nos.mkdir('run')\n")
    own = {"model_type": "own", "auto_map": {"AutoModel": "own.Model", "AutoConfig": "own.Config"}}
    config.write_text(json.dumps({**json.loads(plain), **own}))
    with pytest.raises(FedbenchError, match="encoder"):
        transformers_encoder(f"text:hf/{folder}")
    assert not Path("run").exists()


@pytest.mark.parametrize(
    "value",
    ["!!python/object/apply:os.mkdir [run]", "!!python/name:os.system", "!!python/object/new:os.mkdir [run]"],
)
def test_a_suite_makes_no_objects(value: str) -> None:
    with pytest.raises(FedbenchError, match="not valid YAML"):
        parse_suite(f"name: x\nrows:\n- method: fedavg\n  set: {{lr: {value}}}\n", "mine.yaml")
    assert not Path("run").exists()


@pytest.mark.parametrize("item", ["*a{0}", "{{<<: *a{0}}}"])
def test_aliases_that_would_fill_memory_are_counted(item: str) -> None:
    levels = [
        f"a{number}: &a{number} [{', '.join([item.format(number - 1)] * 10)}]" if number else "a0: &a0 {x: 1}"
        for number in range(12)
    ]
    with pytest.raises(FedbenchError, match=r"mine\.yaml"):
        parse_suite("\n".join(["name: x", *levels, "rows: [{method: fedavg}]"]), "mine.yaml")


def calls(file: Path) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.Call)]


def test_the_code_has_no_way_to_run_what_it_reads() -> None:
    files = sorted(HARNESS.rglob("*.py"))
    assert len(files) > 100
    unsafe = {("allow_pickle", True), ("weights_only", False), ("trust_remote_code", True), ("shell", True)}
    for file in files:
        for call in calls(file):
            given = {(one.arg, one.value.value) for one in call.keywords if isinstance(one.value, ast.Constant)}
            assert not given & unsafe, f"{file}: {given & unsafe}"
            name = ast.unparse(call.func)
            assert name not in {"eval", "exec", "os.system", "yaml.load", "yaml.unsafe_load", "pd.read_pickle"}, file
            if name in {"pickle.load", "pickle.loads", "cloudpickle.load", "cloudpickle.loads"}:
                # what fedbench's own processes send each other
                assert "engines" in file.parts, f"{file} unpickles"


# --- folders


def tar_of(*members: tuple[tarfile.TarInfo, bytes]) -> None:
    with tarfile.open("pets.tar", "w") as archive:
        for member, content in members:
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, target
    return made


def test_members_that_lead_out_of_an_archive_are_not_there() -> None:
    whole = [(member(f"{style}/{label}/a.png"), png()) for style in ("photo", "sketch") for label in ("cat", "dog")]
    tar_of(*whole)
    expected = load("imagefolder:pets.tar")
    hostile = [
        (member("photo/cat/../../../out.png"), png()),
        (member("/photo/cat/absolute.png"), png()),
        (member("photo/cat/link.png", tarfile.SYMTYPE, "/etc/passwd"), b""),
        (member("photo/cat/hard.png", tarfile.LNKTYPE, "../../etc/passwd"), b""),
        (member("photo/cat/device.png", tarfile.CHRTYPE), b""),
        (member("photo/cat/pipe.png", tarfile.FIFOTYPE), b""),
    ]
    tar_of(*whole, *hostile)
    assert load("imagefolder:pets.tar").content_hash == expected.content_hash
    assert {path.name for path in Path.cwd().iterdir()} == {"pets.tar", "cache"}


@pytest.mark.parametrize("damage", ["a header", "a header of zeros", "no end", "more behind the end"])
def test_an_archive_that_ends_too_early_is_not_half_a_data_set(damage: str) -> None:
    styles, labels = ("photo", "sketch"), ("cat", "dog")
    tar_of(*[(member(f"{style}/{label}/a.png"), png()) for style in styles for label in labels])
    content = bytearray(Path("pets.tar").read_bytes())
    with tarfile.open("pets.tar") as archive:
        third, last = archive.getmembers()[2].offset, archive.getmembers()[3]
    if damage == "a header":
        content[third + 5] ^= 1
    elif damage == "a header of zeros":
        content[third : third + 512] = bytes(512)
    elif damage == "no end":
        del content[last.offset_data + 512 :]
    else:
        content[-3] = 7
    Path("pets.tar").write_bytes(content)
    assert "'pets.tar' can't be read as an uncompressed .tar archive" in refused(f"imagefolder:{Path('pets.tar')}")


@pytest.mark.parametrize(
    "way", ["../secret.png", "/secret.png", "link.png", "folder/secret.png", "a\0b.png", "x" * 5000]
)
def test_paths_in_list_files_stay_below_the_root(way: str, tmp_path: Path) -> None:
    lists = tmp_path / "data" / "lists"
    lists.mkdir(parents=True)
    (tmp_path / "data" / "secret.png").write_bytes(png())
    (lists / "link.png").symlink_to("../secret.png")
    (lists / "folder").symlink_to("..")
    (lists / "inside.png").write_bytes(png())
    (lists / "alias.png").symlink_to("inside.png")
    (lists / "classnames.txt").write_text("cat\n")
    (lists / "train.txt").write_text("inside.png 0\nalias.png 0\n")
    assert len(load(f"listfile:{lists}").train) == 2
    shown = str(tmp_path) + way if way.startswith("/") else way
    (lists / "train.txt").write_text(f"inside.png 0\n{shown} 0\n")
    assert f"{str(lists / 'train.txt')!r}, line 2:" in refused(f"listfile:{lists}")


def test_a_table_may_not_name_images_outside_of_its_folder(tmp_path: Path) -> None:
    import datasets

    (tmp_path / "secret.png").write_bytes(png())
    folder = tmp_path / "pets"
    folder.mkdir()
    (folder / "mine.png").write_bytes(png())
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})

    def write(path: Path) -> None:
        rows = {"image": [{"bytes": None, "path": str(path)}] * 2, "label": [0, 1]}
        datasets.Dataset.from_dict(rows, features=features).to_parquet(str(folder / "train-00000-of-00001.parquet"))

    write(folder / "mine.png")
    table_of = datasets.load_dataset("parquet", data_files=str(folder / "*.parquet"), cache_dir=str(tmp_path / "c"))
    stored = table_of["train"].data.column("image")[0].as_py()
    if stored["bytes"] is not None:
        pytest.skip("this version of datasets stores images in the table")
    assert len(load("hf:pets").train) == 2
    write(tmp_path / "secret.png")
    assert "leads out of the data set" in refused("hf:pets")


def test_a_folder_that_holds_itself_is_refused() -> None:
    write_images(Path("pets"))
    (Path("pets") / "photo" / "again").symlink_to("..")
    assert "are the same folder, by a link" in refused("imagefolder:pets")


def test_folders_that_hold_each_other_are_refused() -> None:
    write_images(Path("pets"))
    (Path("pets") / "photo" / "x").mkdir()
    (Path("pets") / "photo" / "x" / "dog").symlink_to("../cat")
    assert "are the same folder, by a link" in refused("imagefolder:pets")


@pytest.mark.parametrize(
    ("uri", "told"),
    [
        ("postgresql://ann:secret@host/runs", "postgresql://ann:***@host/runs"),
        ("postgresql://host/runs?user=ann&password=secret", "postgresql://host/runs?password=***&user=ann"),
        ("postgresql://ann:sec:ret@host:xx/runs", "postgresql://***@host:xx/runs"),
        ("http://host:5000", "http://host:5000"),
        ("sqlite:////data/store/mlflow.db", "sqlite:////data/store/mlflow.db"),
    ],
)
def test_addresses_are_shown_without_passwords(uri: str, told: str) -> None:
    assert shown(uri) == told


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", ".hidden", "a/b"])
def test_published_numbers_are_read_from_their_own_folder(name: str) -> None:
    with pytest.raises(FedbenchError, match="published"):
        parse_suite(f"name: s\nrows: [{{method: fedavg}}]\npublished: {name}\n", "s")


@pytest.mark.parametrize("name", ["..", ".", "../../out", "/out", "a/../../b", "\\out"])
def test_a_suite_s_files_stay_in_the_store(name: str, tmp_path: Path) -> None:
    class Client:
        def get_experiment_by_name(self, _: str) -> None: ...

        def create_experiment(self, _: str, artifact_location: str, **__: object) -> str:
            return artifact_location

    place = experiment_of(Client(), store_uri(str(tmp_path / "store")), name)  # type: ignore[arg-type]
    folder = Path(place.removeprefix("file://"))
    assert folder.resolve().parent == tmp_path / "store" / "artifacts"


# --- memory


def huge_png(width: int, height: int) -> bytes:
    """A small file that claims to be a large image."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [10_000, 60_000])
def test_images_that_would_fill_memory_are_named(side: int) -> None:
    write_images(Path("pets"))
    (Path("pets") / "photo" / "cat" / "b.png").write_bytes(huge_png(side, side))
    message = refused("imagefolder:pets")
    assert "photo/cat/b.png' can't be decoded" in message and "decompression bomb" in message


def test_labels_that_are_no_classes_are_refused() -> None:
    lists = write_images(Path("pets"))
    (lists / "classnames.txt").write_text("cat\n")
    (lists / "train.txt").write_text("photo/cat/a.png 999999999999\n")
    assert "line 1" in refused("listfile:pets")


# --- paths that lead to no file

KINDS = ("fifo", "socket", "folder", "/dev/zero", "/dev/full")
REASON = r"it is a (FIFO|socket|folder|device), not a regular file"


def place(kind: str, file: Path) -> None:
    """Something at the path of ``file`` that is no file, but can be opened or read without end."""
    file.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(os.path.relpath(file))  # as a whole it may be too long for a socket
    elif kind == "folder":
        file.mkdir()
    else:
        file.symlink_to(kind)


def told(call: Callable[[], object]) -> str:
    """The FedbenchError that ``call`` ends in, in a process that is given 30 seconds and 2 GB of further memory."""
    here, there = multiprocessing.get_context("fork").Pipe(duplex=False)

    def child() -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**31, used + 2**31))
        try:
            there.send(f"no error, but {call()!r}")
        except FedbenchError as error:
            there.send(str(error))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    there.close()
    try:
        return here.recv() if here.poll(30) else "it never ends"
    except EOFError:
        return "no FedbenchError"
    finally:
        process.kill()
        process.join()


def image_in_a_folder(at: Path) -> tuple[Path, str]:
    return write_images(at) / "photo" / "cat" / "a.png", f"imagefolder:{at}"


def class_names(at: Path) -> tuple[Path, str]:
    return write_images(at) / "names.json", f"imagefolder:{at}?classnames={at}/names.json"


def archive(at: Path) -> tuple[Path, str]:
    return at.with_suffix(".tar"), f"imagefolder:{at}.tar"


def write_lists(at: Path) -> Path:
    write_images(at)
    (at / "train.txt").write_text("photo/cat/a.png 0\nphoto/dog/a.png 1\n")
    (at / "classnames.txt").write_text("cat\ndog\n")
    return at


def image_in_a_list(at: Path) -> tuple[Path, str]:
    return write_lists(at) / "photo" / "cat" / "a.png", f"listfile:{at}"


def list_of_images(at: Path) -> tuple[Path, str]:
    return write_lists(at) / "train.txt", f"listfile:{at}"


def class_names_beside_a_list(at: Path) -> tuple[Path, str]:
    return write_lists(at) / "classnames.txt", f"listfile:{at}"


def groups_beside_a_list(at: Path) -> tuple[Path, str]:
    return write_lists(at) / "groups.json", f"listfile:{at}"


def cached_scan(at: Path) -> tuple[Path, str]:
    load(f"imagefolder:{write_images(at)}")
    return next(Path("cache/datasets").glob("scan-*.json")), f"imagefolder:{at}"


def cached_images(at: Path) -> tuple[Path, str]:
    load(f"imagefolder:{write_images(at)}")
    return next(Path("cache/datasets").glob("images-*.safetensors")), f"imagefolder:{at}"


OF_DATA = (
    image_in_a_folder, class_names, archive, image_in_a_list, list_of_images, class_names_beside_a_list,
    groups_beside_a_list, cached_scan, cached_images,
)  # fmt: skip


@pytest.mark.parametrize("kind", ["fifo", "folder", "/dev/zero"])
@pytest.mark.parametrize("make", OF_DATA)
def test_what_is_no_file_is_named_instead_of_read(make: Callable[[Path], tuple[Path, str]], kind: str) -> None:
    file, name = make(Path("pets"))
    place(kind, file)
    message = told(lambda: load(name))
    if kind == "folder" and make in (image_in_a_folder, archive):
        assert message.startswith("no error, but Dataset") or "holds no" in message
    else:
        assert file.name in message and "\n" not in message
        assert re.search(REASON + "|there is no file|leads out of the image folder", message)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_no_weights_features_state_or_store(kind: str, tmp_path: Path) -> None:
    place(kind, file := tmp_path / "odd.safetensors")
    weights = told(lambda: load_backbone(f"clip:fbtarget:{file}", data_dir=Path(), seed=0))
    assert f"there is no file {str(file)!r}" in weights
    published = told(lambda: check_digest(file, "", "get it again"))
    kept_file = told(lambda: kept(file, "feature cache", lambda: ({}, {}), lambda file, content: ""))
    state = told(lambda: read_saved(file))
    store = told(lambda: check_database(file, "the store", ("runs",), "--store"))
    for message in (published, kept_file, state, store):
        assert re.search(REASON, message) and file.name in message and "\n" not in message


def test_a_file_too_large_to_be_an_image_is_not_read() -> None:
    file = write_images(Path("pets")) / "photo" / "cat" / "a.png"
    os.truncate(file, 2**40)  # takes no space
    message = told(lambda: load("imagefolder:pets"))
    assert "photo/cat/a.png' can't be read (it has 1,099,511,627,776 bytes, more than" in message


# --- changes behind fedbench's back


def test_an_image_that_changes_while_it_is_used_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedbench.datasets.content.MEMORY_LIMIT", 0)
    write_images(Path("pets"))
    data = load("imagefolder:pets")
    data.train.images.read(torch.tensor([0]))
    (Path("pets") / "photo" / "cat" / "a.png").write_bytes(png((8, 9)))
    with pytest.raises(FedbenchError, match=r"photo/cat/a\.png' is not what it was"):
        data.train.images.read(torch.tensor([0]))


def test_published_weights_are_held_against_their_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sha = "ab" * 32
    openai = {"url": f"https://openaipublic.azureedge.net/clip/models/{sha}/ViT.pt", "hf_hub": "timm/vit"}
    assert published_digest(tmp_path / "ViT.pt", openai) == sha
    # the same tag's file on the Hub is another one, whose own name tells
    hub = tmp_path / "open_clip_model.safetensors"
    hub.symlink_to("cd" * 32)
    (tmp_path / ("cd" * 32)).touch()
    assert published_digest(hub, openai) == "cd" * 32
    assert published_digest(tmp_path / "other.safetensors", openai) == ""
    laion = {"url": "https://github.com/mlfoundations/x/vit-b-32-0c8f7a1e.pt"}
    assert published_digest(tmp_path / "vit-b-32-0c8f7a1e.pt", laion) == "0c8f7a1e"
    assert published_digest(tmp_path / "vit.pt", {"url": "https://example.org/vit.pt"}) == ""
    (tmp_path / sha).touch()
    (tmp_path / "model.bin").symlink_to(sha)
    assert published_digest(tmp_path / "model.bin", {}) == sha

    folder = shipped.FOLDER
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    for end in (".json", "_card.json", "_tokens.json", ".safetensors"):
        (tmp_path / f"embedded{end}").write_bytes((folder / f"embedded{end}").read_bytes())
    shipped.load("clip:embedded")
    content = bytearray((tmp_path / "embedded.safetensors").read_bytes())
    content[-1000] ^= 1
    (tmp_path / "embedded.safetensors").write_bytes(content)
    with pytest.raises(FedbenchError, match=r"embedded\.safetensors' are damaged .* reinstall fedbench"):
        shipped.load("clip:embedded")


def test_weights_that_are_not_finite_are_refused() -> None:
    state = open_clip.CLIP(**TINY).state_dict()
    state["visual.proj"][0, 0] = torch.inf
    save_file(state, "weights.safetensors")
    with pytest.raises(FedbenchError, match=r"visual\.proj is not finite"):
        load_backbone(f"clip:fbtarget:{Path('weights.safetensors').absolute()}", data_dir=Path(), seed=0)


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """A store with one finished run, sealed, of 61.5 %."""
    made = store_uri(str(tmp_path / "store"))
    client = open_store(made, create=True)
    assert client is not None
    run = begin_run(client, experiment_of(client, made, "toy"), "fedavg", {"fedbench.run_id": "a" * 16})
    log(client, run, params={"seed": "0"})
    log(client, run, metrics_at({"final/global_accuracy": 61.5}, 3))
    client.set_tag(run, SEAL, seal_of(client.get_run(run).data))
    end_run(client, run, "FINISHED")
    return made


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE latest_metrics SET value = 71.5",
        "UPDATE latest_metrics SET value = 61.50000000000001",
        "UPDATE params SET value = '1' WHERE key = 'seed'",
        "UPDATE tags SET value = 'b' WHERE key = 'fedbench.run_id'",
        "DELETE FROM latest_metrics",
    ],
)
def test_a_number_that_changed_in_the_store_is_noticed(uri: str, change: str) -> None:
    client = open_store(uri, create=False)
    assert client is not None
    ((_, run),) = runs_of(client, "toy")
    assert run.data.metrics["final/global_accuracy"] == 61.5
    client.set_tag(run.info.run_id, "mlflow.note.content", "a note of the user's")
    assert len(list(runs_of(client, "toy"))) == 1
    with sqlite3.connect(uri.removeprefix("sqlite:///")) as database:
        database.execute(change)
    with pytest.raises(FedbenchError, match=f"{run.info.run_id}.* is not what was recorded"):
        load_results(uri, "toy")


def test_an_emptied_database_is_not_a_new_one(uri: str, tmp_path: Path) -> None:
    (tmp_path / "store" / "mlflow.db").write_bytes(b"")
    with pytest.raises(FedbenchError, match=r"mlflow\.db' is damaged \(it is empty\)"):
        open_store(uri, create=True)
    (tmp_path / "studies.db").write_bytes(b"")
    with pytest.raises(FedbenchError, match=r"studies\.db' is damaged \(it is empty\)"):
        open_storage(f"sqlite:///{tmp_path / 'studies.db'}", create=True)


# --- terminal and network


def test_names_can_only_be_read_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "[bold]cat[/bold] \x1b]0;title\x07\x1b[2J\x9b31m\x7f\r\u202edog"
    say(hostile)
    complain(hostile)
    made = table("name")
    made.add_row(cell(hostile))
    console().print(made)
    console().print(Text(hostile))
    out, err = capsys.readouterr()
    for text in (out, err):
        assert "[bold]cat[/bold]" in text and "dog" in text
        assert not [character for character in text if not character.isprintable() and character != "\n"]
    assert out.count("dog") == 3


def test_the_web_interface_is_for_this_machine(monkeypatch: pytest.MonkeyPatch, uri: str) -> None:
    started: list[list[str]] = []

    def popen(command: list[str], **_: object) -> SimpleNamespace:
        started.append(command)
        return SimpleNamespace(wait=lambda: 0)

    monkeypatch.setenv("MLFLOW_HOST", "0.0.0.0")
    monkeypatch.setattr(ui_command.subprocess, "Popen", popen)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    ui_command.ui(uri, port=5005)
    (command,) = started
    assert command[command.index("--host") + 1] == "127.0.0.1"
