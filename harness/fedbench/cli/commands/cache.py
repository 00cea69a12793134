"""``fedbench cache clear``: remove what was rendered, decoded and encoded once and is kept.

A file counts as fedbench's by its place and name alone, so that one that is damaged can be removed as well.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fedbench.cli.console import megabytes, say
from fedbench.cli.options import CACHE_DIR, CacheDir, finite
from fedbench.core.errors import FedbenchError, unknown_name
from fedbench.core.files import LOCK_MODE, usable_folder
from fedbench.core.wording import counted

_PATTERNS = {
    "features": re.compile(r"[0-9a-f]{64}\.safetensors"),
    "data": re.compile(r"(embedded-v\d+-[\w-]+|images-[0-9a-f]{32})\.safetensors|scan-[0-9a-f]{32}\.json"),
}
"""Kind of cache file -> how such files are called."""
_BESIDE = re.compile(r"\.(?P<name>.+?\.safetensors)\.(lock|\d+\.[0-9a-f]{32}\.tmp)")
"""What stands beside a file while it is written, and after whoever wrote it was killed."""
_DAY = 86_400

cache = typer.Typer(
    help="Remove rendered data and features.",
    epilog="Example: fedbench cache clear --older-than 30",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@cache.callback()
def _group() -> None:
    """A callback makes typer keep ``clear`` as a verb, though it is the only one."""


@cache.command("clear", epilog="Example: fedbench cache clear --kind features --older-than 30")
def clear(
    kind: Annotated[str | None, typer.Option("--kind", metavar="KIND", help=f"Only {' or '.join(_PATTERNS)}.")] = None,
    older_than: Annotated[
        float | None, typer.Option(metavar="DAYS", help="Only what was made longer ago.", min=0, callback=finite)
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
    cache_dir: CacheDir = CACHE_DIR,
) -> None:
    """Remove files of the cache folder; runs make again what they need.

    Only fedbench's own files go. Runs under way keep what they read.
    """
    if kind is not None and kind not in _PATTERNS:
        raise unknown_name("kind of cache file", kind, _PATTERNS, "Example: fedbench cache clear --kind features.")
    folder = usable_folder(cache_dir, "--cache-dir", to_write=False)
    chosen = [
        entry
        for entry in entries(folder)
        if kind in (None, entry.kind) and (older_than is None or entry.days > older_than)
    ]
    if not chosen:
        _remove_leftovers(folder)
        say(f"nothing to remove in {folder}.")
        return
    size = f"{counted(len(chosen), 'file')}, {megabytes(sum(entry.size for entry in chosen))} MB"
    if not yes and not _agreed(f"Remove {size} from {folder}?"):
        say("nothing was removed.")
        return
    # a run that reads a file goes on, since Linux keeps a mapped file until nobody needs it
    freed = sum(_delete(entry.file) for entry in chosen) + _remove_leftovers(folder)
    say(f"removed {counted(len(chosen), 'file')}, {megabytes(freed)} MB freed")


@dataclass(frozen=True)
class CacheEntry:
    """A file of the cache."""

    file: Path
    kind: str
    size: int
    """Bytes."""
    days: float
    """Its age."""


def entries(cache_dir: Path) -> list[CacheEntry]:
    """Every cache file below ``cache_dir``; none where there is no folder."""
    found = []
    for folder, kind in _folders(cache_dir):
        for file in _listed(folder):
            try:
                status = file.stat()
            except FileNotFoundError:
                continue  # deleted meanwhile
            if _PATTERNS[kind].fullmatch(file.name):
                found.append(CacheEntry(file, kind, status.st_size, (time.time() - status.st_mtime) / _DAY))
    return found


def _remove_leftovers(cache_dir: Path) -> int:
    """Delete unfinished files of processes that died, and locks that nobody holds; the bytes freed."""
    from filelock import FileLock, Timeout

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


def _folders(cache_dir: Path) -> Iterator[tuple[Path, str]]:
    yield cache_dir, "features"
    yield cache_dir / "datasets", "data"


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_file() and not path.is_symlink())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise FedbenchError(f"the cache folder {str(folder)!r} can't be read: {error.strerror}.") from error


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


def _agreed(question: str) -> bool:
    if not _in_terminal():
        raise FedbenchError("a pipe can't confirm that files are to be removed; add --yes.")
    return typer.confirm(question)


def _in_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()
