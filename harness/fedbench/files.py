"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from fedbench.errors import FedbenchError

LOCK_MODE = 0o666
"""Of lock files: whoever shares the folder may take the lock of somebody who died."""
_UMASK = os.umask(0o077)
"""Which permissions new files are denied. It can only be read by setting it, so once, and meanwhile to a strict one."""
os.umask(_UMASK)


@contextmanager
def replacing(file: Path, kind: str, remedy: str = "choose another --cache-dir") -> Iterator[Path]:
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
