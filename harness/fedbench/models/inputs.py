"""Samples as a model takes them: cached features of a frozen encoder, or images transformed batch by batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedbench.types import ImageSource


class InputSource(Protocol):
    """Float inputs that can be read by index and narrowed to a client's samples."""

    @property
    def is_image(self) -> bool:
        """Whether the inputs are images, which may be augmented."""
        ...

    def __len__(self) -> int: ...

    def read(self, indices: Tensor) -> Tensor:
        """Inputs at ``indices`` (int64, (b,)), shape (b, ...) float32."""
        ...

    def select(self, indices: Tensor) -> InputSource:
        """The samples at ``indices`` (int64, (m,)) as a source of their own."""
        ...


@dataclass(frozen=True, eq=False)
class FeatureInputs:
    """Encoded samples in memory: float32 (n, ...)."""

    features: Tensor
    is_image: bool = False

    def __len__(self) -> int:
        return int(self.features.shape[0])

    def read(self, indices: Tensor) -> Tensor:
        """float32 (b, ...)."""
        return self.features[indices.to(self.features.device)]

    def select(self, indices: Tensor) -> FeatureInputs:
        """A copy of the chosen rows, so that a client's samples lie together."""
        return FeatureInputs(self.read(indices))


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
        """float32 (b, 3, height, width)."""
        chosen = indices if self.indices is None else self.indices[indices]
        return self.transform(self.images.read(chosen).to(self.device)).contiguous(memory_format=torch.channels_last)

    def select(self, indices: Tensor) -> ImageInputs:
        """The same images, by the composed index."""
        chosen = indices if self.indices is None else self.indices[indices]
        return ImageInputs(self.images, self.transform, self.device, chosen)
