"""Small pictures for folders of data."""

import io

import numpy as np
from PIL import Image


def picture(number: int, size: tuple[int, int] = (12, 10), mode: str = "RGB") -> Image.Image:
    """Noise of (width, height), another for each number."""
    pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def png(number: int, size: tuple[int, int] = (12, 10)) -> bytes:
    """The same as a file."""
    file = io.BytesIO()
    picture(number, size).save(file, "PNG")
    return file.getvalue()
