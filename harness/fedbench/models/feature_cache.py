"""A cache of features: each image goes through each frozen encoder once. Files are named by a hash of their inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from fedbench.core.errors import FedbenchError
from fedbench.core.federation import ImageSource, Subset
from fedbench.core.types import FrozenEncoder
from fedbench.datasets.cache import Content, damaged, kept

_KIND = "feature cache"
_KEPT = (torch.float32, torch.float16)


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

    features = kept(file, _KIND, make, _fault)[0]["features"]
    if features.shape[0] != len(images):
        raise damaged(file, _KIND, f"{len(images)} rows expected, found {features.shape[0]}")
    return features


def _compute(images: ImageSource, encoder: FrozenEncoder, batch_size: int, device: str | torch.device) -> Tensor:
    features = torch.empty(0)
    for index in torch.split(torch.arange(len(images)), batch_size):
        with torch.no_grad():
            part = _as_kept(encoder(images.read(index).to(device))).cpu()
        if index[0] == 0:
            features = torch.empty(len(images), *part.shape[1:], dtype=part.dtype)
        features[index[0] : index[-1] + 1] = part
    return features


def _as_kept(features: Tensor) -> Tensor:
    return features if features.dtype in _KEPT else features.float()


def _checksum(features: Tensor) -> str:
    return hashlib.sha256(features.flatten().numpy().data).hexdigest()


def _shape(features: Tensor) -> str:
    return f"{list(features.shape)} {features.dtype}"


def _fault(file: Path, content: Content) -> str:
    tensors, header = content
    features = tensors.get("features")
    if features is None or features.dtype not in _KEPT:
        return "it holds no float32 or float16 features"
    if header.get("key") != file.stem or header.get("sha256") != _checksum(features):
        return "its checksum or its name doesn't fit its content"
    if header.get("shape") != _shape(features):
        return "its shape is not the one that was written"
    return ""
