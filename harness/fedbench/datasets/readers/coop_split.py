"""``split_zhou_*.json``, the splits in which CoOp (Zhou et al., IJCV 2022) and the methods after it compare prompts.

An object with the lists ``train``, ``val`` and ``test`` of [path, label, class name]. Paths start from a folder of
images that each data set calls otherwise; underscores in class names are spaces, as in CoOp's code.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedbench.core.errors import FedbenchError
from fedbench.core.files import read_bytes

PATTERN = "split_zhou_*.json"
_READ = ("train", "test")
_DEPTH = 2
"""Folders between the file and the images."""


def split_file(path: Path) -> Path | None:
    """The split that ``path``, a file or a folder, means; None where it is none. FedbenchError for several."""
    if path.is_file():
        return path if path.match(PATTERN) else None
    found = sorted(path.glob(PATTERN))
    if len(found) > 1:
        raise FedbenchError(f"{str(path)!r} holds {', '.join(file.name for file in found)}; name one of them.")
    return found[0] if found else None


def read_split(file: Path) -> tuple[list[list[tuple[str, int]]], dict[str, str]]:
    """Path and label of the images of train and test, and the words by label as text. ``val`` is left out.

    FedbenchError for a file that is none, or in which a label has two names.
    """
    try:
        content: dict[str, list[list[Any]]] = json.loads(read_bytes(file).decode("utf-8"))
        rows = [(path, label, str(name)) for part in _READ for path, label, name in content[part]]
        is_whole = all(content[part] for part in _READ)
        if not is_whole or not all(type(label) is int for _, label, _ in rows):
            raise ValueError("a split is empty, or a label no number")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FedbenchError(
            f"{str(file)!r} can't be read ({type(error).__name__}: {error}); it must hold the lists train, val and "
            "test of [path, label, class name], as CoOp's release does."
        ) from error
    words: dict[str, str] = {}
    for _, label, name in rows:
        word = name.replace("_", " ").strip()
        if words.setdefault(str(label), word) != word:
            raise FedbenchError(f"{str(file)!r}: label {label} is called {words[str(label)]!r} and {word!r}.")
    parts = [[(str(path), int(label)) for path, label, _ in content[part]] for part in _READ]
    return parts, words


def image_root(file: Path, first: str) -> Path:
    """The folder beside or up to two levels below the split's own in which the image ``first`` lies."""
    folders = [file.parent]
    for _ in range(_DEPTH + 1):
        found = next((folder for folder in folders if (folder / first).is_file()), None)
        if found is not None:
            return found
        folders = [below for folder in folders for below in sorted(folder.iterdir()) if below.is_dir()]
    raise FedbenchError(
        f"{str(file)!r}: no image {first!r} lies below {str(file.parent)!r}; put the images there, or name the folder "
        "that the paths start from with ?root=DIR."
    )
