"""Samples as a model takes them: cached features of a frozen encoder, or images transformed batch by batch.

Each image goes through each frozen encoder once; the files of features are named by a hash of their inputs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from fedbench.core.arithmetic import float32_products
from fedbench.core.errors import FedbenchError
from fedbench.core.federation import ImageSource, Subset, TensorImages
from fedbench.core.types import FrozenEncoder, InputSource
from fedbench.datasets.cache import Content, damaged, kept
from fedbench.scenarios.partitions.feature_skew import Joined

_CACHE = "feature cache"
_KEPT_TYPES = (torch.float32, torch.float16)
SIDE_BY_SIDE = 2
"""The most batches that are encoded at once on a CPU; one of a ViT-B/16 takes more than a gigabyte."""
RESIDENT_BYTES = 256 * 2**20
"""The most bytes of a client's transformed images that are kept while it trains."""


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


def encode(
    images: ImageSource,
    encoder: FrozenEncoder,
    cache_dir: Path | None,
    batch_size: int = 256,
    device: str | torch.device = "cpu",
    check: Callable[[], None] = lambda: None,
) -> Tensor:
    """The encoder's output for every image, (n, ...) on the CPU; not to be changed in place.

    float16 where that is what the encoder gives, in memory as in the file; else float32.

    With ``cache_dir``, read from the file of an earlier run (memory-mapped, one tensor for all runs of a process) or
    computed and written there, by one process while others that need the same wait. A subset is cut out of its
    source's file, so long-tailed or split runs of any seed share one; without a cache only the subset is encoded.
    Images go to the encoder on ``device``. ``check`` is called before and after a file's features are computed, and may
    raise: then there will be none.
    """
    if len(images) == 0:
        raise FedbenchError("no images to encode: the split is empty.")
    if cache_dir is None:
        return _compute(images, encoder, batch_size, device)
    if isinstance(images, Subset):
        return encode(images.source, encoder, cache_dir, batch_size, device, check)[images.indices]
    # Other devices round otherwise, and numbers must not depend on which one filled the cache.
    kind = torch.device(device).type
    key = hashlib.sha256(f"{images.content_hash()} {encoder.key} {kind}".encode()).hexdigest()
    file = cache_dir / f"{key}.safetensors"

    def make() -> Content:
        check()
        features = _compute(images, encoder, batch_size, device)
        check()
        return {"features": features}, {"key": key, "sha256": _checksum(features), "shape": _shape(features)}

    features = kept(file, _CACHE, make, _fault)[0]["features"]
    if features.shape[0] != len(images):
        raise damaged(file, _CACHE, f"{len(images)} rows expected, found {features.shape[0]}")
    return features


def _compute(images: ImageSource, encoder: FrozenEncoder, batch_size: int, device: str | torch.device) -> Tensor:
    def encoded(index: Tensor) -> Tensor:
        with torch.no_grad():
            return _as_kept(encoder(images.read(index).to(device))).cpu()

    batches = torch.split(torch.arange(len(images)), batch_size)
    features = torch.empty(0)
    side_by_side = SIDE_BY_SIDE if torch.device(device).type == "cpu" else 1
    # whatever the run's precision, for other runs read them
    with float32_products("float32"), ThreadPoolExecutor(side_by_side) as threads:
        for index, part in zip(batches, threads.map(encoded, batches), strict=True):
            if index[0] == 0:
                features = torch.empty(len(images), *part.shape[1:], dtype=part.dtype)
            features[index[0] : index[-1] + 1] = part
    return features


def _as_kept(features: Tensor) -> Tensor:
    return features if features.dtype in _KEPT_TYPES else features.float()


def _checksum(features: Tensor) -> str:
    return hashlib.sha256(features.flatten().numpy().data).hexdigest()


def _shape(features: Tensor) -> str:
    return f"{list(features.shape)} {features.dtype}"


def _fault(file: Path, content: Content) -> str:
    tensors, header = content
    features = tensors.get("features")
    if features is None or features.dtype not in _KEPT_TYPES:
        return "it holds no float32 or float16 features"
    if header.get("key") != file.stem or header.get("sha256") != _checksum(features):
        return "its checksum or its name doesn't fit its content"
    if header.get("shape") != _shape(features):
        return "its shape is not the one that was written"
    return ""


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
        return FeatureInputs(self.features, self.rows_of(indices), self.is_image)

    def resident(self) -> FeatureInputs:
        """The same samples, with their indices on the table's device."""
        if self.rows is None:
            return self
        return FeatureInputs(self.features, self.rows.to(self.features.device), self.is_image)

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
        return UncachedFeatures(self.images, self.encoder, self.device, chosen, self.is_image)

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
            source = self(images.source)
            return images if source is images.source else Subset(source, images.indices.to(self._device))
        if isinstance(images, Joined):
            return Joined(self(images.first), self(images.second))
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
        pixels = self.images.read(self.rows_of(indices)).to(self.device)
        return self.transform(pixels).contiguous(memory_format=torch.channels_last)

    def select(self, indices: Tensor) -> ImageInputs:
        return ImageInputs(self.images, self.transform, self.device, self.rows_of(indices))

    def rows_of(self, indices: Tensor) -> Tensor:
        """The images of the source at ``indices`` (b,), int64 (b,)."""
        return indices if self.indices is None else self.indices[indices]

    def resident(self) -> InputSource:
        """All images transformed, if they fit into ``RESIDENT_BYTES``; else the images unchanged.

        A client then transforms its images once a round instead of once an epoch.
        """
        first = self.read(torch.arange(min(1, len(self))))
        if len(self) * first.numel() * first.element_size() > RESIDENT_BYTES:
            return self
        return FeatureInputs(self.read(torch.arange(len(self))), is_image=True)
