"""How the map between EfficientNet-Lite0 and MiniLM was fitted: ``python -m fedbench.models.photos.fit``.

T (1000, 384) are the texts "a photo of a {name}" of ImageNet's classes, less their mean; W (1000, 1280) the rows of
its classifier, less theirs. Ridge regression gives A = (T'T + λ tr(T'T)/384 I)^-1 T'W with λ = 3, by which a class's
text t is compared with an image's features z as t'A (z - μ). With A = U S V' both have 384 dimensions: t'US and
V'(z - μ). μ is the features' mean over ImageNet, which the last batch-norm knows: they are N(β, γ²), clipped to [0, 6].

λ was chosen by ten folds over ImageNet's own classes: of a hundred left out, 54 % find their own row first (1 % by
chance). No image, label or class name of any other data set was looked at.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import norm
from torch import Tensor

from fedbench.models.photos.lite0_minilm import LITE0, MINILM, WIDTH, joined, lite0_tensors, write_bridge

RIDGE = 3.0
TEMPLATE = "a photo of a {}"
Array = NDArray[np.float64]


def fitted() -> dict[str, Tensor]:
    """The fitted map, by the names that `joined` takes."""
    from open_clip.zero_shot_metadata import IMAGENET_CLASSNAMES

    given = {name: tensor.double().numpy() for name, tensor in lite0_tensors().items()}
    text = _texts([TEMPLATE.format(name) for name in IMAGENET_CLASSNAMES])
    mean, rows = text.mean(axis=0), given["_fc.weight"]
    centred, targets = text - mean, rows - rows.mean(axis=0)
    gram = centred.T @ centred
    ridge = RIDGE * np.trace(gram) / len(gram) * np.eye(len(gram))
    left, scales, right = np.linalg.svd(np.linalg.solve(gram + ridge, centred.T @ targets), full_matrices=False)
    features = clipped_mean(given["_bn1.bias"], np.abs(given["_bn1.weight"]))
    bridge = {"image.weight": right, "image.bias": -right @ features}
    bridge |= {"text.weight": (left * scales).T, "text.mean": mean}
    return {name: torch.from_numpy(np.ascontiguousarray(value)).float() for name, value in bridge.items()}


def clipped_mean(mean: Array, deviation: Array) -> Array:
    """E[min(max(x, 0), 6)] of x ~ N(mean, deviation²), elementwise."""

    def above(level: float) -> Any:  # E[max(x - level, 0)]
        gap = mean - level
        return gap * norm.cdf(gap / deviation) + deviation * norm.pdf(gap / deviation)

    rest: Array = above(0.0) - above(6.0)
    return rest


def _texts(texts: list[str]) -> Array:
    """MiniLM's mean over the tokens of each text, (n, 384), from the towers joined without a map."""
    nothing = {
        "image.weight": torch.zeros(WIDTH, 1280),
        "image.bias": torch.zeros(WIDTH),
        "text.weight": torch.eye(WIDTH),
        "text.mean": torch.zeros(WIDTH),
    }
    module, tokenizer = joined(nothing)
    encode: Any = module.encode_text
    with torch.no_grad():
        parts = [encode(tokenizer(texts[at : at + 100])) for at in range(0, len(texts), 100)]
    encoded: Array = torch.cat(parts).double().numpy()
    return encoded


if __name__ == "__main__":
    sources = {weights.package: weights.sha256 for weights in (LITE0, MINILM)}
    write_bridge(fitted(), {"made_by": __doc__ or "", "packages": sources})
