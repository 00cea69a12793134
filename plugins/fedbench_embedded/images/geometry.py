"""Signed distances of simple planar figures, and the arithmetic that keeps pixels equal on every CPU.

A plane is a float32 array (n, height, width); distances are negative inside a figure, in the units of the
coordinates. Only operations that IEEE 754 rounds exactly are used on planes (+ - * / sqrt floor round min max
compare). Everything else goes through `rounded`.
"""

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

Plane = NDArray[np.float32]
Point = tuple[float, float]


def rounded(function: Callable[[NDArray[np.float64]], NDArray[np.float64]], values: NDArray[Any]) -> Plane:
    """Apply a transcendental function in float64 and round to float32; same shape as `values`.

    Mathematical libraries differ in the last bits of a double; rounding to float32 hides that.
    """
    return function(values.astype(np.float64)).astype(np.float32)


def angle_of(rise: Plane, run: Plane) -> Plane:
    """Angle in radians of the direction (run, rise), elementwise, in [-pi, pi]."""
    return np.arctan2(rise.astype(np.float64), run.astype(np.float64)).astype(np.float32)


def length(x: Plane, y: Plane) -> Plane:
    """Euclidean length of (x, y), elementwise."""
    root: Plane = np.sqrt(x * x + y * y)
    return root


def disc(x: Plane, y: Plane, centre: Point, radius: float | Plane) -> Plane:
    """Distance to a disc."""
    return length(x - centre[0], y - centre[1]) - radius


def box(x: Plane, y: Plane, centre: Point, half_width: float | Plane, half_height: float) -> Plane:
    """Distance to an upright rectangle (exact inside, a lower bound near its corners)."""
    distance: Plane = np.maximum(np.abs(x - centre[0]) - half_width, np.abs(y - centre[1]) - half_height)
    return distance


def ellipse(x: Plane, y: Plane, centre: Point, half_width: float, half_height: float | Plane) -> Plane:
    """Approximate distance to an upright ellipse, exact on its outline."""
    relative = length((x - centre[0]) / half_width, (y - centre[1]) / half_height) - 1
    scale: Plane = np.minimum(half_height, np.float32(half_width))
    distance: Plane = relative * scale
    return distance


def ring(distance: Plane, half_thickness: float) -> Plane:
    """Distance to the band around the outline of another figure."""
    outline: Plane = np.abs(distance)
    return outline - half_thickness


def polygon(x: Plane, y: Plane, corners: Sequence[Point]) -> Plane:
    """Distance to a convex polygon, corners in either order (a lower bound near its corners)."""
    ends = [*corners[1:], corners[0]]
    area = sum(start[0] * end[1] - end[0] * start[1] for start, end in zip(corners, ends, strict=True))
    sign = 1.0 if area > 0 else -1.0
    edges = []
    for start, end in zip(corners, ends, strict=True):
        edge_x, edge_y = end[0] - start[0], end[1] - start[1]
        scale = sign / math.sqrt(edge_x * edge_x + edge_y * edge_y)
        edges.append((x - start[0]) * (edge_y * scale) - (y - start[1]) * (edge_x * scale))
    return both(*edges)


def either(*distances: Plane) -> Plane:
    """Union of figures."""
    return reduce(np.minimum, distances)


def both(*distances: Plane) -> Plane:
    """Intersection of figures."""
    return reduce(np.maximum, distances)


def without(distance: Plane, *holes: Plane) -> Plane:
    """A figure with holes cut out of it."""
    return both(distance, *(-hole for hole in holes))
