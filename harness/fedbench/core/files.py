"""Files that are written whole or not at all, and read only where they are files."""

from __future__ import annotations

import errno
import gzip
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from fedbench.core.errors import FedbenchError

if TYPE_CHECKING:
    import pandas as pd

LARGEST = 2**30
"""Bytes of a file that is read whole; one that is larger is a mistake, and could fill memory."""
LOCK_MODE = 0o666
"""Permissions of lock files: whoever shares the folder may take over the lock of a process that died."""
_UMASK = os.umask(0o077)
"""The process's umask. It can only be read by setting it, so this happens once, with a strict value in between."""
os.umask(_UMASK)


@contextmanager
def replacing(file: Path, kind: str, remedy: str = "choose another --cache-dir (FEDBENCH_CACHE)") -> Iterator[Path]:
    """A temporary path that takes the place of ``file`` in one step when the block ends well, and is gone otherwise.

    ``kind`` is what the file is ("data cache"), ``remedy`` what a user can do besides freeing space where it can't be
    written, which raises FedbenchError.
    """
    # Two processes may write the same file: each its own temporary one, and the last rename wins with equal content.
    temporary = file.with_name(f".{file.name}.{os.getpid()}.{uuid.uuid4().hex}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            # some libraries write files that only their owner can read, but a cache folder may be shared
            temporary.chmod(0o666 & ~_UMASK)
            os.replace(temporary, file)
        finally:
            temporary.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        raise FedbenchError(f"can't write the {kind} {str(file)!r}: {error}; free space or {remedy}.") from error


def name_once(unfinished: Path, file: Path) -> None:
    """Give a whole file its name, unless another process was faster: then that one's stays."""
    try:
        os.link(unfinished, file)
    except FileExistsError:
        pass
    except OSError:  # a file system without links
        if not file.exists():
            os.replace(unfinished, file)


class NotRegular(OSError):
    """A path leads to a folder, FIFO, socket or device, or to a file too large to be read whole."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EINVAL, reason)

    def __str__(self) -> str:
        return str(self.strerror)


def regular(file: Path | str | int) -> os.stat_result:
    """The status of a regular file, by its path (links are followed) or descriptor.

    Raises OSError where there is none, NotRegular for anything else: reading that may never end.
    """
    status = os.stat(file)
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    if not stat.S_ISREG(status.st_mode):
        raise NotRegular(f"it is {kinds.get(stat.S_IFMT(status.st_mode), 'a device')}, not a regular file")
    return status


def opened(file: Path | str) -> BufferedReader:
    """Open a regular file for reading. Anything else raises, as in ``regular``, before it is opened."""
    regular(file)  # opening alone can do something to a device
    return open(file, "rb", opener=_regular_opener)


def read_bytes(file: Path | str) -> bytes:
    """The bytes of a regular file of at most ``LARGEST`` bytes. Anything else raises, as in ``regular``."""
    with opened(file) as whole:
        size = os.fstat(whole.fileno()).st_size
        if size > LARGEST:
            raise NotRegular(f"it has {size:,} bytes, more than the {LARGEST:,} that are read")
        return whole.read(LARGEST)


def _regular_opener(file: str, flags: int) -> int:
    # whatever took the file's place since it was looked at does not block here
    descriptor = os.open(file, flags | os.O_NONBLOCK)
    try:
        regular(descriptor)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def expanded(given: str | Path, option: str) -> Path:
    """``given`` with the home that ``~`` stands for; FedbenchError where there is no such user."""
    try:
        return Path(given).expanduser()
    except RuntimeError:
        raise FedbenchError(f"{option} {str(given)!r}: there is no such user; write the folder in full.") from None


def looked_up(given: str | Path, what: str) -> Path:
    """``given`` with the home that ``~`` stands for, which need not exist.

    FedbenchError, which begins with ``what``, where there is no such user, or the file system takes no such name.
    """
    try:
        path = Path(given).expanduser()
        with suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
    except (RuntimeError, OSError, ValueError) as error:
        reason = "there is no such user" if isinstance(error, RuntimeError) else getattr(error, "strerror", error)
        raise FedbenchError(f"{what} {str(given)[:200]!r} cannot be looked up: {reason}; check the path.") from None
    return path


def usable_folder(given: str | Path, option: str, *, to_write: bool = True) -> Path:
    """``given`` as an absolute path to a folder, which need not exist yet.

    FedbenchError for a file, for names that the file system does not take and, unless ``to_write`` is off, for a place
    where nothing can be written.
    """
    folder = expanded(given, option)
    try:
        folder = folder.absolute()
        nearest = next(place for place in (folder, *folder.parents) if place.exists())
        longest = os.pathconf(nearest, "PC_NAME_MAX")
        too_long = any(len(os.fsencode(part)) > longest for part in folder.parts)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise FedbenchError(f"{option} {str(given)[:200]!r}: {reason}; choose another folder.") from None
    if too_long:
        raise FedbenchError(
            f"{option} {str(given)[:200]!r}: a name is longer than {longest} bytes; choose another folder."
        )
    if not nearest.is_dir():
        raise FedbenchError(
            f"{option} {str(given)!r}: {str(nearest)!r} is a file, not a folder; choose another folder."
        )
    if to_write and not os.access(nearest, os.W_OK | os.X_OK):
        raise FedbenchError(f"{option} {str(given)!r}: {str(nearest)!r} is not writable; choose another folder.")
    return folder


_FORMULA = ("=", "+", "-", "@", "\t", "\n", "＝", "＋", "－", "＠")
"""First characters that make a spreadsheet read a cell as a formula, and the whitespace that it skips before one."""


def file_bytes(name: str, text: str) -> bytes:
    """``text`` as the content of the file ``name``, compressed if that ends in .gz; equal texts, equal bytes."""
    return gzip.compress(text.encode(), mtime=0) if name.endswith(".gz") else text.encode()


def csv_text(frame: pd.DataFrame) -> str:
    """``frame`` as CSV without its index; texts that a spreadsheet would calculate get an apostrophe in front."""
    texts = frame.select_dtypes(["object", "string"])
    readable = frame.assign(**{str(name): texts[name].map(_readable) for name in texts})
    return readable.rename(columns=_readable).to_csv(index=False)


def _readable(value: object) -> object:
    if not isinstance(value, str):
        return value
    # pandas puts no quotes around a carriage return, and many readers begin a line there
    text = value.replace("\r\n", "\n").replace("\r", "\n")
    return f"'{text}" if text.startswith(_FORMULA) and not _is_number(text) else text


def spreadsheet_text(text: str) -> str:
    """Undo `csv_text`: the text without the apostrophe that may have been put in front."""
    rest = text[1:]
    return rest if text[:1] == "'" and rest.startswith(_FORMULA) and not _is_number(rest) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
