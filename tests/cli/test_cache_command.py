"""``fedbench cache clear``: no more is removed than was asked for."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from torch import Tensor

from fedbench.cli.commands.cache import entries
from fedbench.core.federation import TensorImages
from fedbench.datasets.cache import stored
from fedbench.models.inputs import encode

DAY = 86_400


class Mean:
    """Mean by channel."""

    key = "mean"

    def __call__(self, pixels: Tensor) -> Tensor:
        return pixels.float().mean(dim=(2, 3))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Features of four images, 40 days old; ten images rendered just now; and files of others."""
    folder = tmp_path / "cache"
    encode(TensorImages(torch.zeros(4, 3, 2, 2, dtype=torch.uint8)), Mean(), folder)
    (features,) = folder.glob("*.safetensors")
    os.utime(features, (time.time() - 40 * DAY,) * 2)
    images = {"train.images": torch.zeros(10, 3, 2, 2, dtype=torch.uint8), "train.labels": torch.zeros(10)}
    stored(folder / "datasets" / "embedded-v1-classes10.safetensors", lambda: images, "embedded?train=10")
    for name in ("notes.txt", "model.safetensors", f"datasets/{'0' * 64}.safetensors", "huggingface/x/data.arrow"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")
    (folder / f"{'1' * 64}.safetensors").symlink_to(folder / "notes.txt")
    return folder


FOREIGN = {"notes.txt", "model.safetensors", "0" * 64 + ".safetensors", "data.arrow", "1" * 64 + ".safetensors"}
RENDERED = "embedded-v1-classes10.safetensors"


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


def test_a_file_that_is_deleted_meanwhile_is_left_out(folder: Path) -> None:
    found = entries(folder)
    features, days = next(found)
    assert features.parent == folder and 39 < days < 41
    (folder / "datasets" / RENDERED).unlink()
    assert list(found) == []


@pytest.mark.parametrize(("days", "left"), [("0", set()), ("30", {RENDERED}), ("41", {RENDERED, "features"})])
def test_clear_removes_by_age_what_is_fedbenchs(fedbench, folder: Path, days: str, left: set[str]) -> None:
    (features,) = {file.name for file, _ in entries(folder)} - {RENDERED}
    assert fedbench("cache", "clear", "--older-than", days, "--cache-dir", str(folder)).code == 0
    assert names(folder) - FOREIGN == {features if name == "features" else name for name in left}
    assert names(folder) >= FOREIGN


def test_clear_says_what_it_freed(fedbench, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDBENCH_CACHE", str(folder))
    megabytes = sum(file.stat().st_size for file, _ in entries(folder)) / 1e6
    assert fedbench("cache", "clear").out == f"removed 2 files from {folder}, {megabytes:.3f} MB freed\n"
    assert fedbench("cache", "clear").out == f"nothing to remove in {folder}.\n"


def test_clear_removes_what_dead_writers_left_but_not_what_is_being_written(fedbench, folder: Path) -> None:
    dead, alive = ("a" * 64 + ".safetensors", "b" * 64 + ".safetensors")
    for name in (dead, alive):
        (folder / f".{name}.7.{'0' * 32}.tmp").write_bytes(b"half")
        (folder / f".{name}.lock").write_bytes(b"")
    with FileLock(folder / f".{alive}.lock"):
        freed = fedbench("cache", "clear", "--older-than", "99", "--cache-dir", str(folder))
        assert fedbench("cache", "clear", "--cache-dir", str(folder)).code == 0
    assert freed.out == f"removed what interrupted commands left from {folder}, 0.000 MB freed\n"
    assert names(folder) - FOREIGN == {f".{alive}.7.{'0' * 32}.tmp", f".{alive}.lock"}
