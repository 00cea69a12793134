"""Which client holds how much of which class, as one picture: a small PNG in an SVG with axes, sharp at any size."""

from __future__ import annotations

import base64
import io
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from PIL import Image

from fedbench.core.wording import counted
from fedbench_boards.leaderboard.page import svg as draw

_ACCENT = (36, 99, 190)
"""The style sheet's --heat; transparency mixes it with a light or a dark page."""
_FAINTEST = 0.12
"""How opaque a single sample is."""
_ON_DARK = 0.62
"""Numbers are white in cells more opaque than this."""
_CHARACTER = 6.6


@dataclass(frozen=True)
class HeatMap:
    """A drawing with its natural width in CSS pixels (wide ones scroll), and what it shows in a sentence."""

    picture: Markup
    width: int
    summary: str


def heat_map(
    counts: Sequence[Sequence[int]], classnames: Sequence[str], key: str, everybody: int = 0
) -> HeatMap | None:
    """The ``counts`` (clients x classes) by shade, also as numbers where cells are large; None without any client.

    Where ``everybody``, the number of all clients, is larger, the drawing says that it shows the first ones.
    """
    table = np.asarray(counts, dtype=np.int64)
    if table.ndim != 2 or not table.size or not table.sum():
        return None
    clients, classes = table.shape
    wide, high = float(np.clip(760 // classes, 9, 46)), (20.0 if clients <= 40 else 9.0)
    longest = max((len(name) for name in classnames), default=0)
    left, top = 58.0, 16 + _CHARACTER * min(longest, 18)
    width, height = left + wide * classes + 14, top + high * clients + 58
    summary = _summary(table, everybody)
    svg = draw.drawing(width, height, key, "Training samples by client and class", summary, "heat")
    alpha = _opacity(table)
    picture = {"class": "pixels", "preserveAspectRatio": "none", "href": _png(alpha)}
    box = {"x": left, "y": top, "width": wide * classes, "height": high * clients}
    ET.SubElement(svg, "image", picture | {name: draw.number(value) for name, value in box.items()})
    path = f"M{left} {draw.number(top)}h{draw.number(wide * classes)}v{draw.number(high * clients)}"
    draw.path(svg, f"{path}h{draw.number(-wide * classes)}z", "rule outline")
    _labels(svg, classnames, clients, (left, top, wide, high))
    if wide >= _CHARACTER * (len(str(table.max())) + 0.6) and high >= 16:
        _numbers(svg, table, alpha, (left, top, wide, high))
    _legend(svg, int(table.max()), left, height - 22)
    return HeatMap(draw.markup(svg), round(width), summary)


def _opacity(table: np.ndarray) -> np.ndarray:
    """Shades by the logarithm of the count, since long tails span orders of magnitude; nothing where it is 0."""
    shade = np.log1p(table) / np.log1p(table.max())
    return np.where(table > 0, _FAINTEST + (1 - _FAINTEST) * shade, 0.0)


def _png(alpha: np.ndarray) -> str:
    """One pixel a cell, as a data address."""
    pixels = np.zeros((*alpha.shape, 4), dtype=np.uint8)
    pixels[..., :3] = _ACCENT
    pixels[..., 3] = np.round(255 * alpha)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _labels(
    svg: draw.Element, classnames: Sequence[str], clients: int, place: tuple[float, float, float, float]
) -> None:
    left, top, wide, high = place
    # every name where they have room, else every second, third ...
    for position in range(0, len(classnames), int(np.ceil(11 / wide))):
        name = classnames[position]
        shown = name if len(name) <= 18 else f"{name[:17]}…"
        draw.text(svg, left + (position + 0.5) * wide + 4, top - 6, shown, "small", turned=-90)
    for client in range(0, clients, 1 if high >= 14 else 5):
        draw.text(svg, left - 7, top + (client + 0.5) * high + 4, str(client), "end small")
    draw.text(svg, 13, top + high * clients / 2, "client", "middle label", turned=-90)


def _numbers(svg: draw.Element, table: np.ndarray, alpha: np.ndarray, place: tuple[float, float, float, float]) -> None:
    left, top, wide, high = place
    made = draw.group(svg, "counts")
    for client, label in np.argwhere(table > 0).tolist():
        style = "on" if alpha[client, label] > _ON_DARK else ""
        x, y = left + (label + 0.5) * wide, top + (client + 0.5) * high + 4
        draw.text(made, x, y, str(table[client, label]), style)


def _legend(svg: draw.Element, most: int, left: float, top: float) -> None:
    """Boxes at 1, 10, 100 ... and the largest count, shaded as in the picture."""
    marks = [10**power for power in range(len(str(most)))]
    marks = [mark for mark in marks if mark < 0.6 * most or mark == 1] + ([most] if most > 1 else [])
    draw.text(svg, left, top + 11, "samples", "small")
    place = left + 52
    for mark, shade in zip(marks, _opacity(np.array(marks)), strict=True):
        box = draw.path(svg, f"M{draw.number(place)} {draw.number(top)}h16v14h-16z", "shade")
        box.set("fill-opacity", f"{shade:.2f}")
        draw.text(svg, place + 21, top + 11, f"{mark:,}", "small")
        place += 36 + _CHARACTER * len(f"{mark:,}")


def _summary(table: np.ndarray, everybody: int) -> str:
    clients, classes = table.shape
    shown = f"The first {clients:,} of {everybody:,} clients" if everybody > clients else counted(clients, "client")
    sizes, held, per_class = table.sum(axis=1), (table > 0).sum(axis=1), table.sum(axis=0)
    return (
        f"{shown}, {counted(classes, 'class', 'classes')}, {counted(int(table.sum()), 'training sample')}. "
        f"A client has {_range(sizes, 'sample')} of {_range(held, 'class', 'classes')}; "
        f"a class has {_range(per_class, 'sample')}."
    )


def _range(counts: np.ndarray, noun: str, plural: str = "") -> str:
    """``4 to 10 classes (median 8)``, or ``200 samples`` where all are alike."""
    least, most = int(counts.min()), int(counts.max())
    if least == most:
        return counted(most, noun, plural)
    return f"{least:,} to {counted(most, noun, plural)} (median {np.median(counts):,.10g})"
