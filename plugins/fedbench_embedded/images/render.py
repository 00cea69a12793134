"""From attributes to pixels: every image is painted at 64 x 64 and box-averaged to 32 x 32."""

import numpy as np
from numpy.typing import NDArray

from fedbench_embedded.images import attributes as attr
from fedbench_embedded.images.attributes import Attributes
from fedbench_embedded.images.geometry import Plane, length, rounded
from fedbench_embedded.images.scene import (
    BACKGROUND_RGB,
    COLOUR_RGB,
    GRID_X,
    GRID_Y,
    PIXEL,
    Scene,
    blend,
    by_domain,
    coverage,
    noise,
    pattern,
    place,
    smooth_noise,
    texture,
    uniform,
)

Picture = NDArray[np.float32]


def chosen_colour(rng: np.random.Generator, palette: NDArray[np.float32], index: NDArray[np.int64]) -> Picture:
    """The named colour of each image, slightly varied (n, 3, 1, 1)."""
    return (palette[index] + 0.05 * noise(rng, len(index), 3))[:, :, None, None]


def brightness(picture: Picture) -> Plane:
    """Mean of the three colour planes, in a fixed order of additions."""
    return (picture[:, 0] + picture[:, 1] + picture[:, 2]) * np.float32(1 / 3)


def paint_ground(rng: np.random.Generator, scene: Scene, coarse: Plane, fine: Plane) -> Picture:
    """The background: colour, and for photos and paintings a light gradient and texture."""
    count = len(scene.attributes)
    colour = chosen_colour(rng, BACKGROUND_RGB, scene.attributes.background)
    gradient = uniform(rng, count, -0.2, 0.2) * GRID_X + uniform(rng, count, -0.2, 0.2) * GRID_Y
    light = 1 + by_domain(scene.attributes, 1, 1, 0, 0) * gradient
    return colour * light[:, None] + 0.1 * texture(rng, scene, coarse, fine)[:, None]


def add_distractors(rng: np.random.Generator, scene: Scene, picture: Picture) -> Picture:
    """Up to two small discs, squares or long lines beside or behind the object."""
    count = len(scene.attributes)
    is_sketch = scene.attributes.domain == attr.SKETCH
    for number in range(2):
        x, y = uniform(rng, count, -0.95, 0.95), uniform(rng, count, -0.95, 0.95)
        radius, direction = uniform(rng, count, 0.08, 0.2), uniform(rng, count, 0, 3.14)
        kind, colour_index = attr.below(rng, count, 3)[:, None, None], attr.below(rng, count, len(attr.COLOURS))
        round_mark = length(GRID_X - x, GRID_Y - y) - radius
        square_mark = np.maximum(np.abs(GRID_X - x), np.abs(GRID_Y - y)) - radius
        line = np.abs(GRID_X * rounded(np.cos, direction) + GRID_Y * rounded(np.sin, direction) - x) - np.float32(0.04)
        distance = np.where(kind == 0, round_mark, np.where(kind == 1, square_mark, line))
        outline = coverage(np.abs(distance) - np.float32(0.015)) * np.float32(0.6)
        cover = np.where(is_sketch[:, None, None], outline, coverage(distance))
        cover = cover * (scene.attributes.distractors > number)[:, None, None]
        colour = np.where(is_sketch[:, None], np.float32(0.3), COLOUR_RGB[colour_index] * np.float32(0.9))
        picture = blend(picture, colour[:, :, None, None], cover)
    return picture


def add_shadow(scene: Scene, picture: Picture) -> Picture:
    """The soft shadow of the object, down and to the right, on photos."""
    is_photo = np.flatnonzero(scene.attributes.domain == attr.PHOTO)
    shadow = coverage(np.roll(scene.distance[is_photo], (3, 3), (1, 2)), 8 * PIXEL) * np.float32(0.35)
    picture[is_photo] = picture[is_photo] * (1 - shadow)[:, None]
    return picture


def add_object(rng: np.random.Generator, scene: Scene, picture: Picture, coarse: Plane, painted: Plane) -> Picture:
    """The object in its colour, pattern and shading; cartoons get a dark outline."""
    count, domain = len(scene.attributes), scene.attributes.domain
    colour = chosen_colour(rng, COLOUR_RGB, scene.attributes.colour)
    light = uniform(rng, count, 0.3, 1)
    shade = np.zeros_like(coarse)
    photo, painting = np.flatnonzero(domain == attr.PHOTO), np.flatnonzero(domain == attr.PAINTING)
    depth = np.minimum(np.maximum(scene.distance[photo] / scene.scale[photo] * -1.5, 0), np.float32(0.6))
    slope = (scene.v[photo] * 0.6 + scene.u[photo] * 0.3) * light[photo]
    shade[photo] = 0.35 * depth + 0.25 * slope + 0.10 * coarse[photo]
    shade[painting] = 0.16 * scene.wave_y[painting] + 0.07 * coarse[painting]
    mark = np.where(brightness(colour) > 0.55, np.float32(0.1), np.float32(0.95))[:, None]
    surface = colour * (1 + shade)[:, None]
    surface = blend(surface, np.broadcast_to(mark, (count, 3, 1, 1)), 0.55 * painted)
    picture = blend(picture, surface, scene.inside)
    cartoon = np.flatnonzero(domain == attr.CARTOON)
    outline = coverage(np.abs(scene.distance[cartoon]) - np.float32(0.045))
    picture[cartoon] = blend(picture[cartoon], np.full((1, 3, 1, 1), 0.05, np.float32), outline)
    return picture


def redraw_sketches(
    rng: np.random.Generator, scene: Scene, picture: Picture, ground: Picture, fine: Plane, painted: Plane
) -> Picture:
    """Sketches keep nothing of the colours: gray outline, hatching or pattern, and faint edges of the ground."""
    count = len(scene.attributes)
    thickness, lean = uniform(rng, count, 0.02, 0.045), uniform(rng, count, 0.4, 1.6)
    darkness = uniform(rng, count, 0, 0.5)
    chosen = np.flatnonzero(scene.attributes.domain == attr.SKETCH)
    inside, marks = scene.inside[chosen], painted[chosen]
    pressure = np.minimum(np.maximum(0.75 + 0.35 * scene.wave_x[chosen], 0.25), 1)
    line = coverage(np.abs(scene.distance[chosen]) - thickness[chosen]) * pressure
    is_plain = (scene.attributes.pattern[chosen] == 0)[:, None, None]
    hatching = (rounded(np.sin, 26 * (GRID_X + GRID_Y * lean[chosen])) > 0.35) * darkness[chosen]
    filling = inside * np.where(is_plain, hatching, marks * np.float32(0.5))
    level = brightness(ground[chosen])
    edges = np.zeros_like(level)
    edges[:, :, 1:] += np.abs(level[:, :, 1:] - level[:, :, :-1])
    edges[:, 1:] += np.abs(level[:, 1:] - level[:, :-1])
    hint = np.minimum(edges * 3, 0.5) * (1 - inside)
    graphite = np.minimum(line + filling + hint, 1)
    paper = 0.93 + 0.03 * fine[chosen]
    picture[chosen] = (paper * (1 - 0.8 * graphite))[:, None]
    return picture


def add_occluder(rng: np.random.Generator, scene: Scene, picture: Picture) -> Picture:
    """A straight bar across the object of the images marked as occluded."""
    count, domain = len(scene.attributes), scene.attributes.domain
    offset, direction = uniform(rng, count, -0.6, 0.6), uniform(rng, count, 0, 3.14)
    half_width, colour = uniform(rng, count, 0.07, 0.16), rng.random((count, 3), dtype=np.float32) * np.float32(0.8)
    chosen = np.flatnonzero(scene.attributes.occluded == 1)
    x, y = GRID_X - scene.centre_x[chosen], GRID_Y - scene.centre_y[chosen]
    across = x * rounded(np.cos, direction[chosen]) + y * rounded(np.sin, direction[chosen])
    cover = coverage(np.abs(across - offset[chosen] * scene.scale[chosen]) - half_width[chosen])
    paint = np.where((domain == attr.SKETCH)[:, None], np.float32(0.75), colour)[chosen]
    picture[chosen] = blend(picture[chosen], paint[:, :, None, None], cover)
    return picture


def brush_paintings(rng: np.random.Generator, scene: Scene, picture: Picture) -> Picture:
    """Paintings: brush strokes, and colours drawn towards a few levels."""
    count = len(scene.attributes)
    run, rise = uniform(rng, count, -1, 1), uniform(rng, count, -1, 1)
    chosen = np.flatnonzero(scene.attributes.domain == attr.PAINTING)
    strokes = rounded(np.sin, 20 * (GRID_X * run[chosen] + GRID_Y * rise[chosen]) + 3 * scene.wave_x[chosen])
    brushed = picture[chosen] + 0.10 * strokes[:, None]
    picture[chosen] = np.round(brushed * 6) * np.float32(0.1) + brushed * np.float32(0.4)
    return picture


def photograph(rng: np.random.Generator, attributes: Attributes, picture: Picture) -> NDArray[np.uint8]:
    """Average to 32 x 32, change the contrast and exposure of photos, add noise, round: (n, 3, 32, 32)."""
    count = len(attributes)
    small = picture[:, :, 0::2, 0::2] + picture[:, :, 0::2, 1::2]
    small = small + picture[:, :, 1::2, 0::2]
    small = (small + picture[:, :, 1::2, 1::2]) * np.float32(0.25)
    contrast, exposure = uniform(rng, count, 0.55, 1.1)[..., None], uniform(rng, count, -0.12, 0.12)[..., None]
    is_photo = (attributes.domain == attr.PHOTO)[:, None, None, None]
    small = np.where(is_photo, (small - np.float32(0.5)) * contrast + np.float32(0.5) + exposure, small)
    small = small + by_domain(attributes, 0.05, 0.03, 0.01, 0.025)[..., None] * noise(rng, *small.shape)
    pixels: NDArray[np.uint8] = (np.minimum(np.maximum(small, 0), 1) * 255).astype(np.uint8)
    return pixels


def render(rng: np.random.Generator, attributes: Attributes) -> NDArray[np.uint8]:
    """Paint one image for each set of attributes: uint8 (n, 3, 32, 32)."""
    count = len(attributes)
    scene = place(rng, attributes)
    coarse, fine = smooth_noise(rng, count, 4), smooth_noise(rng, count, 16)
    painted = pattern(rng, scene)
    ground = add_distractors(rng, scene, paint_ground(rng, scene, coarse, fine))
    picture = add_object(rng, scene, add_shadow(scene, ground.copy()), coarse, painted)
    picture = redraw_sketches(rng, scene, picture, ground, fine, painted)
    picture = add_occluder(rng, scene, picture)
    picture = brush_paintings(rng, scene, picture)
    return photograph(rng, attributes, picture)
