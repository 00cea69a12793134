"""Data made once and kept: a file is written whole or not at all, by one process, and checked once in every process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedbench.core.errors import FedbenchError
from fedbench.core.federation import TensorImages
from fedbench.core.files import read_bytes, replacing
from fedbench.core.types import Tensors
from fedbench.datasets.tensor_cache import Content, kept
from fedbench.datasets.tensor_cache import damaged as kept_damaged

_KIND = "data cache"
_ABOUT = "data"
"""The header's entry that says what the tensors are, for people."""
_TYPES = "types"
"""The header's entry for what the digests do not cover."""


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

    ``about`` says in the file's header what they are, for people.
    """

    def content() -> Content:
        tensors = make()
        return tensors, {_ABOUT: about, _TYPES: _types(tensors), **_digests(tensors)}

    tensors, header = kept(file, _KIND, content, _fault)
    return Stored(tensors, {name: header[name] for name in tensors})


def damaged(file: Path, reason: str) -> FedbenchError:
    """The error for a cache file of data that can't be read back."""
    return kept_damaged(file, _KIND, reason)


def write_json(file: Path, facts: Mapping[str, Any]) -> None:
    """Keep small facts in ``file``, with a checksum."""
    text = json.dumps(facts, sort_keys=True)
    with replacing(file, _KIND) as temporary:
        temporary.write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}\n", "utf-8")


def read_json(file: Path) -> dict[str, Any]:
    """What ``write_json`` kept in ``file``. FedbenchError where it is not whole or can't be read."""
    try:
        checksum, _, text = read_bytes(file).partition(b"\n")
    except OSError as error:
        raise damaged(file, str(error.strerror)) from error
    text = text.removesuffix(b"\n")
    if hashlib.sha256(text).hexdigest().encode() != checksum:
        raise damaged(file, "its checksum doesn't fit its content")
    facts: dict[str, Any] = json.loads(text)
    return facts


def _digests(tensors: Tensors) -> dict[str, str]:
    return {name: digest_of(tensor) for name, tensor in tensors.items()}


def _types(tensors: Tensors) -> str:
    return json.dumps({name: str(tensor.dtype) for name, tensor in sorted(tensors.items())})


def _fault(file: Path, content: Content) -> str:
    tensors, header = content
    recorded = {name: digest for name, digest in header.items() if name not in (_ABOUT, _TYPES)}
    if header.get(_TYPES) != _types(tensors):
        return "its types are not those that were written"
    return "" if _digests(tensors) == recorded else "its checksum doesn't fit its content"
