"""200 corrupted files: each an error that names the file, or the very numbers of the whole file, never other ones.

What users bring (images, lists, tables, weights) has no checksum in most formats. Where damage leaves it readable, it
is other data under another hash: a run that read the whole file is then neither repeated by nor averaged with one that
read the damaged file, and no cached feature is shared. What fedbench wrote itself is never read back otherwise.
"""

from __future__ import annotations

import hashlib
import pickle
import random
import shutil
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import optuna
import pytest
import torch
from safetensors.torch import save_file

from fedbench.core.errors import FedbenchError
from fedbench.core.federation import TensorImages
from fedbench.datasets import cache as kept
from fedbench.datasets import load_dataset
from fedbench.models import load_backbone
from fedbench.models.inputs import encode
from fedbench.rounds.state import RunState, load_state, save_state
from fedbench.tracking.read import open_reader
from fedbench.tracking.recording import begin_run, end_run, log, metrics_at
from fedbench.tracking.schema import SEAL, seal_of, store_uri
from fedbench.tracking.store import experiment_of, open_store, runs_of
from fedbench.tuning.storage import open_storage
from tests.datasets.pictures import picture, write_cifar, write_fashion, write_parquet
from tests.datasets.pictures import png as image_file

Seen = tuple[str, str]
"""The hash by which a run knows what it read ("" for what fedbench wrote itself), and a digest of all numbers read."""


@dataclass(frozen=True)
class Case:
    """A whole file, and what a run reads of it."""

    file: Path
    read: Callable[[], Seen]
    beside: tuple[Path, ...] = ()
    """Made from the file by reading it; deleted before the next one."""


def digest(*parts: Any) -> str:
    return hashlib.sha256(pickle.dumps(parts)).hexdigest()


def data_seen(name: str, folder: Path, cache: Path) -> Seen:
    data = load_dataset(name, data_dir=folder, cache_dir=cache)
    parts: list[Any] = [data.classnames, data.domain_names]
    for split in filter(None, (data.train, data.test)):
        read = split.images.read(torch.arange(len(split.images)))
        domains = None if split.domains is None else split.domains.tolist()
        parts += [read.numpy().tobytes(), split.labels.tolist(), domains]
    return data.content_hash, digest(*parts)


def of_data(name: str, folder: Path, file: Path) -> Case:
    """A file of a user's data set, each time with a cache of its own."""
    cache = folder / "cache"
    return Case(file, lambda: data_seen(name, folder, cache), (cache,))


def of_cache(name: str, folder: Path, pattern: str) -> Case:
    """The first file of this pattern in the cache that a data set has filled."""
    data_seen(name, folder, folder / "cache")
    file = sorted((folder / "cache").rglob(pattern))[0]
    return Case(file, lambda: ("", data_seen(name, folder, folder / "cache")[1]))


def write_images(root: Path, kind: str) -> Path:
    for number, name in enumerate(("photo/cat/a", "photo/dog/b", "sketch/cat/c", "sketch/dog/d")):
        file = root / f"{name}.{kind}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(image_file(number, kind=kind.upper()))
    return root


def png(folder: Path) -> Case:
    write_images(folder / "pets", "png")
    return of_data("imagefolder:pets", folder, folder / "pets/photo/dog/b.png")


def jpeg(folder: Path) -> Case:
    write_images(folder / "pets", "jpeg")
    return of_data("imagefolder:pets", folder, folder / "pets/photo/dog/b.jpeg")


def tar(folder: Path) -> Case:
    with tarfile.open(folder / "pets.tar", "w") as archive:
        archive.add(write_images(folder / "pets", "png"), "pets")
    return of_data("imagefolder:pets.tar", folder, folder / "pets.tar")


def list_file(folder: Path) -> Case:
    lists = write_images(folder / "lists", "png")
    (lists / "classnames.txt").write_text("cat\ndog\n")
    lines = "photo/cat/a.png 0\nphoto/dog/b.png 1\nsketch/cat/c.png 0\nsketch/dog/d.png 1\n"
    (lists / "train.txt").write_text(lines)
    return of_data("listfile:lists", folder, lists / "train.txt")


def pets(folder: Path) -> str:
    import datasets

    styles = {"style": datasets.Value("string")}
    write_parquet(folder / "pets", {"train": 6, "test": 6}, styles, style=["photo", "photo", "sketch"] * 2)
    return f"hf:{folder / 'pets'}?domain=style"


def parquet(folder: Path) -> Case:
    return of_data(pets(folder), folder, folder / "pets/train-00000-of-00001.parquet")


def arrow(folder: Path) -> Case:
    return of_cache(pets(folder), folder, "*train.arrow")


def cifar(folder: Path) -> Case:
    return of_data("cifar10", folder, write_cifar(folder, setattr) / "data_batch_2")


def fashion(folder: Path) -> Case:
    return of_data("fashion-mnist", folder, write_fashion(folder) / "train-labels-idx1-ubyte")


def rendered(folder: Path) -> Case:
    return of_cache("embedded?train=40&test=40", folder, "embedded-*.safetensors")


def decoded(folder: Path) -> Case:
    write_images(folder / "pets", "jpeg")
    return of_cache("imagefolder:pets", folder, "images-*.safetensors")


def scanned(folder: Path) -> Case:
    write_images(folder / "pets", "jpeg")
    return of_cache("imagefolder:pets", folder, "scan-*.json")


class Mean:
    """An encoder: the mean of every channel."""

    key = "mean"

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        return images.float().mean(dim=(2, 3))


def features(folder: Path) -> Case:
    images = TensorImages(torch.from_numpy(np.stack([picture(number) for number in range(40)])).permute(0, 3, 1, 2))

    def read() -> Seen:
        return "", digest(encode(images, Mean(), folder).tolist())

    read()
    return Case(next(folder.glob("*.safetensors")), read)


TINY = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 16, "patch_size": 8, "width": 16, "layers": 1, "head_width": 8},
    "text_cfg": {"context_length": 8, "vocab_size": 49408, "width": 8, "heads": 1, "layers": 1},
}


def weights(folder: Path, name: str, save: Callable[[dict[str, torch.Tensor], Path], None]) -> Case:
    open_clip.factory._MODEL_CONFIGS["fbcorrupt"] = TINY
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        state = open_clip.CLIP(**TINY).state_dict()
    # nearly all of the file would be the embedding of tokens
    state["token_embedding.weight"] = torch.zeros_like(state["token_embedding.weight"])
    save(state, folder / name)

    def read() -> Seen:
        backbone = load_backbone(f"clip:fbcorrupt:{folder / name}", data_dir=Path(), seed=0)
        return backbone.weights_hash, digest([value.tolist() for value in list(backbone.module.parameters())[:30]])

    return Case(folder / name, read)


def safetensors_weights(folder: Path) -> Case:
    return weights(folder, "clip.safetensors", save_file)


def torch_weights(folder: Path) -> Case:
    return weights(folder, "clip.pt", torch.save)


def state(folder: Path) -> Case:
    file = folder / "state.safetensors"
    kept_state = RunState(3, {"head": torch.randn(20, 8)}, {"mean": torch.arange(5)}, {"fedavgm": {"v": torch.ones(9)}})
    save_state(kept_state, file, "r" * 16)

    def read() -> Seen:
        found = load_state(file, "r" * 16)
        server = {name: {key: value.tolist() for key, value in of.items()} for name, of in found.server.items()}
        tensors = [{key: value.tolist() for key, value in of.items()} for of in (found.weights, found.buffers)]
        return "", digest(found.round, tensors, server, found.clients, found.own)

    return Case(file, read)


def filled_store(folder: Path) -> str:
    uri = store_uri(str(folder))
    client = open_store(uri, create=True)
    assert client is not None
    experiment = experiment_of(client, uri, "toy")
    for seed in range(3):
        run = begin_run(client, experiment, f"fedavg, seed {seed}", {"fedbench.run_id": f"{seed}" * 16})
        log(client, run, params={"seed": str(seed), "method": "fedavg", "training.lr": "0.01"})
        log(client, run, metrics_at({"final/global_accuracy": 60 + seed / 3, "final/tail_accuracy": 50.0}, 5))
        client.set_tag(run, SEAL, seal_of(client.get_run(run).data))
        end_run(client, run, "FINISHED")
    return uri


def seen_of(runs: Iterable[tuple[str, Any]]) -> Seen:
    texts = [
        (name, sorted(run.data.params.items()), sorted(run.data.metrics.items()), sorted(run.data.tags.items()))
        for name, run in runs
        if run.info.status == "FINISHED"
    ]
    return "", digest(sorted(texts))


def queried_store(folder: Path) -> Case:
    """As leaderboards read it."""
    uri = filled_store(folder)

    def read() -> Seen:
        reader = open_reader(uri)
        assert reader is not None
        return seen_of(reader.runs("toy"))

    return Case(folder / "mlflow.db", read)


def store(folder: Path) -> Case:
    """As MLflow reads it."""
    uri = filled_store(folder)

    def read() -> Seen:
        found = open_store(uri, create=False)
        assert found is not None
        return seen_of(runs_of(found, "toy"))

    return Case(folder / "mlflow.db", read)


def studies(folder: Path) -> Case:
    url = f"sqlite:///{folder / 'studies.db'}"
    study = optuna.create_study(storage=open_storage(url, create=True), study_name="toy", direction="maximize")
    for number in range(5):
        trial = study.ask()
        trial.suggest_float("lr", 0.001, 0.1)
        study.tell(trial, float(number))

    def read() -> Seen:
        trials = optuna.load_study(storage=open_storage(url, create=False), study_name="toy").trials
        return "", digest([(trial.number, trial.state.name, trial.params, trial.values) for trial in trials])

    return Case(folder / "studies.db", read)


COUNTS: dict[Callable[[Path], Case], int] = {
    **dict.fromkeys((png, jpeg, tar, list_file, cifar, rendered, decoded, features, state), 14),
    **dict.fromkeys((parquet, arrow, scanned, safetensors_weights, torch_weights, studies), 9),
    **dict.fromkeys((store, queried_store), 7),
    fashion: 6,
}
"""How many corrupted files of each kind."""
SOURCES = {png, jpeg, tar, list_file, parquet, fashion, safetensors_weights, torch_weights}
"""What users bring in formats without a checksum over all."""
DAMAGES = ("truncated", "one bit", "some bits", "zeros", "one bit", "empty", "other content")


def damaged(whole: bytes, how: str, chance: random.Random) -> bytes:
    """``whole`` after a disk, a network or a copy has done this to it."""
    content = bytearray(whole)
    place = chance.randrange(len(content))
    if how == "truncated":
        return whole[:place]
    if how == "empty":
        return b""
    if how == "other content":
        return chance.randbytes(len(content) // 2)
    if how == "zeros":
        length = min(chance.randrange(1, 4096), len(content) - place)
        content[place : place + length] = bytes(length)
        return bytes(content)
    for _ in range(1 if how == "one bit" else 8):
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    return bytes(content)


def outcome(case: Case, whole: Seen, folder: Path, is_source: bool) -> str:
    """What became of reading a damaged file; "wrong" where numbers differ that nothing tells apart."""
    try:
        seen = case.read()
    except FedbenchError as error:
        # the file, or a folder around it that is the data set's or the copy's own
        places = [place for place in (case.file, *case.file.parents) if folder in place.parents]
        return "error" if any(str(place) in str(error) for place in places) else f"error without the file: {error}"
    if seen == whole:
        return "unaffected"
    return "other data" if is_source and seen[0] != whole[0] else "wrong"


def outcomes(make: Callable[[Path], Case], folder: Path, numbers: range) -> Iterator[tuple[str, str]]:
    """How each numbered file of a kind was damaged, and what became of it."""
    case = make(folder)
    whole, content = case.read(), case.file.read_bytes()
    for number in numbers:
        chance = random.Random(f"{make.__name__} {number}")
        how = DAMAGES[number % len(DAMAGES)]
        hurt = damaged(content, how, chance)
        for made in case.beside:
            shutil.rmtree(made, ignore_errors=True)
        # another file, as after a copy: whoever mapped the old one keeps it
        with tempfile.NamedTemporaryFile(dir=case.file.parent, delete=False) as temporary:
            temporary.write(hurt)
        Path(temporary.name).replace(case.file)
        kept.forget()
        yield how, outcome(case, whole, folder, make in SOURCES)


@pytest.fixture(autouse=True)
def own_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torchvision's and open_clip's tables are as before when a test ends."""
    from torchvision.datasets import CIFAR10

    for name in ("train_list", "test_list", "meta"):
        monkeypatch.setattr(CIFAR10, name, getattr(CIFAR10, name))
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "fbcorrupt", TINY)


def test_there_are_200_files() -> None:
    assert sum(COUNTS.values()) == 200


@pytest.mark.parametrize("make", COUNTS, ids=lambda make: make.__name__)
def test_a_damaged_file_is_an_error_or_the_same_numbers(make: Callable[[Path], Case], tmp_path: Path) -> None:
    found = list(outcomes(make, tmp_path, range(min(4, COUNTS[make]))))
    assert {what for _, what in found} <= {"error", "unaffected", "other data"}, found
    assert "error" in {what for _, what in found}


@pytest.mark.slow
def test_200_damaged_files(tmp_path: Path) -> None:
    total: Counter[str] = Counter()
    for make, count in COUNTS.items():
        folder = tmp_path / make.__name__
        folder.mkdir()
        found = list(outcomes(make, folder, range(count)))
        counted = Counter(what for _, what in found)
        assert set(counted) <= {"error", "unaffected", "other data"}, (make.__name__, found)
        print(make.__name__, dict(counted))
        total += counted
    print(dict(total))
    assert total["error"] >= 100
