"""Transforms of uint8 images into the float batch that a network takes, on the images' device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class PixelTransform:
    """Resize to ``size`` where it differs, then normalise each channel. ``size`` None keeps the images' size.

    ``shortest`` scales the shorter side and crops the centre (CLIP's), ``squash`` ignores the aspect ratio.
    """

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    size: int | None = None
    mode: Literal["shortest", "squash"] = "shortest"
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"

    def __call__(self, pixels: Tensor) -> Tensor:
        """Transform (b, 3, h, w) uint8 to (b, 3, size, size) float32."""
        scale, shift = _scale_and_shift(self.mean, self.std, pixels.device)
        return torch.addcmul(shift, self._resized(pixels).float(), scale)

    def _resized(self, pixels: Tensor) -> Tensor:
        size = self.size
        if size is None or pixels.shape[-2:] == (size, size):
            return pixels
        # torchvision takes longer to import than torch, and images of the right size need none of it
        from torchvision.transforms.v2 import InterpolationMode
        from torchvision.transforms.v2 import functional as images

        target = [size, size] if self.mode == "squash" else [size]
        resized: Tensor = images.resize(pixels, target, InterpolationMode(self.interpolation), antialias=True)
        if resized.shape[-2:] != (size, size):
            resized = images.center_crop(resized, [size, size])
        return resized


@dataclass(frozen=True)
class CroppedTransform(PixelTransform):
    """Resize to ``edge`` as ``mode`` says, cut ``size`` out of the centre, then normalise."""

    edge: int = 0

    def _resized(self, pixels: Tensor) -> Tensor:
        from torchvision.transforms.v2 import InterpolationMode
        from torchvision.transforms.v2 import functional as images

        assert self.size is not None
        target = [self.edge] * (2 if self.mode == "squash" else 1)
        resized = images.resize(pixels, target, InterpolationMode(self.interpolation), antialias=True)
        cut: Tensor = images.center_crop(resized, [self.size, self.size])
        return cut


@lru_cache(maxsize=32)
def _scale_and_shift(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    # (x/255 - mean)/std as one multiply-add; cached because a copy to the device at every batch would wait for it.
    deviation = torch.tensor(std, dtype=torch.float64)
    scale = 1 / (255 * deviation)
    shift = -torch.tensor(mean, dtype=torch.float64) / deviation
    return scale.float().view(3, 1, 1).to(device), shift.float().view(3, 1, 1).to(device)
