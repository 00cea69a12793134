"""Samples as a model takes them: cached features of a frozen encoder, or images transformed batch by batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbench.core.federation import ImageSource, Subset, TensorImages
from fedbench.core.types import FrozenEncoder, InputSource
from fedbench.models.feature_cache import encode

RESIDENT_BYTES = 256 * 2**20
"""The most bytes of a client's transformed images that are kept while it trains."""


@dataclass(frozen=True, eq=False)
class FeatureInputs:
    """Encoded samples in memory: all rows of ``features`` (n, ...), or those at the indices ``rows`` (m,) int64.

    ``features`` are float32 or float16; what is read is float32.
    """

    features: Tensor
    rows: Tensor | None = None
    is_image: bool = False

    def __len__(self) -> int:
        return int((self.features if self.rows is None else self.rows).shape[0])

    def read(self, indices: Tensor) -> Tensor:
        return self.features[self.rows_of(indices).to(self.features.device)].float()

    def select(self, indices: Tensor) -> FeatureInputs:
        """Compose the indices; a client's samples share the table and take no memory of their own."""
        return FeatureInputs(self.features, self.rows_of(indices))

    def resident(self) -> FeatureInputs:
        return self

    def rows_of(self, indices: Tensor) -> Tensor:
        """The table's rows of the samples at ``indices`` (b,), int64 (b,)."""
        return indices if self.rows is None else self.rows[indices]


@dataclass(frozen=True, eq=False)
class UncachedFeatures:
    """Samples that are encoded whenever they are read, for looking at a few where encoding all would take hours."""

    images: ImageSource
    encoder: FrozenEncoder
    device: torch.device
    indices: Tensor | None = None
    is_image: bool = False

    def __len__(self) -> int:
        return len(self.images) if self.indices is None else int(self.indices.shape[0])

    def read(self, indices: Tensor) -> Tensor:
        return FeatureInputs(self.table(indices).to(self.device)).read(torch.arange(len(indices)))

    def table(self, indices: Tensor) -> Tensor:
        """The rows (b, ...) with the type that the feature cache keeps."""
        chosen = indices if self.indices is None else self.indices[indices]
        return encode(Subset(self.images, chosen), self.encoder, None, device=self.device)

    def select(self, indices: Tensor) -> UncachedFeatures:
        chosen = indices if self.indices is None else self.indices[indices]
        return UncachedFeatures(self.images, self.encoder, self.device, chosen)

    def resident(self) -> UncachedFeatures:
        return self


class ImagesOnDevice:
    """Copies images in memory to ``device`` as uint8, once for all splits that share them.

    Batches are then cut out, augmented and transformed on the device. Images in files stay where they are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._there: dict[int, TensorImages] = {}

    def __call__(self, images: ImageSource) -> ImageSource:
        if self._device.type == "cpu":
            return images
        if isinstance(images, Subset):
            return Subset(self(images.source), images.indices)
        if not isinstance(images, TensorImages):
            return images
        key = id(images.pixels)
        if key not in self._there:
            self._there[key] = TensorImages(images.pixels.to(self._device))
        return self._there[key]


@dataclass(frozen=True, eq=False)
class ImageInputs:
    """Images read from their source, moved to ``device`` as uint8 and transformed there."""

    images: ImageSource
    transform: Callable[[Tensor], Tensor]
    device: torch.device
    indices: Tensor | None = None
    is_image: bool = True

    def __len__(self) -> int:
        return len(self.images) if self.indices is None else int(self.indices.shape[0])

    def read(self, indices: Tensor) -> Tensor:
        chosen = indices if self.indices is None else self.indices[indices]
        return self.transform(self.images.read(chosen).to(self.device)).contiguous(memory_format=torch.channels_last)

    def select(self, indices: Tensor) -> ImageInputs:
        chosen = indices if self.indices is None else self.indices[indices]
        return ImageInputs(self.images, self.transform, self.device, chosen)

    def resident(self) -> InputSource:
        """All images transformed, if they fit into ``RESIDENT_BYTES``; else the images unchanged.

        A client then transforms its images once a round instead of once an epoch.
        """
        first = self.read(torch.arange(min(1, len(self))))
        if len(self) * first.numel() * first.element_size() > RESIDENT_BYTES:
            return self
        return FeatureInputs(self.read(torch.arange(len(self))), is_image=True)
