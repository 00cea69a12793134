"""Word vectors as a text encoder: GloVe (Pennington, Socher and Manning, EMNLP 2014), or another file of its format.

A text is the mean of the vectors of its words, lower-cased; what is no letter, digit or apostrophe parts words. A class
none of whose name's words has a vector is refused; other words without one are left out.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from fedbench.core.errors import FedbenchError, NotHere
from fedbench.models.clip.backbone import class_vectors, fill_templates

GLOVE = "glove:"
_URL = "https://nlp.stanford.edu/data/glove.6B.zip"
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")


def glove_file(name: str, data_dir: Path) -> Path:
    """The file of the text encoder ``name``, glove:FILE: a path, or one below ``data_dir``; NotHere without one."""
    given = Path(name.removeprefix(GLOVE)).expanduser()
    found = next((file for file in (given, data_dir / given) if given.name and file.is_file()), None)
    if found is None:
        raise NotHere(f"text encoder {name!r}: there is no file {str(given)!r}, here or in {str(data_dir)!r}; {_TODO}.")
    return found


_TODO = f"get {_URL}, unpack it, and write glove:FILE, for instance glove:glove.6B.300d.txt"


def how_to_get_glove(name: str, data_dir: Path) -> str:
    """What to do about the file of ``name``; "" where it is here."""
    try:
        glove_file(name, data_dir)
    except NotHere:
        return f"get {_URL}, unpack it and put {name.removeprefix(GLOVE)} into {str(data_dir)!r}"
    return ""


def glove_vectors(file: Path, classnames: Sequence[str], templates: Sequence[str]) -> Tensor:
    """One unit vector a class, float32 (K, V), the mean over ``templates``.

    FedbenchError for a class whose name has no known word, and for a file that has no word vectors.
    """
    texts = fill_templates(classnames, templates)
    known = word_vectors(file, {word for text in (*texts, *classnames) for word in words_of(text)})
    for name in classnames:
        if known.keys().isdisjoint(words_of(name)):
            raise FedbenchError(f"{str(file)!r} has no vector of a word of class {name!r}; give another name or file.")
    means = [torch.stack([known[word] for word in words_of(text) if word in known]).mean(dim=0) for text in texts]
    return class_vectors(torch.stack(means), len(classnames))


def words_of(text: str) -> list[str]:
    """The words of ``text``, lower-cased, in order."""
    return _WORD.findall(text.lower())


def word_vectors(file: Path, words: Collection[str]) -> dict[str, Tensor]:
    """The vectors (V,) float32 of those ``words`` that the file has: a word and V numbers a line, parted by spaces."""
    wanted, found = {word.encode() for word in words}, dict[str, Tensor]()
    width = 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            word, _, rest = line.partition(b" ")
            if number > 1 and word not in wanted:
                continue
            try:
                vector = torch.tensor([float(value) for value in rest.split()])
            except ValueError:
                vector = torch.empty(0)
            # the first line of a file in word2vec's format counts words and columns
            if number == 1 and len(vector) == 1:
                raise FedbenchError(f"{str(file)!r} begins with a line of counts, as word2vec's files do; cut it off.")
            width = width or len(vector)
            if not width or len(vector) != width:
                raise FedbenchError(f"{str(file)!r}, line {number}: expected a word and its vector, parted by spaces.")
            if word in wanted:
                found.setdefault(word.decode(), vector)
    if not width:
        raise FedbenchError(f"{str(file)!r} is empty; {_TODO}.")
    return found


@lru_cache(maxsize=4)
def file_digest(file: Path) -> str:
    """sha256 of the file."""
    with file.open("rb") as whole:
        return hashlib.file_digest(whole, "sha256").hexdigest()
