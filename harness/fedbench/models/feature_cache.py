"""Each image through each frozen encoder once: features are kept in files named by what they were made of."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedbench.errors import FedbenchError
from fedbench.files import replacing
from fedbench.types import FrozenEncoder, ImageSource, Subset


def encode(
    images: ImageSource,
    encoder: FrozenEncoder,
    cache_dir: Path | None,
    batch_size: int = 256,
    device: str | torch.device = "cpu",
) -> Tensor:
    """The encoder's output for every image, float32 (n, ...) on the CPU.

    With ``cache_dir``, read from the file of an earlier run (memory-mapped) or computed and written there. A subset
    is cut out of its source's file, so long-tailed or split runs of any seed share one; without a cache only the
    subset is encoded. Images go to the encoder on ``device``.
    """
    if len(images) == 0:
        raise FedbenchError("no images to encode: the split is empty.")
    if cache_dir is None:
        return _compute(images, encoder, batch_size, device)
    if isinstance(images, Subset):
        return encode(images.source, encoder, cache_dir, batch_size, device)[images.indices]
    # Other devices round otherwise, and numbers must not depend on which one filled the cache.
    kind = torch.device(device).type
    key = hashlib.sha256(f"{images.content_hash()} {encoder.key} {kind}".encode()).hexdigest()
    file = cache_dir / f"{key}.safetensors"
    if file.exists():
        return _read(file, key, len(images))
    features = _compute(images, encoder, batch_size, device)
    with replacing(file, "feature cache") as temporary:
        save_file({"features": features}, temporary, {"key": key, "sha256": _checksum(features)})
    return features


def _compute(images: ImageSource, encoder: FrozenEncoder, batch_size: int, device: str | torch.device) -> Tensor:
    features = torch.empty(0)
    for index in torch.split(torch.arange(len(images)), batch_size):
        with torch.no_grad():
            part = encoder(images.read(index).to(device)).float().cpu()
        if index[0] == 0:
            features = torch.empty(len(images), *part.shape[1:])
        features[index[0] : index[-1] + 1] = part
    return features


def _checksum(features: Tensor) -> str:
    return hashlib.sha256(features.flatten().numpy().data).hexdigest()


def _read(file: Path, key: str, count: int) -> Tensor:
    try:
        with safe_open(file, framework="pt") as stored:
            said = stored.metadata() or {}
            features: Tensor = stored.get_tensor("features")
    except (OSError, SafetensorError) as error:
        raise _corrupt(file, str(error)) from error
    if features.shape[0] != count or features.dtype != torch.float32:
        raise _corrupt(file, f"{count} float32 rows expected, found {features.shape[0]} of {features.dtype}")
    if said.get("key") != key or said.get("sha256") != _checksum(features):
        raise _corrupt(file, "its checksum or its name doesn't fit its content")
    return features


def _corrupt(file: Path, reason: str) -> FedbenchError:
    return FedbenchError(f"the feature cache {str(file)!r} is damaged ({reason}); delete it and run again.")
