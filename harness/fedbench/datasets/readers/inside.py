"""Paths that a list names, which must stay below one folder."""

from __future__ import annotations

import os
import stat
from pathlib import Path, PurePosixPath
from typing import Literal

from fedbench.core.errors import FedbenchError


class Inside:
    """What paths below a folder lead to once links are followed; each folder on the way is looked up once."""

    def __init__(self, root: Path) -> None:
        self._root = os.fspath(root)
        self._real = os.path.realpath(root)
        self._folders: dict[str, bool] = {}

    def require(self, path: str, where: str) -> str:
        """``path``, relative to the root, in its plain form. FedbenchError, which begins with ``where``, unless it is a
        file below the root.
        """
        if path.startswith("/") or ".." in path.split("/"):
            raise FedbenchError(f"{where}: {path!r} leads out of the image folder; write relative paths.")
        kind = self.kind(path)
        if kind == "outside":
            raise FedbenchError(
                f"{where}: a link on the path {path!r} leads out of the image folder {self._root!r}; name a folder "
                "that holds all images with ?root=DIR."
            )
        if kind == "missing":
            raise FedbenchError(
                f"{where}: there is no file {str(Path(self._root) / path)!r}; complete the data, or name the folder "
                "that the paths start from with ?root=DIR."
            )
        return str(PurePosixPath(path)) if "//" in path or "./" in path else path

    def kind(self, path: str) -> Literal["file", "outside", "missing"]:
        """Of ``path``, relative to the root. One look at the file where it is no link: lists have 100,000 lines."""
        folder = path.rpartition("/")[0]
        if folder not in self._folders:
            self._folders[folder] = self._is_inside(f"{self._root}/{folder}")
        if not self._folders[folder]:
            return "outside"
        file = f"{self._root}/{path}"
        try:
            mode = os.lstat(file).st_mode
        except OSError:
            return "missing"
        if stat.S_ISLNK(mode) and not self._is_inside(file):
            return "outside"
        return "file" if stat.S_ISREG(mode) or os.path.isfile(file) else "missing"

    def _is_inside(self, path: str) -> bool:
        return Path(os.path.realpath(path)).is_relative_to(self._real)
