"""The scene on a 64 x 64 canvas: where the object is, its pattern, and the texture of its background.

Pictures are float32 arrays (n, 3, 64, 64) with values about [0, 1], planes are (n, 64, 64), and values drawn once
an image are (n, 1, 1). All of a chunk's images run through the same random draws, whatever they show, so an
image depends only on the seed, its chunk and its attributes.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedbench_embedded.images import attributes as attr
from fedbench_embedded.images.attributes import Attributes
from fedbench_embedded.images.geometry import Plane, rounded
from fedbench_embedded.images.shapes import SHAPES

IMAGE_SIZE = 32
CANVAS = 2 * IMAGE_SIZE
PIXEL = 2 / CANVAS

_line = (np.arange(CANVAS, dtype=np.float32) + np.float32(0.5)) * np.float32(PIXEL) - 1
GRID_X: Plane = np.ascontiguousarray(np.broadcast_to(_line, (1, CANVAS, CANVAS)))
GRID_Y: Plane = np.ascontiguousarray(-_line[:, None] + np.zeros((1, CANVAS, CANVAS), np.float32))

COLOUR_RGB: NDArray[np.float32] = np.array(list(attr.COLOURS.values()), np.float32) / np.float32(255)
BACKGROUND_RGB: NDArray[np.float32] = np.array(list(attr.BACKGROUNDS.values()), np.float32) / np.float32(255)
_DRAW_SHAPE = tuple(SHAPES.values())


@dataclass(frozen=True)
class Scene:
    """A chunk of placed objects."""

    attributes: Attributes
    u: Plane
    """Object coordinate to its right (n, 64, 64)."""
    v: Plane
    """Object coordinate upwards."""
    distance: Plane
    """Signed distance to the object's outline, in canvas units."""
    inside: Plane
    """Share of each pixel that the object covers, 0 to 1."""
    centre_x: Plane
    centre_y: Plane
    scale: Plane
    wave_x: Plane
    """Smooth noise with unit variance at its knots, also used to bend the outline."""
    wave_y: Plane


def uniform(rng: np.random.Generator, count: int, low: float, high: float) -> Plane:
    """One number an image, uniform in [low, high): (count, 1, 1)."""
    return low + np.float32(high - low) * rng.random((count, 1, 1), dtype=np.float32)


def noise(rng: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    """Triangular noise with mean 0 and variance 1 (the sum of two uniforms: exact everywhere, unlike a normal)."""
    return (rng.random(shape, dtype=np.float32) + rng.random(shape, dtype=np.float32) - 1) * np.float32(math.sqrt(6))


def smooth_noise(rng: np.random.Generator, count: int, cells: int) -> Plane:
    """Noise on cells + 1 knots a side, smoothly interpolated (count, 64, 64)."""
    knots = noise(rng, count, cells + 1, cells + 1)
    position = (np.arange(CANVAS, dtype=np.float32) + np.float32(0.5)) * np.float32(cells / CANVAS)
    cell = np.minimum(np.floor(position).astype(np.int64), cells - 1)
    weight = position - cell.astype(np.float32)
    weight = weight * weight * (3 - 2 * weight)
    rows = knots[:, cell] * (1 - weight)[:, None] + knots[:, cell + 1] * weight[:, None]
    waves: Plane = rows[:, :, cell] * (1 - weight) + rows[:, :, cell + 1] * weight
    return waves


def coverage(distance: Plane, softness: float = 2 * PIXEL) -> Plane:
    """Share of a pixel inside an outline, from the distance of its centre; `softness` is the ramp's width."""
    cover: Plane = np.minimum(np.maximum(0.5 - distance * (1 / softness), 0), 1)
    return cover


def by_domain(attributes: Attributes, photo: float, painting: float, cartoon: float, sketch: float) -> Plane:
    """A constant chosen by each image's domain (n, 1, 1)."""
    return np.array([photo, painting, cartoon, sketch], np.float32)[attributes.domain][:, None, None]


def blend(picture: NDArray[np.float32], paint: NDArray[np.float32], cover: Plane) -> NDArray[np.float32]:
    """Paint (n, 3, 1, 1) or (n, 3, 64, 64) over a picture where `cover` (n, 64, 64) says so."""
    return picture + (paint - picture) * cover[:, None]


def place(rng: np.random.Generator, attributes: Attributes) -> Scene:
    """Put each object somewhere on its canvas: size, position, rotation, flip, stretch, shear and a wobbly outline."""
    count = len(attributes)
    radius = np.array([0.42, 0.6, 0.82], np.float32)[attributes.size][:, None, None]
    scale = radius * uniform(rng, count, 0.88, 1.12)
    room = np.maximum(1.05 - scale, 0.05) * 0.8
    centre_x, centre_y = uniform(rng, count, -1, 1) * room, uniform(rng, count, -1, 1) * room
    angle = uniform(rng, count, -0.5, 0.5)
    flip = np.where(uniform(rng, count, 0, 1) < 0.5, np.float32(-1), np.float32(1))
    stretch_u, stretch_v = uniform(rng, count, 0.85, 1.2), uniform(rng, count, 0.85, 1.2)
    shear, knob = uniform(rng, count, -0.15, 0.15), uniform(rng, count, 0, 1)
    wave_x, wave_y = smooth_noise(rng, count, 5), smooth_noise(rng, count, 5)
    wobble = by_domain(attributes, 0.03, 0.09, 0.015, 0.06)
    x, y = (GRID_X - centre_x + wobble * wave_x) / scale, (GRID_Y - centre_y + wobble * wave_y) / scale
    cosine, sine = rounded(np.cos, angle), rounded(np.sin, angle)
    u = (cosine * x + sine * y) * (flip * stretch_u)
    v = (cosine * y - sine * x) * stretch_v + shear * u
    distance = np.empty_like(u)
    for kind in np.unique(attributes.shape * attr.VARIANTS + attributes.variant):
        shape, variant = divmod(int(kind), attr.VARIANTS)
        chosen = np.flatnonzero((attributes.shape == shape) & (attributes.variant == variant))
        distance[chosen] = _DRAW_SHAPE[shape](u[chosen], v[chosen], knob[chosen], variant)
    distance = distance * scale
    return Scene(attributes, u, v, distance, coverage(distance), centre_x, centre_y, scale, wave_x, wave_y)


def pattern(rng: np.random.Generator, scene: Scene) -> Plane:
    """Where the object's pattern is painted, 0 or 1."""
    count = len(scene.attributes)
    frequency, phase = uniform(rng, count, 5, 7), uniform(rng, count, 0, 6)
    painted = np.zeros_like(scene.u)
    for kind in (1, 2, 3):
        chosen = np.flatnonzero(scene.attributes.pattern == kind)
        f, p, u, v = frequency[chosen], phase[chosen], scene.u[chosen], scene.v[chosen]
        if kind == 1:
            painted[chosen] = rounded(np.sin, f * 1.6 * (u + 0.4 * v) + p) > 0
        elif kind == 2:
            painted[chosen] = rounded(np.cos, f * 1.7 * u + p) + rounded(np.cos, f * 1.7 * v + p) > 0.9
        else:
            painted[chosen] = rounded(np.sin, f * 1.3 * u + p) * rounded(np.sin, f * 1.3 * v + p) > 0
    return painted


def texture(rng: np.random.Generator, scene: Scene, coarse: Plane, fine: Plane) -> Plane:
    """The background's texture, about [-1, 1]; photos and paintings only, zero elsewhere."""
    frequency = uniform(rng, len(scene.attributes), 8, 14)
    grain = np.zeros_like(fine)
    textured = scene.attributes.domain <= attr.PAINTING
    for kind, name in enumerate(attr.BACKGROUNDS):
        chosen = np.flatnonzero(textured & (scene.attributes.background == kind))
        k, soft = frequency[chosen], fine[chosen]
        if name == "brick":
            row = np.floor(k * GRID_Y * np.float32(0.7 / math.pi)) * np.float32(math.pi / 2)
            bed = np.abs(rounded(np.sin, k * 0.7 * GRID_Y)) < 0.25
            joint = np.abs(rounded(np.sin, k * 0.5 * GRID_X + row)) < 0.2
            grain[chosen] = np.where(bed | joint, np.float32(-0.9), np.float32(0))
        elif name == "wood":
            grain[chosen] = rounded(np.sin, k * 1.2 * GRID_Y + 1.5 * coarse[chosen]) * 0.7
        elif name == "water":
            grain[chosen] = rounded(np.sin, k * GRID_Y + 2 * scene.wave_x[chosen]) * 0.6
        elif name == "night":
            grain[chosen] = np.where(soft > 1.9, np.float32(4), np.float32(0))
        else:
            grain[chosen] = soft * (1.2 if name == "grass" else 0.35)
        grain[chosen] += 0.6 * coarse[chosen]
    return grain
