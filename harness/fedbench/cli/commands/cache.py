"""``fedbench cache clear``: remove what was rendered, decoded and encoded once and is kept.

A file counts as fedbench's by its place and name alone, so that one that is damaged can be removed as well.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from fedbench.cli.options import CACHE_DIR, CacheDir, finite
from fedbench.core.errors import FedbenchError
from fedbench.core.files import LOCK_MODE, usable_folder
from fedbench.core.wording import counted
from fedbench.workflow.console import megabytes, say

_PATTERNS = {
    ".": re.compile(r"[0-9a-f]{64}\.safetensors"),
    "datasets": re.compile(r"(embedded-v\d+-[\w-]+|images-[0-9a-f]{32})\.safetensors|scan-[0-9a-f]{32}\.json"),
}
"""Folder of features and of data -> how files of fedbench are called there."""
_BESIDE = re.compile(r"\.(?P<name>.+?\.safetensors)\.(lock|\d+\.[0-9a-f]{32}\.tmp)")
"""What stands beside a file while it is written, and after whoever wrote it was killed."""
_DAY = 86_400

cache = typer.Typer(
    help="Remove rendered data and features.",
    epilog="Example: fedbench cache clear --older-than 30",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@cache.command("clear", epilog="Example: fedbench cache clear --older-than 30")
def clear(
    older_than: Annotated[
        float | None, typer.Option(metavar="DAYS", help="Only what was made longer ago.", min=0, callback=finite)
    ] = None,
    cache_dir: CacheDir = CACHE_DIR,
) -> None:
    """Remove files of the cache folder; runs make again what they need.

    Only fedbench's own files go. Runs under way keep what they read.
    """
    folder = usable_folder(cache_dir, "--cache-dir", to_write=False)
    chosen = [file for file, days in entries(folder) if older_than is None or days > older_than]
    # a run that reads a file goes on, since Linux keeps a mapped file until nobody needs it
    freed = sum(map(_delete, chosen)) + _remove_leftovers(folder)
    what = counted(len(chosen), "file") if chosen else "what interrupted commands left"
    removed = f"removed {what} from {folder}, {megabytes(freed)} MB freed"
    say(removed if freed or chosen else f"nothing to remove in {folder}.")


def entries(cache_dir: Path) -> Iterator[tuple[Path, float]]:
    """Every cache file below ``cache_dir`` with its age in days; none where there is no folder."""
    for file, pattern in _files(cache_dir):
        if pattern.fullmatch(file.name):
            try:
                status = file.stat()
            except FileNotFoundError:
                continue  # deleted meanwhile
            yield file, (time.time() - status.st_mtime) / _DAY


def _remove_leftovers(cache_dir: Path) -> int:
    """Delete unfinished files of processes that died, and locks that nobody holds; the bytes freed."""
    from filelock import FileLock, Timeout

    freed = 0
    for beside, pattern in _files(cache_dir):
        named = _BESIDE.fullmatch(beside.name)
        if named is None or not pattern.fullmatch(named["name"]):
            continue
        try:
            # who writes the file holds its lock
            with FileLock(beside.with_name(f".{named['name']}.lock"), timeout=0, mode=LOCK_MODE) as lock:
                freed += _delete(beside)
                _delete(Path(lock.lock_file))
        except Timeout:
            continue
    return freed


def _files(cache_dir: Path) -> Iterator[tuple[Path, re.Pattern[str]]]:
    """The files of both folders, and how those of fedbench are called there."""
    for below, pattern in _PATTERNS.items():
        folder = cache_dir / below
        try:
            files = sorted(path for path in folder.iterdir() if path.is_file() and not path.is_symlink())
        except FileNotFoundError:
            continue
        except OSError as error:
            raise FedbenchError(f"the cache folder {str(folder)!r} can't be read: {error.strerror}.") from error
        yield from ((file, pattern) for file in files)


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
