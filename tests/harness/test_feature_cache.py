"""The feature cache: each image encoded once, files that are whole or not there, damage said by name."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedbench.errors import FedbenchError
from fedbench.models.feature_cache import encode
from fedbench.types import Subset, TensorImages


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


def test_second_call_reads_the_file(images: TensorImages, tmp_path: Path) -> None:
    encoder = MeanEncoder()
    first = encode(images, encoder, tmp_path, batch_size=4)
    assert encoder.seen == [4, 4, 2]
    again = encode(images, encoder, tmp_path)
    assert encoder.seen == [4, 4, 2]
    assert torch.equal(first, again) and torch.equal(first, images.pixels.float().mean(dim=(2, 3)))
    assert again.dtype == torch.float32


def test_other_images_or_another_encoder_make_another_file(images: TensorImages, tmp_path: Path) -> None:
    encode(images, MeanEncoder("one"), tmp_path)
    encode(images, MeanEncoder("two"), tmp_path)
    encode(TensorImages(images.pixels + 1), MeanEncoder("one"), tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def test_subsets_share_the_file_of_their_source(images: TensorImages, tmp_path: Path) -> None:
    encoder = MeanEncoder()
    subset = Subset(images, torch.tensor([7, 2, 2]))
    nested = Subset(subset, torch.tensor([1, 0]))
    expected = images.pixels.float().mean(dim=(2, 3))
    assert torch.equal(encode(subset, encoder, tmp_path), expected[[7, 2, 2]])
    assert torch.equal(encode(nested, encoder, tmp_path), expected[[2, 7]])
    assert sum(encoder.seen) == 10 and len(list(tmp_path.iterdir())) == 1


def test_without_a_folder_only_the_subset_is_encoded(images: TensorImages) -> None:
    encoder = MeanEncoder()
    encode(Subset(images, torch.tensor([3])), encoder, None)
    assert encoder.seen == [1]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "renamed"])
def test_damage_is_said_with_the_file_to_delete(images: TensorImages, tmp_path: Path, damage: str) -> None:
    encode(images, MeanEncoder(), tmp_path)
    (file,) = tmp_path.iterdir()
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
        content = bytearray(next(path for path in tmp_path.iterdir() if path != file).read_bytes())
    file.write_bytes(content)
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


def test_writers_at_the_same_time_leave_one_whole_file(images: TensorImages, tmp_path: Path) -> None:
    barrier = threading.Barrier(2)

    class Meeting(MeanEncoder):
        def __call__(self, pixels: Tensor) -> Tensor:
            barrier.wait(timeout=20)  # both are past the look for the file
            return super().__call__(pixels)

    threads = [threading.Thread(target=encode, args=(images, Meeting(), tmp_path)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(tmp_path.iterdir())) == 1
    assert torch.equal(encode(images, MeanEncoder(), tmp_path), images.pixels.float().mean(dim=(2, 3)))


def test_no_images_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FedbenchError, match="no images to encode"):
        encode(TensorImages(torch.zeros(0, 3, 4, 4, dtype=torch.uint8)), MeanEncoder(), tmp_path)
