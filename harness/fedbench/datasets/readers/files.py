"""Files below one root, in a folder or in a .tar: listed in sorted order, held inside it, and read by name."""

from __future__ import annotations

import hashlib
import os
import stat
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from fedbench.core.errors import FedbenchError
from fedbench.core.files import opened, read_bytes, regular

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")


@dataclass(frozen=True)
class Folder:
    """Files on disk, by their paths below ``root``."""

    root: Path
    names: Sequence[str]
    """All files, sorted; hidden ones left out."""

    def read(self, name: str) -> bytes:
        try:
            return read_bytes(self.root / name)
        except OSError as error:
            raise _unreadable(str(self.root / name), error.strerror) from error

    def stamp(self, names: Sequence[str]) -> str:
        """A digest of each file's path, size and time of change, which is taken without reading them."""
        digest = hashlib.sha256()
        for name in names:
            try:
                status = regular(self.root / name)
            except OSError as error:
                raise _unreadable(str(self.root / name), error.strerror) from error
            stamp = f"{(self.root / name).absolute()} {status.st_size} {status.st_mtime_ns}\n"
            digest.update(stamp.encode(errors="surrogateescape"))
        return digest.hexdigest()


@dataclass(frozen=True)
class TarArchive:
    """Regular files inside an uncompressed archive, read in place: no name from the archive is ever written to disk."""

    root: Path
    members: Mapping[str, tuple[int, int]]
    """Offset and length of each file's bytes within the archive."""

    @property
    def names(self) -> Sequence[str]:
        """All files, sorted; hidden ones left out."""
        return tuple(sorted(self.members))

    def read(self, name: str) -> bytes:
        offset, length = self.members[name]
        try:
            with opened(self.root) as archive:
                archive.seek(offset)
                data = archive.read(length)
        except OSError as error:
            raise _unreadable(str(self.root), error.strerror) from error
        if len(data) != length:
            raise _unreadable(f"{self.root}/{name}", "the archive ends too early")
        return data

    def stamp(self, names: Sequence[str]) -> str:
        """A digest of the archive's path, size and time of change, and of the members' names."""
        status = os.stat(self.root)
        stamp = f"{self.root.absolute()} {status.st_size} {status.st_mtime_ns}\n"
        digest = hashlib.sha256(stamp.encode(errors="surrogateescape"))
        digest.update("\n".join(names).encode(errors="surrogateescape"))
        return digest.hexdigest()


FileTree = Folder | TarArchive


@dataclass(frozen=True)
class TreeImages:
    """Some files of a tree as encoded images, see `fedbench.datasets.content.EncodedImages`."""

    tree: FileTree
    chosen: Sequence[str]

    def __len__(self) -> int:
        return len(self.chosen)

    def name(self, index: int) -> str:
        return f"{self.tree.root}/{self.chosen[index]}"

    def read(self, index: int) -> bytes:
        return self.tree.read(self.chosen[index])

    def stamp(self) -> str:
        return self.tree.stamp(self.chosen)

    def remedy(self) -> str:
        return "where that was meant, run again, else bring the file back"


def open_tree(path: Path) -> FileTree:
    """The files below the folder or in the .tar at ``path``."""
    if path.is_dir():
        return Folder(path, _walk(path))
    try:
        # "r:" takes uncompressed archives only: in a compressed one every image would mean unpacking all before it.
        with opened(path) as whole, tarfile.open(fileobj=whole, mode="r:") as archive:
            # Directories, links and devices are left out; a sparse file's bytes don't lie in one piece.
            files = [m for m in archive if m.isreg() and m.sparse is None and not _hidden(PurePosixPath(m.name).parts)]
            _check_end(whole, archive.offset)
    except (tarfile.TarError, OSError, ValueError) as error:
        raise FedbenchError(
            f"{str(path)!r} can't be read as an uncompressed .tar archive ({error}); copy it again if it was cut "
            "short, unpack it if it is compressed, and name the folder or the .tar."
        ) from error
    return TarArchive(path, {str(PurePosixPath(m.name)): (m.offset_data, m.size) for m in files})


def _check_end(archive: BinaryIO, offset: int) -> None:
    """An error unless only zeros follow the last member: at a damaged header ``tarfile`` ends without a word."""
    archive.seek(offset)
    if len(rest := archive.read(tarfile.BLOCKSIZE)) < tarfile.BLOCKSIZE:
        raise tarfile.ReadError("it has no end")
    while rest:
        if rest.strip(b"\0"):
            raise tarfile.ReadError(f"damaged at byte {offset}")
        rest = archive.read(2**20)


def _walk(root: Path) -> list[str]:
    """The files below ``root``, sorted; links to folders are followed. FedbenchError where one leads to a folder that
    is below ``root`` anyway, or around it: its images would count twice.
    """
    names_below: list[str] = []
    seen: dict[str, str] = {}

    def unreadable(error: OSError) -> None:
        raise _unreadable(str(error.filename), error.strerror) from error

    for folder, subfolders, files in os.walk(root, onerror=unreadable, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            raise FedbenchError(
                f"{folder!r} and {seen[real]!r} are the same folder, by a link, so its images would be found twice; "
                "delete the link."
            )
        seen[real] = folder
        subfolders[:] = sorted(name for name in subfolders if not _hidden((name,)))
        below = Path(folder).relative_to(root)
        names_below += [(below / name).as_posix() for name in files if not _hidden((name,))]
    return sorted(names_below)


def _hidden(parts: Sequence[str]) -> bool:
    """Dot files and what macOS adds to archives; takes '..' and absolute names out along the way."""
    return any(part.startswith((".", "/")) or part == "__MACOSX" for part in parts)


def _unreadable(file: str, reason: str | None) -> FedbenchError:
    return FedbenchError(f"{file!r} can't be read ({reason}); check that the data are complete and readable.")


class Inside:
    """Paths that a list names, which must stay below one folder; each folder on the way is looked up once."""

    def __init__(self, root: Path) -> None:
        self._root = os.fspath(root)
        self._real = os.path.realpath(root)
        self._folders: dict[str, bool] = {}

    def require(self, path: str, where: str) -> str:
        """``path``, relative to the root, in its plain form. FedbenchError, which begins with ``where``, unless it is a
        file below the root.
        """
        folder, file = path.rpartition("/")[0], f"{self._root}/{path}"
        if folder not in self._folders:
            self._folders[folder] = self._is_inside(f"{self._root}/{folder}")
        try:
            # one look at a file that is no link: lists have 100,000 lines
            mode = os.lstat(file).st_mode
        except (OSError, ValueError):
            mode = 0
        if path.startswith("/") or ".." in path.split("/"):
            problem = f"{path!r} leads out of the image folder; write relative paths"
        elif not self._folders[folder] or (stat.S_ISLNK(mode) and not self._is_inside(file)):
            problem = (
                f"a link on the path {path!r} leads out of the image folder {self._root!r}; name a folder that holds "
                "all images with ?root=DIR"
            )
        elif not stat.S_ISREG(mode) and not os.path.isfile(file):
            problem = (
                f"there is no file {file!r}; complete the data, or name the folder that the paths start "
                "from with ?root=DIR"
            )
        else:
            return str(PurePosixPath(path)) if "//" in path or "./" in path else path
        raise FedbenchError(f"{where}: {problem}.")

    def _is_inside(self, path: str) -> bool:
        return Path(os.path.realpath(path)).is_relative_to(self._real)
