"""Encoded images (files, tar members, table cells) made into uint8 tensors, at once or, where large, on demand."""

from __future__ import annotations

import hashlib
import io
import logging
import struct
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbench.core.errors import FedbenchError
from fedbench.core.federation import ImageSource
from fedbench.core.types import Tensors
from fedbench.datasets.cache import read_json, stored, write_json
from fedbench.datasets.names import DatasetName

log = logging.getLogger(__name__)

MEMORY_LIMIT = 512 * 2**20
"""Decoded bytes up to which a split is kept in memory."""
DEFAULT_SIZE = 224
"""The side in pixels that images of differing sizes are brought to where nothing says which: CLIP's usual input."""
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
"""Pillow tells formats by content and would hand some to other programs (EPS to Ghostscript); these it reads itself."""
DECODING_VERSION = 1
"""Raised whenever the same file would give other pixels."""
_SCAN_VERSION = 3
"""Raised whenever what a scan keeps changes; scans of another version are made again."""


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
    """Of all images, in pixels."""


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


def load_images(splits: Sequence[EncodedImages], parsed: DatasetName, cache_dir: Path) -> LoadedImages:
    """The images of all splits.

    They are brought to the size that the name says, in both directions; without it, they are at the size that all
    share, else at the one they are loaded for.
    """
    found = [scan(encoded, cache_dir) for encoded in splits]
    shared = {each.size for each in found}
    target = shared.pop() if len(shared) == 1 else None
    digests = tuple(f"{each.digest} {DECODING_VERSION}" for each in found if target is None and not parsed.size())
    if target is None or parsed.size():
        target = (parsed.size() or parsed.image_size or DEFAULT_SIZE,) * 2
    images = [
        _kept_or_lazy(ImageFiles(encoded, target, each.digest, each.checksums), cache_dir)
        for encoded, each in zip(splits, found, strict=True)
    ]
    return LoadedImages(images, min(each.shortest_side for each in found), digests)


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
    found = Scan(digest.hexdigest(), shared, tuple(checksums), min(map(min, sizes)))
    write_json(file, asdict(found))
    return found


def _size(data: bytes, name: str) -> tuple[int, int]:
    from PIL import Image

    with _decoding(name), Image.open(io.BytesIO(data), formats=FORMATS) as image:
        return image.height, image.width


def decode(data: bytes, name: str, size: tuple[int, int]) -> NDArray[np.uint8]:
    """The image as (3, height, width): shorter side resized (bicubic), then the centre cut out, where sizes differ."""
    from PIL import Image

    height, width = size
    with _decoding(name), Image.open(io.BytesIO(data), formats=FORMATS) as opened:
        image = opened.convert("RGB")
    if (image.height, image.width) != size:
        scale = max(height / image.height, width / image.width)
        resized = max(width, round(image.width * scale)), max(height, round(image.height * scale))
        image = image.resize(resized, Image.Resampling.BICUBIC)
        left, top = (image.width - width) // 2, (image.height - height) // 2
        image = image.crop((left, top, left + width, top + height))
    return np.asarray(image, np.uint8).transpose(2, 0, 1)


@contextmanager
def _decoding(name: str) -> Iterator[None]:
    """What Pillow raises in the block as one error about the image called ``name``."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            # Palette images with transparency warn about a conversion that is meant.
            warnings.simplefilter("ignore", UserWarning)
            # Pillow only warns of the first of the sizes that a small file can claim to fill memory with.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            yield
    # On damaged files Pillow's readers raise nearly anything, depending on the format.
    except Exception as error:
        # Pillow's own text names a BytesIO object where it can't tell the format.
        reason = "no known image format" if "BytesIO" in str(error) else str(error) or type(error).__name__
        raise FedbenchError(
            f"image {name!r} can't be decoded ({reason}); replace or delete that file and run again."
        ) from error
