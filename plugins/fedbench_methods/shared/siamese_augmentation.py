"""Differentiable siamese augmentation - Zhao and Bilen, "Dataset Condensation with Differentiable Siamese
Augmentation", ICML 2021: one random operation with one draw of its parameters for all images of a batch.

The operation is one of colour, crop, cutout, flip, scale and rotate with equal probability, in the strengths that the
CReFF family uses. Images are normalised floats (b, 3, h, w), so an empty border has the value 0, the data's mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample, pad

CROP_MARGIN, CUTOUT_SIDE = 0.125, 0.5
"""Largest shift of a crop, and side of the cut-out square, as shares of the image's side."""
LARGEST_SCALE, LARGEST_ANGLE = 1.2, math.radians(15)

Operation = Callable[[Tensor, torch.Generator], Tensor]


def augmented(images: Tensor, generator: torch.Generator) -> Tensor:
    """``images`` (b, 3, h, w) after one of ``OPERATIONS``, the same for the whole batch; a new tensor."""
    chosen = int(torch.randint(len(OPERATIONS), (1,), generator=generator))
    return OPERATIONS[chosen](images, generator)


def colour(images: Tensor, generator: torch.Generator) -> Tensor:
    """Brightness ±0.5, then saturation times 0..2, then contrast times 0.5..1.5."""
    brightness, saturation, contrast = torch.rand(3, generator=generator).tolist()
    images = images + (brightness - 0.5)
    grey = images.mean(dim=1, keepdim=True)
    images = grey + 2 * saturation * (images - grey)
    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    contrasted: Tensor = mean + (0.5 + contrast) * (images - mean)
    return contrasted


def crop(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shift by up to an eighth of the side in each direction; zeros come in."""
    height, width = images.shape[-2:]
    down, right = _share(height, CROP_MARGIN), _share(width, CROP_MARGIN)
    top, left = _integer(2 * down + 1, generator), _integer(2 * right + 1, generator)
    return pad(images, (right, right, down, down))[..., top : top + height, left : left + width]


def cutout(images: Tensor, generator: torch.Generator) -> Tensor:
    """Zeros in a square of half the side around a random point; it may reach over the border."""
    images = images.clone()
    spans = []
    for length in images.shape[-2:]:
        side = _share(length, CUTOUT_SIDE)
        start = _integer(length + 1 - side % 2, generator) - side // 2
        spans.append(slice(max(start, 0), start + side))
    images[..., spans[0], spans[1]] = 0
    return images


def flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Mirrored left to right in half the cases."""
    return images.flip(3) if _integer(2, generator) else images.clone()


def scale(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each direction zoomed by its own factor of 1/1.2..1.2."""
    low, high = 1 / LARGEST_SCALE, LARGEST_SCALE
    across, down = (low + (high - low) * torch.rand(2, generator=generator)).tolist()
    return _warped(images, [[across, 0.0, 0.0], [0.0, down, 0.0]])


def rotate(images: Tensor, generator: torch.Generator) -> Tensor:
    """Turned by up to 15 degrees either way."""
    angle = (2 * float(torch.rand(1, generator=generator)) - 1) * LARGEST_ANGLE
    cosine, sine = math.cos(angle), math.sin(angle)
    return _warped(images, [[cosine, -sine, 0.0], [sine, cosine, 0.0]])


OPERATIONS: tuple[Operation, ...] = (colour, crop, cutout, flip, scale, rotate)


def _warped(images: Tensor, matrix: list[list[float]]) -> Tensor:
    # bilinear, zeros outside; the matrix maps places in the result to places in the image, both in -1..1
    theta = torch.tensor(matrix, dtype=images.dtype, device=images.device).expand(len(images), 2, 3)
    grid = affine_grid(theta, list(images.shape), align_corners=False)
    return grid_sample(images, grid, align_corners=False)


def _share(length: int, share: float) -> int:
    return int(length * share + 0.5)


def _integer(below: int, generator: torch.Generator) -> int:
    return int(torch.randint(below, (1,), generator=generator))
