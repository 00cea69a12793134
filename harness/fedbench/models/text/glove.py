"""Class vectors from GloVe's vectors of words: ``glove:FILE``, a class is the mean of its name's words.

    glove:glove.6B.300d.txt      in DATA_DIR/glove, unpacked or inside the official glove.6B.zip
    glove:words/mine.txt         any file of this format: a word, then its numbers, a line each

A name is lower-cased and cut at spaces, underscores and slashes; a word that the file lacks is cut further at whatever
is no letter or digit (``t-shirt`` before ``t`` and ``shirt``). Words have no sentences, so templates are not read.
Pennington, Socher, Manning, "GloVe: Global Vectors for Word Representation", EMNLP 2014.
"""

from __future__ import annotations

import hashlib
import logging
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import IO

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedbench.core.errors import FedbenchError, NotHere
from fedbench.core.files import opened

log = logging.getLogger(__name__)

GLOVE = "glove:"
_SOURCE = "https://nlp.stanford.edu/data"
_OFFICIAL = re.compile(r"(glove\.(?:6B|twitter\.27B)|glove\.(?:42B|840B)\.300d)(?:\.\d+d)?\.txt")
"""Names of the published files; the group is the name of the archive that holds the file."""
_LONGEST_LINE = 2**16
"""The most bytes of a line. 300 numbers take less than 4,000; a file with longer lines is of another kind."""


def is_glove(name: str) -> bool:
    """Whether the text encoder called ``name`` is a file of GloVe's vectors."""
    return name.startswith(GLOVE)


def glove_vectors(name: str, classnames: Sequence[str], data_dir: Path) -> Tensor:
    """One unit vector a class, float32 (K, V), V the width of the file: the mean of its words' vectors.

    Raises FedbenchError where none of a class's words has a vector, and for files that are damaged or of another
    format; NotHere for a published file that is not on this machine. Words without a vector are left out, and named.
    """
    words = {classname: _words(classname) for classname in classnames}
    wanted = {one for pairs in words.values() for word, parts in pairs for one in (word, *parts)}
    known = _vectors(name, frozenset(wanted), data_dir)
    rows = []
    for classname, pairs in words.items():
        matches = [one for word, parts in pairs for one in ((word,) if word in known else parts) if one in known]
        lacking = [word for word, parts in pairs if word not in known and not any(part in known for part in parts)]
        if not matches:
            raise FedbenchError(
                f"text encoder {name!r}: class {classname!r} has no vector, since the file has none of its words "
                f"{', '.join(map(repr, lacking))}; give the class another name (classnames.json), or choose a larger "
                "file or another text encoder."
            )
        if lacking:
            log.warning("%s has no vector of %s in class %r: it is left out", name, ", ".join(lacking), classname)
        rows.append(torch.stack([known[word] for word in matches]).mean(dim=0))
    return normalize(torch.stack(rows), dim=-1)


def glove_digest(name: str, data_dir: Path) -> str:
    """sha256 of the whole file, unpacked. Raises FedbenchError where it can't be read, NotHere where it is not here."""
    file, member = _located(name, data_dir)
    status = file.stat()
    return _digest(name, file, member, status.st_mtime_ns, status.st_size)


def how_to_get_glove(name: str, data_dir: Path) -> str:
    """How to get the published file behind ``name``; "" if it is here, or it is not a published one."""
    if _official(name) is None:
        return ""
    try:
        _located(name, data_dir)
    except NotHere:
        return _by_hand(name, data_dir)
    return ""


def _official(name: str) -> re.Match[str] | None:
    return _OFFICIAL.fullmatch(name.removeprefix(GLOVE))


def _by_hand(name: str, data_dir: Path) -> str:
    archive = _OFFICIAL.sub(r"\1.zip", name.removeprefix(GLOVE))
    return f"download {_SOURCE}/{archive} and put it, packed or unpacked, in {str(data_dir / 'glove')!r}."


def _located(name: str, data_dir: Path) -> tuple[Path, str]:
    """The file and, if it is an archive, the name of its member."""
    given = Path(name.removeprefix(GLOVE))
    try:
        given = given.expanduser()
        folders = (given.parent, *([data_dir / "glove"] if _official(name) else []))
        for folder in folders:
            if given.name and (folder / given.name).is_file() and given.suffix != ".zip":
                return folder / given.name, ""
            for archive in sorted(folder.glob("glove*.zip")):
                if archive.is_file() and given.name in _members(name, archive):
                    return archive, given.name
    except (RuntimeError, OSError, ValueError) as error:  # no such user's home, or a name that can't be one
        raise FedbenchError(f"text encoder {name[:200]!r} cannot be looked up: {error}.") from None
    if _official(name):
        raise NotHere(f"the vectors of text encoder {name!r} are not on this machine: {_by_hand(name, data_dir)}")
    raise FedbenchError(
        f"text encoder {name!r}: there is no file {str(given)!r} of words and numbers; write "
        f"{GLOVE}glove.6B.300d.txt, or the path of such a file (of an archive, the name of the file inside)."
    )


def _members(name: str, archive: Path) -> list[str]:
    with _readable(name, archive), zipfile.ZipFile(archive) as packed:
        return packed.namelist()


@contextmanager
def _readable(name: str, file: Path) -> Iterator[None]:
    """Turn errors of reading ``file`` inside the block into a FedbenchError."""
    try:
        yield
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        reason = str(error).strip() or type(error).__name__
        raise FedbenchError(f"text encoder {name!r}: {str(file)!r} can't be read ({reason}); get it again.") from error


@contextmanager
def _content(name: str, file: Path, member: str) -> Iterator[IO[bytes]]:
    with _readable(name, file), opened(file) as whole:
        if not member:
            yield whole
            return
        with zipfile.ZipFile(whole) as packed, packed.open(member) as inside:
            yield inside


@lru_cache(maxsize=4)
def _digest(name: str, file: Path, member: str, changed: int, size: int) -> str:
    """Hash the file. ``changed`` and ``size`` are part of the cache's key, so that a replaced file is read again."""
    digest = hashlib.sha256()
    with _content(name, file, member) as content:
        while part := content.read(2**20):
            digest.update(part)
    return digest.hexdigest()


def _words(classname: str) -> list[tuple[str, tuple[str, ...]]]:
    """The words of a class's name, each with the parts that stand in for it where it is unknown."""
    words = [word for word in re.split(r"[\s_/]+", classname.lower()) if word]
    return [(word, tuple(re.findall(r"[^\W_]+", word))) for word in words]


def _vectors(name: str, wanted: frozenset[str], data_dir: Path) -> Mapping[str, Tensor]:
    """The vectors (V,) of all ``wanted`` words in the file, which is read line by line until none is missing."""
    file, member = _located(name, data_dir)
    missing = {word.encode(): word for word in wanted}
    vectors: dict[str, Tensor] = {}
    width = 0
    with _content(name, file, member) as content:
        for number, line in enumerate(iter(lambda: content.readline(_LONGEST_LINE), b""), start=1):
            if number == 1:
                width = len(line.split()) - 1
                if width < 2 or len(line) == _LONGEST_LINE:
                    raise _not_glove(name, file, number)
            if line.split(b" ", 1)[0] in missing:
                # the first word of a line may be a part of its own: in some files words have spaces
                head, *numbers = line.rstrip().rsplit(b" ", width)
                if head in missing:
                    vectors[missing.pop(head)] = _vector(name, file, number, numbers, width)
            if not missing:
                break
    return vectors


def _vector(name: str, file: Path, number: int, numbers: Sequence[bytes], width: int) -> Tensor:
    try:
        vector = torch.tensor([float(one) for one in numbers])
    except ValueError:
        raise _not_glove(name, file, number) from None
    if len(vector) != width or not vector.isfinite().all():
        raise _not_glove(name, file, number)
    return vector


def _not_glove(name: str, file: Path, number: int) -> FedbenchError:
    return FedbenchError(
        f"text encoder {name!r}: line {number} of {str(file)!r} is not a word and as many finite numbers as in the "
        "others, as in GloVe's files; get the file again, or take off a heading."
    )
