"""The feature cache: each image encoded once, files that are whole or not there, damage said by name."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedbench.core.errors import FedbenchError
from fedbench.core.federation import Subset, TensorImages
from fedbench.datasets import cache as kept
from fedbench.models.inputs import encode
from fedbench.testing import tiny_backbone


@dataclass
class MeanEncoder:
    """Mean by channel; counts the images it has seen."""

    key: str = "mean"
    seen: list[int] = field(default_factory=list)

    def __call__(self, pixels: Tensor) -> Tensor:
        """uint8 (b, 3, h, w) to (b, 3)."""
        self.seen.append(len(pixels))
        return pixels.float().mean(dim=(2, 3))


@pytest.fixture
def images() -> TensorImages:
    return TensorImages(torch.randint(0, 256, (10, 3, 4, 4), generator=torch.Generator().manual_seed(0)).byte())


def files(folder: Path) -> list[Path]:
    return list(folder.glob("*.safetensors"))


def as_new_process() -> None:
    """Forget which files this process has checked."""
    kept.forget()


def test_second_call_reads_the_file(images: TensorImages, tmp_path: Path) -> None:
    encoder = MeanEncoder()
    first = encode(images, encoder, tmp_path, batch_size=4)
    assert encoder.seen == [4, 4, 2]
    again = encode(images, encoder, tmp_path)
    assert encoder.seen == [4, 4, 2]
    assert torch.equal(first, again) and torch.equal(first, images.pixels.float().mean(dim=(2, 3)))
    assert again.dtype == torch.float32


@pytest.mark.parametrize(
    ("given", "kept"),
    [(torch.float16, torch.float16), (torch.bfloat16, torch.float32), (torch.float64, torch.float32)],
)
def test_an_encoders_halves_stay_halves_and_all_else_is_float32(
    images: TensorImages, tmp_path: Path, given: torch.dtype, kept: torch.dtype
) -> None:
    class Other(MeanEncoder):
        def __call__(self, pixels: Tensor) -> Tensor:
            return super().__call__(pixels).to(given)

    wanted = images.pixels.float().mean(dim=(2, 3)).to(given).to(kept)
    for folder in (None, tmp_path, tmp_path):
        found = encode(images, Other(), folder, batch_size=4)
        assert found.dtype == kept and torch.equal(found, wanted)


def test_features_of_another_kind_are_damage(images: TensorImages, tmp_path: Path) -> None:
    encode(images, MeanEncoder(), tmp_path)
    (file,) = files(tmp_path)
    save_file({"features": torch.zeros(10, 3, dtype=torch.float64)}, file, {"key": file.stem})
    with pytest.raises(FedbenchError, match="it holds no float32 or float16 features"):
        encode(images, MeanEncoder(), tmp_path)


def test_other_images_or_another_encoder_make_another_file(images: TensorImages, tmp_path: Path) -> None:
    encode(images, MeanEncoder("one"), tmp_path)
    encode(images, MeanEncoder("two"), tmp_path)
    encode(TensorImages(images.pixels + 1), MeanEncoder("one"), tmp_path)
    assert len(files(tmp_path)) == 3


def test_subsets_share_the_file_of_their_source(images: TensorImages, tmp_path: Path) -> None:
    encoder = MeanEncoder()
    subset = Subset(images, torch.tensor([7, 2, 2]))
    nested = Subset(subset, torch.tensor([1, 0]))
    expected = images.pixels.float().mean(dim=(2, 3))
    assert torch.equal(encode(subset, encoder, tmp_path), expected[[7, 2, 2]])
    assert torch.equal(encode(nested, encoder, tmp_path), expected[[2, 7]])
    assert sum(encoder.seen) == 10 and len(files(tmp_path)) == 1


def test_without_a_folder_only_the_subset_is_encoded(images: TensorImages) -> None:
    encoder = MeanEncoder()
    encode(Subset(images, torch.tensor([3])), encoder, None)
    assert encoder.seen == [1]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "renamed"])
def test_damage_is_said_with_the_file_to_delete(images: TensorImages, tmp_path: Path, damage: str) -> None:
    encode(images, MeanEncoder(), tmp_path)
    (file,) = files(tmp_path)
    content = bytearray(file.read_bytes())
    if damage == "truncated":
        content = content[:-5]
    elif damage == "flipped":
        content[-1] ^= 1
    elif damage == "empty":
        content = bytearray()
    else:
        other = TensorImages(255 - images.pixels)
        encode(other, MeanEncoder(), tmp_path)
        content = bytearray(next(path for path in files(tmp_path) if path != file).read_bytes())
    file.write_bytes(content)
    as_new_process()
    with pytest.raises(FedbenchError) as error:
        encode(images, MeanEncoder(), tmp_path)
    assert file.name in str(error.value) and "delete it and run again" in str(error.value)


def test_interrupted_write_leaves_nothing(
    images: TensorImages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: object, target: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(FedbenchError, match="can't write the feature cache .*disk full"):
        encode(images, MeanEncoder(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_threads_that_need_the_same_features_encode_once(images: TensorImages, tmp_path: Path) -> None:
    encoder, found = MeanEncoder(), list[Tensor]()

    class Slow(MeanEncoder):
        def __call__(self, pixels: Tensor) -> Tensor:
            second.start()
            return encoder(pixels)

    second = threading.Thread(target=lambda: found.append(encode(images, encoder, tmp_path)))
    first = encode(images, Slow(), tmp_path)
    second.join(timeout=20)
    assert encoder.seen == [10] and torch.equal(first, found[0])


WORKER = """
import json, os, sys
from pathlib import Path
import torch
from fedbench.models.inputs import encode
from fedbench.testing import tiny_backbone
from fedbench.core.federation import TensorImages

folder = Path(sys.argv[1])

class Counted:
    key = "counted"
    def __call__(self, pixels):
        with open(folder / "passes", "a") as passes:
            passes.write(f"{os.getpid()}\\n")
        print("encoding", flush=True)
        sys.stdin.readline()
        return pixels.float().mean(dim=(2, 3))

print("ready", flush=True)
sys.stdin.readline()
features = encode(TensorImages(torch.arange(48, dtype=torch.uint8).reshape(4, 3, 2, 2)), Counted(), folder / "cache")
print(json.dumps(features.tolist()), flush=True)
"""


def start(folder: Path) -> subprocess.Popen[str]:
    """A process that encodes into ``folder`` on the first line it gets, and ends the encoder's pass on the second."""
    command = [sys.executable, "-c", WORKER, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert heard(process) == "ready"
    return process


def heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str], lines: int = 1) -> None:
    assert process.stdin is not None
    process.stdin.write("\n" * lines)
    process.stdin.flush()


# pixels 0 .. 47 in images of three channels of four: the channels' means are 1.5, 5.5, ...
MEANS = [[1.5, 5.5, 9.5], [13.5, 17.5, 21.5], [25.5, 29.5, 33.5], [37.5, 41.5, 45.5]]


def test_of_two_processes_one_encodes_and_the_other_waits_for_it(tmp_path: Path) -> None:
    first, second = start(tmp_path), start(tmp_path)
    tell(first)
    assert heard(first) == "encoding"
    # it would end a pass of its own at once
    tell(second, lines=2)
    tell(first)
    assert json.loads(heard(first)) == json.loads(heard(second)) == MEANS
    assert first.wait() == second.wait() == 0
    assert (tmp_path / "passes").read_text().split() == [str(first.pid)]


@pytest.mark.slow
def test_a_process_killed_while_it_encodes_blocks_nobody(tmp_path: Path) -> None:
    first, second = start(tmp_path), start(tmp_path)
    tell(first)
    assert heard(first) == "encoding"
    tell(second, lines=2)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert heard(second) == "encoding"
    assert json.loads(heard(second)) == MEANS
    second.wait()
    assert (tmp_path / "passes").read_text().split() == [str(first.pid), str(second.pid)]
    assert len(files(tmp_path / "cache")) == 1


def test_what_a_killed_writer_left_goes_with_the_next_pass(images: TensorImages, tmp_path: Path) -> None:
    encode(images, MeanEncoder(), tmp_path)
    (file,) = files(tmp_path)
    file.unlink()
    mine, other = (tmp_path / f".{name}.1.{'0' * 32}.tmp" for name in (file.name, "x" + file.name))
    mine.write_bytes(b"half")
    other.write_bytes(b"of another file")
    encode(images, MeanEncoder(), tmp_path)
    assert not mine.exists() and other.exists()


def test_the_runs_of_a_process_share_one_mapped_tensor(images: TensorImages, tmp_path: Path) -> None:
    first, second = encode(images, MeanEncoder(), tmp_path), encode(images, MeanEncoder(), tmp_path)
    assert first.data_ptr() == second.data_ptr()
    (file,) = files(tmp_path)
    if Path("/proc/self/maps").exists():
        assert file.name in Path("/proc/self/maps").read_text()
    file.unlink()
    # the mapping outlives the name
    assert torch.equal(first, images.pixels.float().mean(dim=(2, 3)))


def test_a_file_that_was_written_anew_is_checked_again(images: TensorImages, tmp_path: Path) -> None:
    encode(images, MeanEncoder(), tmp_path)
    (file,) = files(tmp_path)
    with safe_open(file, framework="pt") as opened:
        header = opened.metadata()
    save_file({"features": load_file(file)["features"] + 1}, file, header)
    os.utime(file, (0, 0))
    with pytest.raises(FedbenchError, match="its checksum or its name doesn't fit its content"):
        encode(images, MeanEncoder(), tmp_path)


def test_no_images_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FedbenchError, match="no images to encode"):
        encode(TensorImages(torch.zeros(0, 3, 4, 4, dtype=torch.uint8)), MeanEncoder(), tmp_path)


def test_a_file_that_may_not_be_read_is_not_called_damaged(
    images: TensorImages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode(images, MeanEncoder(), tmp_path)
    as_new_process()

    def refuse(path: Path, **_: bool) -> os.stat_result:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refuse)  # tests may run as root, whom no permission stops
    with pytest.raises(FedbenchError, match="can't be read: Permission denied; .*choose another --cache-dir") as error:
        encode(images, MeanEncoder(), tmp_path)
    assert repr(str(tmp_path)) in str(error.value) and "damaged" not in str(error.value)


def test_others_may_read_a_file_as_the_umask_says(images: TensorImages, tmp_path: Path) -> None:
    encode(images, MeanEncoder(), tmp_path)
    (file,) = files(tmp_path)
    (tmp_path / "new").touch()
    assert file.stat().st_mode == (tmp_path / "new").stat().st_mode


def test_batches_encoded_side_by_side_are_those_of_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    images = TensorImages(torch.randint(0, 256, (100, 3, 32, 32), dtype=torch.uint8))
    encoder = tiny_backbone("clip:embedded").image_encoder()
    at_once = encode(images, encoder, None, batch_size=7)
    monkeypatch.setattr("fedbench.models.inputs.SIDE_BY_SIDE", 1)
    assert torch.equal(encode(images, encoder, None, batch_size=7), at_once)
