"""What an image shows: the attributes, how hard they are made, and how they are drawn at random."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedbench_embedded.images.shapes import SHAPES

Integers = NDArray[np.int64]
Pairs = Literal["any", "seen", "held_out"]

CLASSNAMES: tuple[str, ...] = tuple(SHAPES)
DOMAINS = ("photo", "painting", "cartoon", "sketch")
PHOTO, PAINTING, CARTOON, SKETCH = range(4)
VARIANTS = 2

COLOURS = {
    "red": (205, 35, 35),
    "orange": (240, 135, 25),
    "yellow": (240, 215, 50),
    "green": (45, 160, 60),
    "cyan": (50, 200, 205),
    "blue": (40, 75, 210),
    "purple": (135, 50, 175),
    "pink": (240, 125, 180),
    "brown": (120, 75, 40),
    "gray": (130, 130, 130),
}
BACKGROUNDS = {
    "grass": (95, 150, 70),
    "sand": (215, 190, 140),
    "sky": (150, 195, 235),
    "night": (25, 28, 60),
    "brick": (165, 85, 65),
    "snow": (232, 238, 245),
    "wood": (150, 108, 66),
    "water": (50, 105, 150),
}
PATTERNS = ("plain", "striped", "dotted", "checkered")
SIZES = ("small", "medium", "large")

# One colour a shape is kept out of pretraining, twenty of the two hundred shape x colour pairs.
HELD_OUT_COLOUR: Integers = np.arange(len(CLASSNAMES)) % len(COLOURS)


@dataclass(frozen=True, kw_only=True)
class Difficulty:
    """How hard the images are made."""

    sizes: tuple[float, float, float] = (0.12, 0.44, 0.44)
    """Probability of a small, medium and large object."""
    distractors: tuple[float, float, float] = (0.55, 0.35, 0.10)
    """Probability of 0, 1 and 2 distracting marks."""
    occluder: float = 0.10
    """Probability that a bar covers part of the object."""


MID = Difficulty()
PLAIN = Difficulty(sizes=(0.0, 0.0, 1.0), distractors=(1.0, 0.0, 0.0), occluder=0.0)
"""Large objects and nothing else: what a small network learns from a few hundred images."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Which images are drawn, apart from their difficulty."""

    balanced: bool = False
    """Classes and domains in a fixed cycle (image k: class k mod C, domain k div C mod D) instead of at random."""
    domains: tuple[int, ...] = (PHOTO, PAINTING, CARTOON, SKETCH)
    """The D domains of the cycle."""
    class_weights: tuple[float, ...] | None = None
    """Relative frequency of each requested class; None: equal."""
    domain_weights: tuple[float, float, float, float] = (0.25, 0.25, 0.25, 0.25)
    """Relative frequency of photo, painting, cartoon, sketch."""
    pairs: Pairs = "any"
    """Shape x colour pairs: all, only those allowed in pretraining, or only those kept out of it."""


@dataclass(frozen=True)
class Attributes:
    """Attributes of n images, each an int64 array (n,)."""

    shape: Integers
    variant: Integers
    colour: Integers
    pattern: Integers
    size: Integers
    domain: Integers
    background: Integers
    distractors: Integers
    occluded: Integers

    def __len__(self) -> int:
        return len(self.shape)

    def take(self, index: NDArray[np.int64] | NDArray[np.bool_] | slice) -> "Attributes":
        """The attributes of the chosen images."""
        return Attributes(*(getattr(self, field.name)[index] for field in fields(self)))

    @staticmethod
    def join(parts: "Sequence[Attributes]") -> "Attributes":
        """All images of several parts, in order."""
        return Attributes(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Attributes)))


def held_out(attributes: Attributes) -> NDArray[np.bool_]:
    """Whether each image shows a shape x colour pair that is kept out of pretraining (n,)."""
    kept_out: NDArray[np.bool_] = attributes.colour == HELD_OUT_COLOUR[attributes.shape]
    return kept_out


def choose(rng: np.random.Generator, count: int, weights: Sequence[float]) -> Integers:
    """Draw `count` indices with the given relative weights (count,).

    Written out, because only the raw uniform stream of a generator is stable across numpy versions.
    """
    edges = np.cumsum(np.asarray(weights, np.float64))
    return np.searchsorted(edges[:-1] / edges[-1], rng.random(count), side="right").astype(np.int64)


def below(rng: np.random.Generator, count: int, bound: int) -> Integers:
    """Draw `count` integers from 0 to bound - 1 (count,)."""
    return np.floor(rng.random(count) * bound).astype(np.int64)


def sample_attributes(
    rng: np.random.Generator, positions: Integers, classes: Sequence[int], sampling: Sampling, difficulty: Difficulty
) -> Attributes:
    """Draw the attributes of the images at `positions` (n,) of the data set."""
    count, labels = len(positions), np.asarray(classes, np.int64)
    drawn_shape = labels[choose(rng, count, sampling.class_weights or (1.0,) * len(labels))]
    drawn_domain = choose(rng, count, sampling.domain_weights)
    shape = labels[positions % len(labels)] if sampling.balanced else drawn_shape
    cycle = np.asarray(sampling.domains, np.int64)
    domain = cycle[positions // len(labels) % len(cycle)] if sampling.balanced else drawn_domain
    kept_out = HELD_OUT_COLOUR[shape]
    if sampling.pairs == "any":
        colour = below(rng, count, len(COLOURS))
    else:
        colour = below(rng, count, len(COLOURS) - 1)
        colour = kept_out if sampling.pairs == "held_out" else colour + (colour >= kept_out)
    return Attributes(
        shape=shape,
        variant=below(rng, count, VARIANTS),
        colour=colour,
        pattern=choose(rng, count, (0.55, 0.15, 0.15, 0.15)),
        size=choose(rng, count, difficulty.sizes),
        domain=domain,
        background=below(rng, count, len(BACKGROUNDS)),
        distractors=choose(rng, count, difficulty.distractors),
        occluded=(rng.random(count) < difficulty.occluder).astype(np.int64),
    )
