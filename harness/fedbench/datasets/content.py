"""Images of any form made into a data set, with the digest that says what is in it.

Every form of image data is read into one table, of which `dataset_of` makes a data set. It has a sample in each row:
``label`` and, where the data have them, ``domain`` and ``client`` are categories, which are numbered in their order;
``split`` is train or test. Where samples are files, ``path`` names them. Encoded images (files, tar members, table
cells) are decoded into uint8 tensors at once or, where large, on demand.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import struct
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbench.core.errors import FedbenchError
from fedbench.core.federation import Dataset, ImageSource, Split
from fedbench.core.types import Tensors
from fedbench.datasets.cache import read_json, stored, write_json
from fedbench.datasets.sources import Asked, Files

if TYPE_CHECKING:
    import pandas as pd
    from PIL import Image

log = logging.getLogger(__name__)

MEMORY_LIMIT = 512 * 2**20
"""Decoded bytes up to which a split is kept in memory."""
DEFAULT_SIZE = 224
"""The side in pixels that images of differing sizes are brought to where nothing says which: CLIP's usual input."""
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
"""Pillow tells formats by content and would hand some to other programs (EPS to Ghostscript); these it reads itself."""
DECODING_VERSION = 1
"""Raised whenever the same file would give other pixels."""
_SCAN_VERSION = 4
"""Raised whenever what a scan keeps changes; scans of another version are made again."""

MOST_CLASSES = 1_000_000
"""A larger label is no class but damage or a mistake, and a class for every number below it would fill memory."""
SPLITS = ("train", "test")


class EncodedImages(Protocol):
    """Images as stored, by number."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """The text for the user when image ``index`` can't be read."""
        ...

    def read(self, index: int) -> bytes:
        """The bytes of the image's file."""
        ...

    def stamp(self) -> str:
        """Changes whenever the stored files do; much cheaper than reading them."""
        ...

    def remedy(self) -> str:
        """What to do about an image that is no longer what it was."""
        ...


@dataclass(frozen=True)
class Scan:
    """What one pass over all files found: the digest of their bytes, and the (height, width) they share."""

    digest: str
    size: tuple[int, int] | None
    checksums: tuple[int, ...]
    """CRC-32 of each file: what is read later is held against it, since most image formats hold no checksum."""
    shortest_side: int
    """The shortest side of all images, in pixels."""


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """Images decoded when they are read."""

    encoded: EncodedImages
    size: tuple[int, int]
    digest: str
    """Over the bytes of all files."""
    checksums: tuple[int, ...]
    """CRC-32 of each file when the digest was taken."""

    def __len__(self) -> int:
        return len(self.encoded)

    def read(self, indices: Tensor) -> Tensor:
        """uint8 (b, 3, height, width). FedbenchError for a file that is no longer what the digest was taken of."""
        pixels = np.empty((len(indices), 3, *self.size), np.uint8)
        for row, index in enumerate(indices.tolist()):
            data, name = self.encoded.read(index), self.encoded.name(index)
            if zlib.crc32(data) != self.checksums[index]:
                raise FedbenchError(
                    f"image {name!r} is not what it was when the data were first read; {self.encoded.remedy()}."
                )
            pixels[row] = decode(data, name, self.size)
        return torch.from_numpy(pixels)

    def content_hash(self) -> str:
        """Digest of the files' bytes and of the size they are brought to."""
        return hashlib.sha256(f"{self.digest} {self.size} {DECODING_VERSION}".encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class LoadedImages:
    """The images of all splits."""

    splits: list[ImageSource]
    shortest_side: int
    """In pixels, that one of the files has."""
    file_digests: tuple[str, ...]
    """One of each split's files, where they are decoded at the size that they are loaded for; else none."""


def load_images(splits: Sequence[EncodedImages], asked: Asked[Files]) -> LoadedImages:
    """The images of all splits.

    They are brought to the size that the name says, in both directions; without it, they are at the size that all
    share, else at the one they are loaded for.
    """
    scans = [scan(encoded, asked.cache_dir) for encoded in splits]
    shared = {each.size for each in scans}
    target = shared.pop() if len(shared) == 1 else None
    digests = tuple(f"{each.digest} {DECODING_VERSION}" for each in scans if target is None and not asked.options.size)
    if target is None or asked.options.size:
        target = (asked.options.size or asked.image_size or DEFAULT_SIZE,) * 2
    images = [
        _kept_or_lazy(ImageFiles(encoded, target, each.digest, each.checksums), asked.cache_dir)
        for encoded, each in zip(splits, scans, strict=True)
    ]
    return LoadedImages(images, min(each.shortest_side for each in scans), digests)


def _kept_or_lazy(files: ImageFiles, cache_dir: Path) -> ImageSource:
    if len(files) * 3 * files.size[0] * files.size[1] > MEMORY_LIMIT:
        return files

    def decoded() -> Tensors:
        log.info("decoding %s images once", f"{len(files):,}")
        return {"images": files.read(torch.arange(len(files)))}

    file = cache_dir / "datasets" / f"images-{files.content_hash()[:32]}.safetensors"
    return stored(file, decoded, f"images such as {files.encoded.name(0)}").images("images")


def scan(encoded: EncodedImages, cache_dir: Path) -> Scan:
    """Read every file once; the result is kept until a file's name, size or time of change differs."""
    key = hashlib.sha256(f"{_SCAN_VERSION} {encoded.stamp()}".encode(errors="surrogateescape")).hexdigest()
    file = cache_dir / "datasets" / f"scan-{key[:32]}.json"
    kept = read_json(file) if file.exists() else {}
    if kept:
        size = None if kept["size"] is None else (kept["size"][0], kept["size"][1])
        return Scan(kept["digest"], size, tuple(kept["checksums"]), kept["shortest_side"])
    log.info("reading %s images once for their checksum", f"{len(encoded):,}")
    digest, sizes, checksums = hashlib.sha256(), set(), []
    for index in range(len(encoded)):
        data = encoded.read(index)
        digest.update(struct.pack("<q", len(data)) + data)
        checksums.append(zlib.crc32(data))
        sizes.add(_size(data, encoded.name(index)))
    shared = next(iter(sizes)) if len(sizes) == 1 else None
    result = Scan(digest.hexdigest(), shared, tuple(checksums), min(map(min, sizes)))
    write_json(file, asdict(result))
    return result


def _size(data: bytes, name: str) -> tuple[int, int]:
    with _opened(data, name) as image:
        return image.height, image.width


def decode(data: bytes, name: str, size: tuple[int, int]) -> NDArray[np.uint8]:
    """The image as (3, height, width): shorter side resized (bicubic), then the centre cut out, where sizes differ."""
    from PIL import Image

    height, width = size
    with _opened(data, name) as opened:
        image = opened.convert("RGB")
    if (image.height, image.width) != size:
        scale = max(height / image.height, width / image.width)
        resized = max(width, round(image.width * scale)), max(height, round(image.height * scale))
        image = image.resize(resized, Image.Resampling.BICUBIC)
        left, top = (image.width - width) // 2, (image.height - height) // 2
        image = image.crop((left, top, left + width, top + height))
    return np.asarray(image, np.uint8).transpose(2, 0, 1)


@contextmanager
def _opened(data: bytes, name: str) -> Iterator[Image.Image]:
    """The image called ``name``. What Pillow raises in the block becomes one error about it."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            # Palette images with transparency warn about a conversion that is meant.
            warnings.simplefilter("ignore", UserWarning)
            # Pillow only warns of the first of the sizes that a small file can claim to fill memory with.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                # Pillow would cut larger values off at 255 when it converts them.
                if image.mode.startswith("I") or image.mode == "F":
                    raise ValueError("grey values of 16 or 32 bits, only 8 are read; convert it")
                yield image
    # On damaged files Pillow's readers raise nearly anything, depending on the format.
    except Exception as error:
        # Pillow's own text names a BytesIO object where it can't tell the format.
        reason = "no known image format" if "BytesIO" in str(error) else str(error) or type(error).__name__
        raise FedbenchError(
            f"image {name!r} can't be decoded ({reason}); replace or delete that file and run again."
        ) from error


def dataset(
    name: str,
    classnames: tuple[str, ...],
    train: Split,
    test: Split | None,
    domain_names: tuple[str, ...] = (),
    list_groups: Mapping[str, tuple[int, ...]] | None = None,
    shortest_side: int | None = None,
    file_digests: Sequence[str] = (),
    client_names: tuple[str, ...] = (),
) -> Dataset:
    """A ``Dataset`` whose content hash covers images, labels, domains, clients, class names and groups of both splits.

    ``file_digests`` has one digest of each split's files, where these are decoded at the size that a run asks for.
    FedbenchError where a split's parts differ in length, an index has no name, or a part is of another type.
    """
    groups = dict(list_groups or {})
    # clients came later: data without them keep their hashes
    named = [classnames, domain_names, groups, *([client_names] if client_names else [])]
    names = json.dumps(named, sort_keys=True)
    splits = [split for split in (train, test) if split is not None]
    for split in splits:
        for what, index, called in (
            ("label", split.labels, classnames),
            ("domain", split.domains, domain_names),
            ("client", split.clients, client_names),
        ):
            if index is not None:
                _check(name, what, index, len(called), len(split.images))
        if len(split.images):
            _check_pixels(name, split.images.read(torch.zeros(1, dtype=torch.int64)))
    content = _digest(names, splits, [split.images.content_hash() for split in splits])
    files = _digest(names, splits, file_digests) if file_digests else ""
    return Dataset(name, classnames, train, test, content, domain_names, groups, shortest_side, files, client_names)


def limited(whole: Dataset, limit: int) -> Dataset:
    """``limit`` samples of each split of ``whole``, drawn at random and alike every time; a smaller split stays."""

    def of(split: Split | None) -> Split | None:
        if split is None or len(split) <= limit:
            return split
        drawn = torch.randperm(len(split), generator=torch.Generator().manual_seed(0))[:limit]
        return split.select(drawn.sort().values)

    def marked(digest: str) -> str:
        return hashlib.sha256(f"{digest} limit {limit}".encode()).hexdigest() if digest else ""

    train = of(whole.train)
    assert train is not None, "there is always a training split"
    content, files = marked(whole.content_hash), marked(whole.files_hash)
    return replace(whole, train=train, test=of(whole.test), content_hash=content, files_hash=files)


def numbered(values: Iterable[Any], names: Sequence[Any] | None = None) -> pd.Categorical:
    """The values of a column as categories ``names``, by default the values in order. An empty cell has none."""
    import pandas as pd  # takes half a second

    given = [None if pd.isna(value) else value for value in values]
    names = sorted({value for value in given if value is not None}) if names is None else names
    code_of = {name: number for number, name in enumerate(names)}
    codes = [-1 if value is None else code_of[value] for value in given]
    return pd.Categorical.from_codes(codes, categories=pd.Index(list(names), dtype=object))


def dataset_of(
    table: pd.DataFrame,
    encoded: Callable[[pd.DataFrame], EncodedImages],
    classnames: tuple[str, ...],
    asked: Asked[Files],
    groups: Mapping[str, tuple[int, ...]] | None = None,
) -> Dataset:
    """The data set in ``table``, in the table's order; ``encoded`` gives the images of one split's part of it."""
    parts = [part for name in SPLITS if len(part := table[table["split"] == name])]
    images = load_images([encoded(part) for part in parts], asked)
    splits = []
    for part, source in zip(parts, images.splits, strict=True):
        labels = _codes(part, "label")
        assert labels is not None, "every sample has a label"
        splits.append(Split(source, labels, _codes(part, "domain"), _codes(part, "client")))
    return dataset(
        asked.text,
        classnames,
        splits[0],
        splits[1] if len(splits) == 2 else None,
        _called(table, "domain"),
        groups,
        images.shortest_side,
        images.file_digests,
        _called(table, "client"),
    )


def _called(table: pd.DataFrame, column: str) -> tuple[str, ...]:
    return tuple(map(str, table[column].cat.categories)) if column in table else ()


def _codes(part: pd.DataFrame, column: str) -> Tensor | None:
    """The categories of the samples (n,); None where they have none."""
    codes = torch.from_numpy(part[column].cat.codes.to_numpy(np.int64, copy=True)) if column in part else None
    return None if codes is None or bool((codes < 0).any()) else codes


def _digest(names: str, splits: Sequence[Split], of_images: Iterable[str]) -> str:
    digest = hashlib.sha256(names.encode())
    for split, images in zip(splits, of_images, strict=True):
        digest.update(images.encode())
        for index in (split.labels, split.domains):
            digest.update(b"none" if index is None else index.contiguous().numpy().tobytes())
        if split.clients is not None:
            digest.update(split.clients.contiguous().numpy().tobytes())
    digest.update(b"no split" * (2 - len(splits)))
    return digest.hexdigest()


def _check(name: str, what: str, index: Tensor, names: int, images: int) -> None:
    if len(index) != images:
        raise FedbenchError(f"{name!r} has {images} images and {len(index)} {what}s of a split; get the data again.")
    if index.dtype != torch.int64:
        raise FedbenchError(f"{name!r} has {what}s of the type {index.dtype}; make them torch.int64.")
    outside = index[(index < 0) | (index >= names)]
    if len(outside):
        raise FedbenchError(
            f"{name!r} has the {what} {int(outside[0])}, but names for 0 to {names - 1} only; get the data again."
        )


def _check_pixels(name: str, pixels: Tensor) -> None:
    if pixels.dtype != torch.uint8 or pixels.ndim != 4 or pixels.shape[1] != 3:
        raise FedbenchError(
            f"{name!r} has images of the shape {tuple(pixels.shape[1:])} and the type {pixels.dtype}; make them "
            "torch.uint8 with values from 0 to 255, (3, height, width)."
        )
