"""Folders that users name: refused before any work is put into them."""

from __future__ import annotations

import os
from pathlib import Path

from fedbench.core.errors import FedbenchError


def expanded(given: str | Path, option: str) -> Path:
    """``given`` with the home that ``~`` stands for; FedbenchError where there is no such user."""
    try:
        return Path(given).expanduser()
    except RuntimeError:
        raise FedbenchError(f"{option} {str(given)!r}: there is no such user; write the folder in full.") from None


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
