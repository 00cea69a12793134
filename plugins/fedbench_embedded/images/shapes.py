"""The twenty shapes: one function each, from object coordinates to a signed distance.

Every function takes x and y (n, height, width), the object filling about [-1, 1] with y pointing up, a `knob`
(n, 1, 1) in [0, 1] that varies the proportions, and the drawing variant 0 or 1 (a sub-type, e.g. fir and round
tree). It returns the signed distance (n, height, width), negative inside.
"""

import math
from collections.abc import Callable

import numpy as np

from fedbench_embedded.images.geometry import (
    Plane,
    angle_of,
    both,
    box,
    disc,
    either,
    ellipse,
    length,
    polygon,
    ring,
    rounded,
    without,
)

Shape = Callable[[Plane, Plane, Plane, int], Plane]


def bird(x: Plane, y: Plane, knob: Plane, variant: int) -> Plane:
    """Standing on two legs with an eye (0), or flying with a raised wing (1)."""
    body = ellipse(x, y, (-0.1, -0.1), 0.6, 0.34 + 0.08 * knob)
    head = disc(x, y, (0.48, 0.28), 0.26)
    beak = polygon(x, y, [(0.68, 0.15), (0.98, 0.25), (0.68, 0.4)])
    tail = polygon(x, y, [(-0.95, 0.3), (-0.95, -0.05), (-0.5, -0.15), (-0.45, 0.1)])
    whole = either(body, head, beak, tail)
    if variant == 0:
        legs = either(box(x, y, (-0.05, -0.6), 0.04, 0.25), box(x, y, (0.15, -0.6), 0.04, 0.25))
        return without(either(whole, legs), disc(x, y, (0.52, 0.34), 0.07))
    return either(whole, polygon(x, y, [(-0.4, 0.0), (0.2, 0.0), (-0.35, 0.85)]))


def boat(x: Plane, y: Plane, knob: Plane, variant: int) -> Plane:
    """Sailing boat (0) or steamer with a cabin and a funnel (1)."""
    hull = polygon(x, y, [(-0.95, -0.25), (-0.6, -0.8), (0.6, -0.8), (0.95, -0.25)])
    if variant == 0:
        mast = box(x, y, (0.0, 0.2), 0.06, 0.6)
        return either(hull, mast, polygon(x, y, [(0.1, -0.1), (0.8, -0.1), (0.1, 0.85)]))
    cabin = box(x, y, (-0.1, -0.05), 0.42 + 0.16 * knob, 0.22)
    return either(hull, cabin, box(x, y, (0.1, 0.35), 0.12, 0.3))


def bottle(x: Plane, y: Plane, knob: Plane, variant: int) -> Plane:
    """Straight bottle with shoulders (0) or round flask with a long neck (1)."""
    if variant == 1:
        return either(ellipse(x, y, (0.0, -0.4), 0.55, 0.5 + 0.1 * knob), box(x, y, (0.0, 0.4), 0.15, 0.5))
    belly = box(x, y, (0.0, -0.35), 0.36 + 0.1 * knob, 0.6)
    shoulders = polygon(x, y, [(-0.38, 0.2), (0.38, 0.2), (0.14, 0.5), (-0.14, 0.5)])
    neck = either(box(x, y, (0.0, 0.6), 0.14, 0.35), box(x, y, (0.0, 0.88), 0.2, 0.07))
    return either(belly, shoulders, neck)


def butterfly(x: Plane, y: Plane, knob: Plane, variant: int) -> Plane:
    """Four round wings (0) or four pointed wings with feelers (1), mirrored about the body."""
    side = np.abs(x)
    body = ellipse(x, y, (0.0, 0.0), 0.09, 0.7)
    if variant == 0:
        upper = ellipse(side, y, (0.5, 0.38), 0.42, 0.4 + 0.1 * knob)
        return either(upper, ellipse(side, y, (0.42, -0.42), 0.34, 0.4), body)
    upper = polygon(side, y, [(0.0, 0.05), (0.95, 0.25), (0.8, 0.85)])
    lower = polygon(side, y, [(0.0, 0.05), (0.75, -0.1), (0.5, -0.85)])
    return either(upper, lower, body, polygon(side, y, [(0.0, 0.6), (0.25, 0.95), (0.3, 0.88)]))


def car(x: Plane, y: Plane, knob: Plane, variant: int) -> Plane:
    """Saloon with a sloping cabin (0) or van with a box cabin (1)."""
    chassis = box(x, y, (0.0, -0.2), 0.92, 0.25)
    wheels = either(disc(x, y, (-0.5, -0.48), 0.24), disc(x, y, (0.5, -0.48), 0.24))
    hubs = either(disc(x, y, (-0.5, -0.48), 0.1), disc(x, y, (0.5, -0.48), 0.1))
    if variant == 0:
        cabin = polygon(x, y, [(-0.6, 0.0), (0.55, 0.0), (0.3, 0.45), (-0.4, 0.45)])
    else:
        cabin = box(x, y, (-0.25, 0.25), 0.5 + 0.2 * knob, 0.3)
    return without(either(chassis, cabin, wheels), hubs, box(x, y, (0.05, 0.2), 0.14, 0.12))


def fish(x: Plane, y: Plane, knob: Plane, variant: int) -> Plane:
    """With a back fin (0) or without (1); both have an eye."""
    body = ellipse(x, y, (0.15, 0.0), 0.72, 0.34 + 0.14 * knob)
    tail = polygon(x, y, [(-0.95, 0.5), (-0.95, -0.5), (-0.3, 0.0)])
    whole = either(body, tail)
    if variant == 0:
        whole = either(whole, polygon(x, y, [(-0.05, 0.25), (0.35, 0.25), (-0.1, 0.68)]))
    return without(whole, disc(x, y, (0.52, 0.1), 0.09))


def flower(x: Plane, y: Plane, knob: Plane, variant: int) -> Plane:
    """Five petals (0) or seven (1) around an eye, on a stem."""
    above = y - 0.15
    radius = length(x, above)
    petals = 5 if variant == 0 else 7
    wave = rounded(np.cos, petals * angle_of(above, x))
    blossom = (radius - (0.5 + 0.1 * knob + 0.2 * wave)) * 0.75
    return either(without(blossom, ring(radius - 0.2, 0.06)), box(x, y, (0.0, -0.7), 0.06, 0.3))


def house(x: Plane, y: Plane, knob: Plane, variant: int) -> Plane:
    """With a door (0) or with two windows and a chimney (1)."""
    whole = either(box(x, y, (0.0, -0.4), 0.68, 0.5), polygon(x, y, [(-0.9, 0.05), (0.9, 0.05), (0.0, 0.9)]))
    if variant == 0:
        return without(whole, box(x + 0.2 - 0.4 * knob, y, (0.0, -0.6), 0.14, 0.32))
    windows = either(box(x, y, (-0.3, -0.3), 0.15, 0.15), box(x, y, (0.3, -0.3), 0.15, 0.15))
    return either(without(whole, windows), box(x, y, (0.42, 0.6), 0.1, 0.28))


def mushroom(x: Plane, y: Plane, knob: Plane, variant: int) -> Plane:
    """Plain cap (0) or cap with two light spots (1)."""
    cap = both(ellipse(x, y, (0.0, 0.05), 0.9, 0.7 + 0.15 * knob), -y)
    whole = either(cap, box(x, y, (0.0, -0.4), 0.22, 0.45))
    if variant == 0:
        return whole
    return without(whole, disc(x, y, (-0.35, 0.3), 0.13), disc(x, y, (0.3, 0.35), 0.13))


def tree(x: Plane, y: Plane, knob: Plane, variant: int) -> Plane:
    """Fir of two triangles (0) or leafy tree of three discs (1), on a trunk."""
    trunk = box(x, y, (0.0, -0.7), 0.13, 0.28)
    if variant == 0:
        lower = polygon(x, y, [(-0.75, -0.5), (0.75, -0.5), (0.0, 0.35)])
        return either(trunk, lower, polygon(x, y, [(-0.55, 0.0), (0.55, 0.0), (0.0, 0.95)]))
    crown_disc = disc(x, y, (0.0, 0.3), 0.5 + 0.1 * knob)
    return either(trunk, crown_disc, disc(x, y, (-0.35, -0.05), 0.35), disc(x, y, (0.35, -0.05), 0.35))


def star(x: Plane, y: Plane, knob: Plane, variant: int) -> Plane:
    """Five points (0) or six (1)."""
    sector = 2 * math.pi / (5 if variant == 0 else 6)
    angle = angle_of(x, y) + sector / 2
    angle = np.abs(angle - np.floor(angle / sector) * sector - sector / 2)
    radius = length(x, y)
    across, along = radius * rounded(np.sin, angle), radius * rounded(np.cos, angle)
    # One edge of one point: from the tip (0, 1) to the notch between two points, at radius `notch`.
    notch = 0.38 + 0.15 * knob
    edge_x, edge_y = notch * math.sin(sector / 2), notch * math.cos(sector / 2) - 1
    distance: Plane = (along - 1) * edge_x - across * edge_y
    return distance / length(edge_x, edge_y)


def heart(x: Plane, y: Plane, knob: Plane, variant: int) -> Plane:
    """Full (0) or with a heart-high hole in its middle (1)."""
    side = np.abs(x)
    whole = either(disc(side, y, (0.42, 0.32), 0.47), both(0.74 * side - 0.67 * (y + 0.95), y - 0.35))
    return whole if variant == 0 else without(whole, ellipse(x, y, (0.0, 0.05), 0.2, 0.16 + 0.1 * knob))


def mug(x: Plane, y: Plane, knob: Plane, variant: int) -> Plane:
    """Tall mug (0) or wide cup (1), with a round handle."""
    handle = both(ring(disc(x, y, (0.45, 0.0), 0.3 + 0.08 * knob), 0.1), 0.35 - x)
    return either(box(x, y, (-0.15, 0.0), 0.55, 0.65) if variant == 0 else box(x, y, (-0.2, -0.05), 0.62, 0.42), handle)


def key(x: Plane, y: Plane, knob: Plane, variant: int) -> Plane:
    """Round bow (0) or square bow (1), with two teeth."""
    if variant == 0:
        bow = ring(disc(x, y, (-0.52, 0.0), 0.26 + 0.08 * knob), 0.12)
    else:
        bow = ring(box(x, y, (-0.52, 0.0), 0.3, 0.3), 0.11)
    teeth = either(box(x, y, (0.8, -0.22), 0.08, 0.2), box(x, y, (0.5, -0.18), 0.08, 0.16))
    return either(bow, box(x, y, (0.3, 0.0), 0.6, 0.1), teeth)


def moon(x: Plane, y: Plane, knob: Plane, variant: int) -> Plane:
    """Thin crescent (0) or thick crescent (1)."""
    shadow_x = x - (0.3 if variant == 0 else 0.5) - 0.15 * knob
    return without(disc(x, y, (0.0, 0.0), 0.85), disc(shadow_x, y, (0.0, 0.1), 0.7))


def arrow(x: Plane, y: Plane, knob: Plane, variant: int) -> Plane:
    """One head (0) or a head at both ends (1)."""
    shaft = box(x, y, (-0.3, 0.0), 0.6, 0.18)
    if variant == 0:
        return either(shaft, polygon(x, y, [(0.1, -0.6), (0.95, 0.0), (0.1, 0.6)]))
    return either(box(x, y, (0.0, 0.0), 0.6, 0.16), polygon(np.abs(x), y, [(0.4, -0.55), (0.95, 0.0), (0.4, 0.55)]))


def umbrella(x: Plane, y: Plane, knob: Plane, variant: int) -> Plane:
    """Open canopy with a hooked handle (0), or scalloped canopy with a straight handle (1)."""
    canopy = both(ellipse(x, y, (0.0, 0.1), 0.92, 0.7 + 0.1 * knob), 0.1 - y)
    if variant == 0:
        hook = both(ring(disc(x, y, (0.2, -0.8), 0.2), 0.06), y + 0.75)
        return either(canopy, box(x, y, (0.0, -0.35), 0.06, 0.5), hook)
    scallops = either(ellipse(np.abs(x), y, (0.5, 0.08), 0.22, 0.18), ellipse(x, y, (0.0, 0.08), 0.2, 0.18))
    return either(without(canopy, scallops), box(x, y, (0.0, -0.3), 0.06, 0.62))


def crown(x: Plane, y: Plane, knob: Plane, variant: int) -> Plane:
    """Jagged top with a point in the middle and half a point at each side (0), or with two whole points (1)."""
    phase = x * 1.25 + (0.0 if variant == 0 else 0.5)
    valley = 1 - np.abs(phase - np.floor(phase) - 0.5) * 2
    top: Plane = 0.55 - (0.65 + 0.2 * knob) * valley
    sides: Plane = np.maximum(np.abs(x) - 0.8, -0.6 - y)
    return both(sides, y - top)


def drop(x: Plane, y: Plane, knob: Plane, variant: int) -> Plane:
    """Full (0) or with a highlight cut out (1)."""
    whole = either(disc(x, y, (0.0, -0.3), 0.5 + 0.1 * knob), polygon(x, y, [(-0.5, -0.1), (0.5, -0.1), (0.0, 0.95)]))
    return whole if variant == 0 else without(whole, ellipse(x, y, (-0.2, -0.35), 0.12, 0.22))


def leaf(x: Plane, y: Plane, knob: Plane, variant: int) -> Plane:
    """Plain blade (0) or blade with a cut-out midrib (1), on a stalk."""
    reach = 0.45 + 0.15 * knob
    blade = both(disc(x + reach, y, (0.0, 0.0), 1.0), disc(x - reach, y, (0.0, 0.0), 1.0))
    whole = either(blade, box(x, y, (0.0, -0.9), 0.05, 0.2))
    return whole if variant == 0 else without(whole, box(x, y, (0.0, 0.05), 0.05, 0.5))


# The order is the label order of the data set; the first ten are the federated task.
SHAPES: dict[str, Shape] = {
    function.__name__: function
    for function in (
        *(bird, boat, bottle, butterfly, car, fish, flower, house, mushroom, tree),
        *(star, heart, mug, key, moon, arrow, umbrella, crown, drop, leaf),
    )
}
