"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from fedbench.errors import FedbenchError


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
            os.replace(temporary, file)
        finally:
            temporary.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        raise FedbenchError(f"can't write the {kind} {str(file)!r}: {error}; free space or {remedy}.") from error
