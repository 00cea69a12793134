"""Data made once and kept in a file: written whole or not at all, by one process, and checked once in every process."""

from __future__ import annotations

import glob
import hashlib
import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedbench.core.errors import FedbenchError
from fedbench.core.federation import TensorImages
from fedbench.core.files import LOCK_MODE, read_bytes, regular, replacing
from fedbench.core.types import Tensors

Content = tuple[Tensors, Mapping[str, str]]
"""Tensors by name, and what the file's header says of them."""

_FILES_AT_HAND = 32
"""Files that a process keeps mapped. A mapping is an address range; its pages are the system's to drop."""
_KIND = "data cache"
_ABOUT = "data"
"""The header's entry that says what the tensors are, for people."""
_TYPES = "types"
"""The header's entry for what the digests do not cover."""


def kept(file: Path, kind: str, make: Callable[[], Content], fault: Callable[[Path, Content], str]) -> Content:
    """The content of ``file``, memory-mapped; where it doesn't exist, it is made and written first.

    Of several processes that miss the file at once, one makes it and the others wait for it; when that one dies, the
    next makes it. ``fault`` says what is wrong with a content, "" for nothing; a module's function, since a file that
    it found whole is not read again in this process as long as its time of change, size and inode stay. ``kind``
    ("data cache") is what messages call the file. Raises FedbenchError for a file that is damaged, or can't be read or
    written.
    """
    if not _exists(file, kind):
        with _alone(file, kind):
            # who waited for the lock finds what another process has made
            if not _exists(file, kind):
                tensors, header = make()
                with replacing(file, kind) as temporary:
                    save_file(tensors, temporary, dict(header))
    try:
        status = regular(file)
        return _whole(file, (status.st_mtime_ns, status.st_size, status.st_ino), fault)
    except OSError as error:
        raise _unreadable(file, kind, error) from error
    except SafetensorError as error:
        raise damaged(file, kind, str(error)) from error
    except _Fault as fault_of_content:
        raise damaged(file, kind, str(fault_of_content)) from None


def forget() -> None:
    """Let this process read files anew: tensors that somebody changed in place are as they were written."""
    _whole.cache_clear()


def damaged(file: Path, kind: str, reason: str) -> FedbenchError:
    """The error for a cache file that can't be read back."""
    return FedbenchError(
        f"the {kind} {str(file)!r} is damaged ({reason}); delete it and run again: rm {shlex.quote(str(file))}"
    )


def _exists(file: Path, kind: str) -> bool:
    try:
        return file.exists()
    except OSError as error:
        raise _unreadable(file, kind, error) from error


def _unreadable(file: Path, kind: str, error: OSError) -> FedbenchError:
    return FedbenchError(
        f"the {kind} {file.name!r} in the folder {str(file.parent)!r} can't be read: {error.strerror or error}; "
        "make it readable or choose another --cache-dir (FEDBENCH_CACHE)."
    )


class _Fault(Exception):
    """What is wrong with a file's content."""


@lru_cache(maxsize=_FILES_AT_HAND)
def _whole(file: Path, stamp: tuple[int, int, int], fault: Callable[[Path, Content], str]) -> Content:
    with safe_open(file, framework="pt") as opened:
        # a private mapping: only pages that are read take memory, and it outlives the file's name
        tensors: Tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
        content = tensors, opened.metadata() or {}
    reason = fault(file, content)
    if reason:
        raise _Fault(reason)
    return content


@contextmanager
def _alone(file: Path, kind: str) -> Iterator[None]:
    """Only one process at a time is in the block of the same ``file``; the system frees the lock of one that dies."""
    lock = FileLock(file.with_name(f".{file.name}.lock"), mode=LOCK_MODE)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise FedbenchError(
            f"can't write the {kind} {str(file)!r}: {error}; free space or choose another --cache-dir (FEDBENCH_CACHE)."
        ) from error
    try:
        # nobody else writes this file now: these are of processes that died while writing it
        for leftover in file.parent.glob(f".{glob.escape(file.name)}.*.tmp"):
            leftover.unlink(missing_ok=True)
        yield
    finally:
        # at worst somebody who waits makes another lock and finds the file, or makes it a second time
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


@dataclass(frozen=True, eq=False)
class HashedImages(TensorImages):
    """Images in memory whose digest was taken when they were loaded, so that nobody reads all pixels again for it."""

    digest: str

    def content_hash(self) -> str:
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
        raise damaged(file, _KIND, str(error.strerror)) from error
    text = text.removesuffix(b"\n")
    if hashlib.sha256(text).hexdigest().encode() != checksum:
        raise damaged(file, _KIND, "its checksum doesn't fit its content")
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
