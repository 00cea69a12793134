"""Columns of a Hugging Face data set: which hold images and labels, by type or as the user says; images of a split."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbench.core.errors import FedbenchError, unknown_name
from fedbench.core.files import read_bytes
from fedbench.datasets.names import DatasetName


@dataclass(frozen=True)
class Columns:
    """The columns that are read."""

    image: str
    label: str
    domain: str | None
    client: str | None = None
    """Whom samples come from: names, or numbers."""


def choose_columns(parsed: DatasetName, features: Mapping[str, Any]) -> Columns:
    """The columns the options name; the image and the label column are otherwise the only ones of their type."""
    for option in ("image", "label", "domain", "client"):
        column = parsed.options.get(option)
        if column is not None and column not in features:
            raise unknown_name(f"column of {parsed.location!r}", column, features)
    domain, client = parsed.options.get("domain"), parsed.options.get("client")
    image = parsed.options.get("image") or _only(
        parsed, "image", [name for name, feature in features.items() if _is_image(feature)], features
    )
    if not _is_image(features[image]):
        raise FedbenchError(f"{parsed.location!r}: column {image!r} holds no images; type ?image=COLUMN with another.")
    labels = [name for name, feature in features.items() if _is_class_label(feature) and name not in (domain, client)]
    # Parquet written by other tools carries plain integers.
    labels = labels or [
        name for name, feature in features.items() if _is_integer(feature) and name not in (domain, client)
    ]
    label = parsed.options.get("label") or _only(parsed, "label", labels, features)
    for option, column, fits in (
        ("label", label, _is_category(features[label]) or _is_integer(features[label])),
        ("domain", domain, domain is None or _is_category(features[domain])),
        ("client", client, client is None or _is_category(features[client]) or _is_integer(features[client])),
    ):
        if not fits:
            raise FedbenchError(
                f"{parsed.location!r}: column {column!r} holds no class labels and no strings; "
                f"type ?{option}=COLUMN with another."
            )
    return Columns(image, label, domain, client)


def _only(parsed: DatasetName, kind: str, found: Sequence[str], features: Mapping[str, Any]) -> str:
    if len(found) == 1:
        return found[0]
    several = f"several {kind} columns ({', '.join(found)})" if found else f"no {kind} column by its type"
    raise FedbenchError(
        f"{parsed.location!r} has {several}; choose with ?{kind}=COLUMN, one of {', '.join(found or features)}."
    )


def _is_image(feature: Any) -> bool:
    import datasets

    # Written without feature types, an Image column shows as the struct it is stored as.
    return isinstance(feature, datasets.Image) or (isinstance(feature, dict) and set(feature) == {"bytes", "path"})


def _is_class_label(feature: Any) -> bool:
    import datasets

    return isinstance(feature, datasets.ClassLabel)


def _is_category(feature: Any) -> bool:
    return _is_class_label(feature) or getattr(feature, "dtype", None) in ("string", "large_string")


def _is_integer(feature: Any) -> bool:
    return str(getattr(feature, "dtype", "")).startswith(("int", "uint")) and not _is_class_label(feature)


@dataclass(frozen=True)
class ImageColumn:
    """The image column of one split as encoded images."""

    where: str
    files: Sequence[str]
    """The Arrow files the split lies in, made once by the library."""
    contents: Any
    """Bytes of each image, a pyarrow ChunkedArray."""
    paths: Any
    """Paths of images that are stored beside the table, likewise."""
    roots: Sequence[Path]
    """Folders they may lie in: a path is part of the data, and those may be anybody's."""

    def __len__(self) -> int:
        return len(self.contents)

    def name(self, index: int) -> str:
        """The split and the row."""
        return f"{self.where}, row {index}"

    def read(self, index: int) -> bytes:
        """The bytes of the image's file."""
        data: bytes | None = self.contents[index].as_py()
        if data is not None:
            return data
        path = self.paths[index].as_py()
        if path is not None and not any(Path(os.path.realpath(path)).is_relative_to(root) for root in self.roots):
            raise FedbenchError(f"{self.name(index)}: the path {path!r} leads out of the data set; nothing was read.")
        try:
            return read_bytes(path)
        except (OSError, TypeError, ValueError) as error:
            raise FedbenchError(f"{self.name(index)} has no image: {path!r} can't be read; get it again.") from error

    def stamp(self) -> str:
        """Over the Arrow files' paths, and sizes and times of change of images beside them.

        The library writes an Arrow file once, at a path named by the source's version: one that differs is damaged.
        """
        beside = self.paths.filter(self.contents.is_null()).drop_null().to_pylist() if self.contents.null_count else []
        seen = [(path, os.stat(path)) for path in beside if os.path.isfile(path)]
        times = [f"{path} {status.st_size} {status.st_mtime_ns}" for path, status in seen]
        return " ".join([self.where, *self.files, *times])

    def remedy(self) -> str:
        """The library's copy can be made again."""
        return remedy(self.files)


def remedy(files: Sequence[str]) -> str:
    """What to do about a damaged copy of the library's."""
    folder = str(Path(files[0]).parent)
    return f"that is a copy, so delete it and run again: rm -r {shlex.quote(folder)}"


def images_of(split: Any, where: str, column: str, roots: Sequence[Path]) -> ImageColumn:
    """The image ``column`` of a split of the library."""
    import pyarrow.compute

    struct = split.data.column(column)
    return ImageColumn(
        where,
        [file["filename"] for file in split.cache_files],
        pyarrow.compute.struct_field(struct, "bytes"),
        pyarrow.compute.struct_field(struct, "path"),
        roots,
    )
