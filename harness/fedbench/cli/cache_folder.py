"""The cache folder as it lies on disk: which of its files are fedbench's, what they hold, and removing them.

A file counts as fedbench's by its place and name alone, so that one that is damaged can be removed as well. Nothing
here imports torch.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open

from fedbench.core.errors import FedbenchError
from fedbench.core.files import LOCK_MODE

Kind = Literal["features", "data"]
UNKNOWN = "unknown"
"""What a file is of, where an earlier version wrote it or its header can't be read."""

_BESIDE = re.compile(r"\.(?P<name>.+?\.safetensors)\.(lock|\d+\.[0-9a-f]{32}\.tmp)")
"""What stands beside a file while it is written, and after whoever wrote it was killed."""
_PATTERNS: dict[Kind, re.Pattern[str]] = {
    "features": re.compile(r"[0-9a-f]{64}\.safetensors"),
    "data": re.compile(r"(embedded-v\d+-[\w-]+|images-[0-9a-f]{32})\.safetensors|scan-[0-9a-f]{32}\.json"),
}
_MAIN_TENSORS = ("features", "images", "train.images", "test.images")
_DAY = 86_400


@dataclass(frozen=True)
class CacheEntry:
    """A file of the cache."""

    file: Path
    kind: Kind
    size: int
    """Bytes."""
    changed: float
    """When it was written, seconds since the epoch."""
    data: str = UNKNOWN
    """The data set it was made of."""
    encoder: str = ""
    """What made the features."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Of its features or images; the first axis counts them."""

    @property
    def days(self) -> float:
        """Age in days."""
        return (time.time() - self.changed) / _DAY


def entries(cache_dir: Path) -> list[CacheEntry]:
    """Every cache file below ``cache_dir``, features before data, the newest first; none where there is no folder."""
    found = [_entry(file, kind) for folder, kind in _folders(cache_dir) for file in _files(folder, kind)]
    return sorted(filter(None, found), key=lambda entry: (entry.kind != "features", -entry.changed))


def remove(chosen: Iterable[CacheEntry]) -> int:
    """Delete the files and what stands beside them; the bytes freed. FedbenchError where one can't be deleted.

    A run that reads one goes on, since Linux keeps a mapped file until nobody needs it.
    """
    return sum(_delete(entry.file) for entry in chosen)


def remove_leftovers(cache_dir: Path) -> int:
    """Delete unfinished files of processes that died, and locks that nobody holds; the bytes freed."""
    freed = 0
    for folder, kind in _folders(cache_dir):
        for beside in _listed(folder):
            named = _BESIDE.fullmatch(beside.name)
            if named is None or not _PATTERNS[kind].fullmatch(named["name"]):
                continue
            try:
                # who writes the file holds its lock
                with FileLock(folder / f".{named['name']}.lock", timeout=0, mode=LOCK_MODE) as lock:
                    freed += _delete(beside)
                    _delete(Path(lock.lock_file))
            except Timeout:
                continue
    return freed


def _folders(cache_dir: Path) -> tuple[tuple[Path, Kind], ...]:
    return (cache_dir, "features"), (cache_dir / "datasets", "data")


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_file() and not path.is_symlink())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise FedbenchError(f"the cache folder {str(folder)!r} can't be read: {error.strerror}.") from error


def _files(folder: Path, kind: Kind) -> Iterator[Path]:
    return (path for path in _listed(folder) if _PATTERNS[kind].fullmatch(path.name))


def _entry(file: Path, kind: Kind) -> CacheEntry | None:
    """None where the file was deleted meanwhile."""
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    made = CacheEntry(file, kind, status.st_size, status.st_mtime)
    if file.suffix == ".json":
        return replace(made, data="checksum of image files")
    try:
        with safe_open(file, framework="numpy") as opened:
            header = opened.metadata() or {}
            names = [name for name in _MAIN_TENSORS if name in set(opened.keys())]
            shapes = tuple(tuple(opened.get_slice(name).get_shape()) for name in names)
    except (OSError, SafetensorError):
        return made
    return replace(made, data=header.get("data") or UNKNOWN, encoder=header.get("encoder", ""), shapes=shapes)


def _delete(file: Path) -> int:
    """The bytes freed; zero where somebody else was faster."""
    try:
        size = file.stat().st_size
        file.unlink()
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise FedbenchError(f"the cache file {str(file)!r} can't be deleted: {error.strerror}.") from error
    return size
