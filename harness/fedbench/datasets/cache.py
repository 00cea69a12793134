"""Data made once and kept: a file is written whole or not at all, by one process, and checked once in every process."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedbench.errors import FedbenchError
from fedbench.kept import Content, kept
from fedbench.kept import damaged as kept_damaged
from fedbench.types import TensorImages, Tensors

_KIND = "data cache"
_ABOUT = "data"
"""The header's entry that is no digest: what the tensors are, for people."""


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


def stored(file: Path, make: Callable[[], Tensors], about: str) -> Stored:
    """The tensors in ``file``; where it doesn't exist, one process makes and writes them while others wait.

    ``about`` is what ``fedbench cache list`` says they are.
    """

    def content() -> Content:
        tensors = make()
        return tensors, {_ABOUT: about, **_digests(tensors)}

    tensors, header = kept(file, _KIND, content, _fault)
    return Stored(tensors, {name: header[name] for name in tensors})


def damaged(file: Path, reason: str) -> FedbenchError:
    """The error for a cache file of data that can't be read back."""
    return kept_damaged(file, _KIND, reason)


def _digests(tensors: Tensors) -> dict[str, str]:
    return {name: digest_of(tensor) for name, tensor in tensors.items()}


def _fault(file: Path, content: Content) -> str:
    tensors, header = content
    said = {name: digest for name, digest in header.items() if name != _ABOUT}
    return "" if _digests(tensors) == said else "its checksum doesn't fit its content"
