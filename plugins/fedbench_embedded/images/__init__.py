"""The embedded data set: 32 x 32 images of twenty shapes in four styles, rendered from a seed with numpy alone.

>>> data = generate(seed=1, count=400, classes=TEN_CLASSES, sampling=Sampling(balanced=True))
>>> data.images.shape
(400, 3, 32, 32)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedbench_embedded.images.attributes import (
    CARTOON,
    CLASSNAMES,
    DOMAINS,
    MID,
    PLAIN,
    Attributes,
    Difficulty,
    Sampling,
    sample_attributes,
)
from fedbench_embedded.images.render import render

__all__ = [
    "CARTOON",
    "CLASSNAMES",
    "DOMAINS",
    "GENERATOR_VERSION",
    "MID",
    "PLAIN",
    "TEN_CLASSES",
    "TWENTY_CLASSES",
    "UNBALANCED",
    "Attributes",
    "Difficulty",
    "Rendered",
    "Sampling",
    "generate",
]

GENERATOR_VERSION = 1
"""Raised whenever a seed would give other pixels, labels or attributes than before."""

TEN_CLASSES = tuple(range(10))
TWENTY_CLASSES = tuple(range(20))

UNBALANCED = Sampling()
"""Classes and domains at random, all equally likely."""

# The random stream starts anew every CHUNK images, so the chunk is part of the data set's identity: image k
# depends on the seed and on k div CHUNK, never on how many images are requested.
CHUNK = 50


@dataclass(frozen=True)
class Rendered:
    """Images with what they show."""

    images: NDArray[np.uint8]
    """(n, 3, 32, 32)"""
    labels: NDArray[np.int64]
    """Index into CLASSNAMES (n,)."""
    domains: NDArray[np.int64]
    """Index into DOMAINS (n,)."""
    attributes: Attributes
    """Everything that was drawn at random by name: colour, size, background, ..."""


def generate(
    seed: int,
    count: int,
    classes: Sequence[int] = TWENTY_CLASSES,
    *,
    sampling: Sampling = UNBALANCED,
    difficulty: Difficulty = MID,
) -> Rendered:
    """Render `count` images of the given classes; the first images of a longer data set are those of a shorter one."""
    images, parts = [], []
    for start in range(0, count, CHUNK):
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, start])))
        attributes = sample_attributes(rng, np.arange(start, start + CHUNK), classes, sampling, difficulty)
        images.append(render(rng, attributes))
        parts.append(attributes)
    attributes = Attributes.join(parts).take(slice(count))
    return Rendered(np.concatenate(images)[:count], attributes.shape, attributes.domain, attributes)
