"""``fedbench cache clear``: no more is removed than was asked for."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedbench.cli.app import main
from fedbench.cli.commands import cache
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


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


def fedbench(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fedbench", "cache", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code if isinstance(ended.value.code, int) else 0


def test_a_file_that_is_deleted_meanwhile_is_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = cache._listed

    def and_delete(where: Path) -> list[Path]:
        found = listed(where)
        for file in where.glob("embedded-*"):
            file.unlink()
        return found

    monkeypatch.setattr(cache, "_listed", and_delete)
    assert [entry.kind for entry in entries(folder)] == ["features"]


def test_clear_leaves_what_is_not_fedbenchs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fedbench(monkeypatch, "clear", "--yes", "--cache-dir", str(folder)) == 0
    assert names(folder) == FOREIGN


@pytest.mark.parametrize(
    ("asked", "stay"),
    [
        (("--kind", "features"), {"embedded-v1-classes10.safetensors"}),
        (("--kind", "data"), {"the features"}),
        (("--older-than", "30"), {"embedded-v1-classes10.safetensors"}),
        (("--older-than", "41"), {"embedded-v1-classes10.safetensors", "the features"}),
        (("--kind", "data", "--older-than", "30"), {"embedded-v1-classes10.safetensors", "the features"}),
    ],
)
def test_clear_removes_by_kind_and_age(
    folder: Path, monkeypatch: pytest.MonkeyPatch, asked: tuple[str, ...], stay: set[str]
) -> None:
    (features,) = (entry.file.name for entry in entries(folder) if entry.kind == "features")
    assert fedbench(monkeypatch, "clear", "--yes", *asked, "--cache-dir", str(folder)) == 0
    assert names(folder) - FOREIGN == {features if name == "the features" else name for name in stay}


def test_clear_says_what_it_freed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEDBENCH_CACHE", str(folder))
    megabytes = sum(entry.size for entry in entries(folder)) / 1e6
    assert fedbench(monkeypatch, "clear", "--yes") == 0
    assert capsys.readouterr().out == f"removed 2 files, {megabytes:.3f} MB freed\n"
    assert fedbench(monkeypatch, "clear") == 0
    assert capsys.readouterr().out == f"nothing to remove in {folder}.\n"


def test_clear_removes_what_dead_writers_left_but_not_what_is_being_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, alive = ("a" * 64 + ".safetensors", "b" * 64 + ".safetensors")
    for name in (dead, alive):
        (folder / f".{name}.7.{'0' * 32}.tmp").write_bytes(b"half")
        (folder / f".{name}.lock").write_bytes(b"")
    holding = (
        "import sys, filelock; lock = filelock.FileLock(sys.argv[1]); lock.acquire(); print(1, flush=True); input()"
    )
    lock = folder / f".{alive}.lock"
    writer = subprocess.Popen([sys.executable, "-c", holding, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert writer.stdout is not None and writer.stdout.readline()
    assert fedbench(monkeypatch, "clear", "--yes", "--cache-dir", str(folder)) == 0
    writer.communicate(b"\n")
    assert names(folder) - FOREIGN == {f".{alive}.7.{'0' * 32}.tmp", f".{alive}.lock"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("clear",), "a pipe can't confirm that files are to be removed; add --yes."),
        (("clear", "--yes", "--kind", "feature"), "unknown kind of cache file 'feature'; did you mean 'features'?"),
        (("clear", "--yes", "--older-than", "nan"), "Invalid value for '--older-than'"),
        (("clear", "--yes", "--older-than", "-1"), "Invalid value for '--older-than'"),
        (("clear", "--yes", "--cache-dir", "{file}"), "notes.txt' is a file, not a folder; choose another folder."),
    ],
)
def test_bad_input_is_told_and_nothing_is_removed(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setenv("FEDBENCH_CACHE", str(folder))
    before = names(folder)
    given = [argument.format(file=folder / "notes.txt") for argument in arguments]
    assert fedbench(monkeypatch, *given) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert names(folder) == before


def test_asked_in_a_terminal_no_removes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fedbench.cli.commands.cache._in_terminal", lambda: True)
    for answer, left in (("n", 2), ("y", 0)):
        monkeypatch.setattr("typer.confirm", lambda question, answer=answer: answer == "y")
        assert fedbench(monkeypatch, "clear", "--cache-dir", str(folder)) == 0
        assert len(entries(folder)) == left
    assert capsys.readouterr().out.splitlines()[0] == "nothing was removed."
