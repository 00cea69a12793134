"""Tensors made once and kept: a file is written whole or not at all, and checked whenever it is read."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedbench.errors import FedbenchError
from fedbench.files import replacing
from fedbench.types import TensorImages, Tensors


@dataclass(frozen=True, eq=False)
class HashedImages(TensorImages):
    """Images in memory whose digest was taken when they were loaded, so that nobody reads all pixels again for it."""

    digest: str

    def content_hash(self) -> str:
        """The digest ``TensorImages`` would compute."""
        return self.digest


@dataclass(frozen=True, eq=False)
class Stored:
    """Tensors by name, memory-mapped from their file, and the digest of each."""

    tensors: Tensors
    digests: Mapping[str, str]

    def images(self, name: str) -> HashedImages:
        """The tensor called ``name`` (n, 3, height, width) as images."""
        return HashedImages(self.tensors[name], self.digests[name])


def digest_of(tensor: Tensor) -> str:
    """sha256 over shape and bytes, as in ``TensorImages.content_hash``, without a copy of the bytes."""
    digest = hashlib.sha256(str(tuple(tensor.shape)).encode())
    digest.update(tensor.contiguous().view(torch.uint8).flatten().numpy().data)
    return digest.hexdigest()


def stored(file: Path, make: Callable[[], Tensors]) -> Stored:
    """The tensors in ``file``; where it doesn't exist they are made and written first."""
    if not file.exists():
        tensors = make()
        digests = {name: digest_of(tensor) for name, tensor in tensors.items()}
        with replacing(file, "data cache") as temporary:
            save_file(tensors, temporary, digests)
        return Stored(tensors, digests)
    try:
        with safe_open(file, framework="pt") as opened:
            said: dict[str, str] = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError) as error:
        raise damaged(file, str(error)) from error
    digests = {name: digest_of(tensor) for name, tensor in tensors.items()}
    if digests != said:
        raise damaged(file, "its checksum doesn't fit its content")
    return Stored(tensors, digests)


def damaged(file: Path, reason: str) -> FedbenchError:
    """The error for a cache file that can't be read back."""
    return FedbenchError(
        f"the data cache {str(file)!r} is damaged ({reason}); delete it and run again: rm {shlex.quote(str(file))}"
    )
