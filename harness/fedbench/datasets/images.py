"""Encoded images (files, tar members, table cells) made into uint8 tensors, at once or, where large, on demand."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import struct
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbench.datasets.cache import damaged, stored
from fedbench.errors import FedbenchError
from fedbench.files import replacing
from fedbench.types import ImageSource, Tensors

log = logging.getLogger(__name__)

MEMORY_LIMIT = 512 * 2**20
"""Decoded bytes up to which a split is kept in memory."""
DEFAULT_SIZE = 224
"""The side in pixels that images of differing sizes are brought to, CLIP's usual input."""
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
"""Pillow tells formats by content and would hand some to other programs (EPS to Ghostscript); these it reads itself."""
DECODING_VERSION = 1
"""Raised whenever the same file would give other pixels."""


class EncodedImages(Protocol):
    """Images as stored, by number."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """What the user is told when image ``index`` can't be read."""
        ...

    def read(self, index: int) -> bytes:
        """The bytes of the image's file."""
        ...

    def stamp(self) -> str:
        """Changes whenever the stored files do; much cheaper than reading them."""
        ...


@dataclass(frozen=True)
class Scan:
    """What one pass over all files found: the digest of their bytes, and the (height, width) they share."""

    digest: str
    size: tuple[int, int] | None


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """Images decoded when they are asked for."""

    encoded: EncodedImages
    size: tuple[int, int]
    digest: str
    """Over the bytes of all files."""

    def __len__(self) -> int:
        return len(self.encoded)

    def read(self, indices: Tensor) -> Tensor:
        """uint8 (b, 3, height, width)."""
        pixels = np.empty((len(indices), 3, *self.size), np.uint8)
        for row, index in enumerate(indices.tolist()):
            pixels[row] = decode(self.encoded.read(index), self.encoded.name(index), self.size)
        return torch.from_numpy(pixels)

    def content_hash(self) -> str:
        """Digest of the files' bytes and of the size they are brought to."""
        return hashlib.sha256(f"{self.digest} {self.size} {DECODING_VERSION}".encode()).hexdigest()


def load_images(splits: Sequence[EncodedImages], size: int | None, cache_dir: Path) -> list[ImageSource]:
    """The images of all splits at ``size`` x ``size``; without it, at the size all share, else at 224 x 224."""
    found = [scan(encoded, cache_dir) for encoded in splits]
    shared = {each.size for each in found}
    target = (size, size) if size else (shared.pop() if len(shared) == 1 else None) or (DEFAULT_SIZE, DEFAULT_SIZE)
    return [
        _kept_or_lazy(ImageFiles(encoded, target, each.digest), cache_dir)
        for encoded, each in zip(splits, found, strict=True)
    ]


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
    key = hashlib.sha256(encoded.stamp().encode()).hexdigest()
    file = cache_dir / "datasets" / f"scan-{key[:32]}.json"
    if file.exists():
        try:
            kept = json.loads(file.read_text("utf-8"))
            return Scan(str(kept["digest"]), None if kept["size"] is None else (kept["size"][0], kept["size"][1]))
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise damaged(file, repr(error)) from error
    log.info("reading %s images once for their checksum", f"{len(encoded):,}")
    digest, sizes = hashlib.sha256(), set()
    for index in range(len(encoded)):
        data = encoded.read(index)
        digest.update(struct.pack("<q", len(data)) + data)
        sizes.add(_size(data, encoded.name(index)))
    size = sizes.pop() if len(sizes) == 1 else None
    with replacing(file, "data cache") as temporary:
        temporary.write_text(json.dumps({"digest": digest.hexdigest(), "size": size}), "utf-8")
    return Scan(digest.hexdigest(), size)


def _size(data: bytes, name: str) -> tuple[int, int]:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return image.height, image.width
    except (*_BROKEN, Image.DecompressionBombError) as error:
        raise _undecodable(name, error) from error


def decode(data: bytes, name: str, size: tuple[int, int]) -> NDArray[np.uint8]:
    """The image as (3, height, width): shorter side resized (bicubic), then the centre cut out, where sizes differ."""
    from PIL import Image

    height, width = size
    try:
        # Palette images with transparency warn about a conversion that is meant.
        with (
            Image.open(io.BytesIO(data), formats=FORMATS) as opened,
            warnings.catch_warnings(action="ignore", category=UserWarning),
        ):
            image = opened.convert("RGB")
    except (*_BROKEN, Image.DecompressionBombError) as error:
        raise _undecodable(name, error) from error
    if (image.height, image.width) != size:
        scale = max(height / image.height, width / image.width)
        resized = max(width, round(image.width * scale)), max(height, round(image.height * scale))
        image = image.resize(resized, Image.Resampling.BICUBIC)
        left, top = (image.width - width) // 2, (image.height - height) // 2
        image = image.crop((left, top, left + width, top + height))
    return np.asarray(image, np.uint8).transpose(2, 0, 1)


# What Pillow's readers raise on damaged files, depending on the format.
_BROKEN = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error)


def _undecodable(name: str, error: Exception) -> FedbenchError:
    # Pillow's own text names a BytesIO object where it can't tell the format.
    reason = "no known image format" if "BytesIO" in str(error) else str(error)
    return FedbenchError(f"image {name!r} can't be decoded ({reason}); replace or delete that file and run again.")
