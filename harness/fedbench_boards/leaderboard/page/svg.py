"""Inline SVG drawings: scales with sensible ticks, axes, text. Colours and fonts come from the page's style sheet."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup
from matplotlib.ticker import LogLocator, MaxNLocator

Element = ET.Element
MARKERS = (
    "M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0z",
    "M-3.2-3.2h6.4v6.4h-6.4z",
    "M0-4.3L4 3H-4z",
    "M0-4.6L4.6 0L0 4.6L-4.6 0z",
    "M0 4.3L4-3H-4z",
    "M-1.4-4.2h2.8v2.8h2.8v2.8h-2.8v2.8h-2.8v-2.8h-2.8v-2.8h2.8z",
)
"""Shapes around the origin: circle, square, triangle, diamond, triangle pointing down, plus."""
DASHES = ("", "6 3", "2 2.5", "9 3 2 3")


@dataclass(frozen=True)
class AxisScale:
    """A scale from values to user units: ``low`` is at ``start``, ``high`` at ``end``, linear or logarithmic."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]
    log: bool = False

    def __call__(self, value: float) -> float:
        """The position of ``value``, which is above 0 on a logarithmic scale."""
        low, high, here = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (self.end - self.start) * (here - low) / (high - low)


@dataclass(frozen=True)
class Frame:
    """The plotting area in user units."""

    left: float
    top: float
    right: float
    bottom: float


def linear(values: Sequence[float], start: float, end: float, *, whole: bool = False, tight: bool = False) -> AxisScale:
    """A scale over ``values`` that ends on ticks (``tight``: on the values); ``whole`` has integer ticks only."""
    low, high = min(values), max(values)
    if low == high:
        low, high = low - 1.0, high + 1.0
    ticks = [float(t) for t in MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10], integer=whole).tick_values(low, high)]
    if tight:
        ticks = [tick for tick in ticks if low <= tick <= high]
    else:
        low, high = ticks[0], ticks[-1]
    return AxisScale(low, high, start, end, tuple(ticks))


def logarithmic(values: Sequence[float], start: float, end: float) -> AxisScale:
    """A logarithmic scale over ``values`` (all above 0) with some room at both sides; ticks at 1, or 1, 2 and 5."""
    low, high = min(values) / 1.3, max(values) * 1.3
    subs = (1.0,) if high / low > 300 else (1.0, 2.0, 5.0)
    ticks = LogLocator(base=10, subs=subs, numticks=20).tick_values(low, high)
    return AxisScale(low, high, start, end, tuple(float(t) for t in ticks if low <= t <= high), log=True)


def drawing(width: float, height: float, key: str, title: str, description: str, kind: str) -> Element:
    """An empty drawing with its name and description for screen readers; ``key`` is unique on the page."""
    svg = ET.Element("svg", {"viewBox": f"0 0 {number(width)} {number(height)}", "class": kind, "role": "img"})
    svg.set("aria-labelledby", f"{key}-title {key}-desc")
    ET.SubElement(svg, "title", {"id": f"{key}-title"}).text = title
    ET.SubElement(svg, "desc", {"id": f"{key}-desc"}).text = description
    return svg


def markup(svg: Element) -> Markup:
    """The drawing as HTML; names in it are escaped."""
    return Markup(ET.tostring(svg, encoding="unicode"))


def group(parent: Element, style: str, series: int | None = None, title: str = "") -> Element:
    """A group of class ``style``; with ``series`` the legend shows and hides it; ``title`` is its tooltip."""
    element = ET.SubElement(parent, "g", {"class": style})
    if series is not None:
        element.set("data-series", str(series))
    if title:
        ET.SubElement(element, "title").text = title
    return element


def text(parent: Element, x: float, y: float, content: str, style: str = "", *, turned: float = 0) -> Element:
    """Text at a place; ``style`` are classes (``end`` and ``middle`` anchor it), ``turned`` degrees clockwise."""
    element = ET.SubElement(parent, "text", {"x": number(x), "y": number(y)})
    if style:
        element.set("class", style)
    if turned:
        element.set("transform", f"rotate({number(turned)} {number(x)} {number(y)})")
    element.text = content
    return element


def path(parent: Element, d: str, style: str, dash: str = "") -> Element:
    """Add a path of class ``style``."""
    element = ET.SubElement(parent, "path", {"class": style, "d": d})
    if dash:
        element.set("stroke-dasharray", dash)
    return element


def marker(parent: Element, x: float, y: float, style: int, title: str = "") -> None:
    """The marker of series style ``style`` at a place, hollow from the seventh style on, with a tooltip."""
    element = ET.SubElement(parent, "use", {"href": f"#mark-{style % 12}", "x": number(x), "y": number(y)})
    if title:
        ET.SubElement(element, "title").text = title


def polyline(points: Sequence[tuple[float, float]]) -> str:
    """Path data of a line through ``points``, each told by its distance from the one before, which is shorter."""
    tenths = [(round(10 * round(x, 1)), round(10 * round(y, 1))) for x, y in points]
    steps = [(x - left, y - top) for (left, top), (x, y) in pairwise(tenths)]
    first, *further = (f"{x / 10:g} {y / 10:g}" for x, y in [tenths[0], *steps])
    return f"M{first}" + ("l" + " ".join(further).replace(" -", "-") if further else "")


def axes(
    svg: Element, frame: Frame, x: AxisScale, y: AxisScale, labels: tuple[str, str], name: Callable[[float], str]
) -> None:
    """Grid lines, ticks and the ``labels`` of both axes; ``name`` writes a tick of the horizontal one."""
    grid = group(svg, "grid")
    for tick in y.ticks:
        path(grid, f"M{number(frame.left)} {number(y(tick))}H{number(frame.right)}", "rule")
        text(grid, frame.left - 7, y(tick) + 4, f"{tick:g}", "end")
    for tick in x.ticks:
        path(grid, f"M{number(x(tick))} {number(frame.bottom)}v4", "tick")
        text(grid, x(tick), frame.bottom + 18, name(tick), "middle")
    path(grid, f"M{number(frame.left)} {number(frame.bottom)}H{number(frame.right)}", "tick")
    text(grid, (frame.left + frame.right) / 2, frame.bottom + 38, labels[0], "middle label")
    text(grid, 13, (frame.top + frame.bottom) / 2, labels[1], "middle label", turned=-90)


def swatch(style: int) -> Markup:
    """The sign of series style ``style`` for legends and tables, one of `shapes`."""
    return Markup(f'<svg class="swatch" aria-hidden="true"><use href="#sign-{style % (6 * len(DASHES))}" /></svg>')


def shapes(styles: int) -> Markup:
    """What a page draws again and again: markers, and of the first ``styles`` a piece of the line with its marker."""
    svg = ET.Element("svg")
    for style in range(min(styles, 6 * len(DASHES))):
        if style < 12:
            path(svg, MARKERS[style % 6], "mark hollow" if style >= 6 else "mark").set("id", f"mark-{style}")
        names = {"id": f"sign-{style}", "class": f"s{style % 6}", "viewBox": "0 0 28 12"}
        sign = ET.SubElement(svg, "symbol", names)
        path(sign, "M1 6H27", "line", DASHES[style // 6])
        marker(sign, 14, 6, style)
    return Markup("").join(map(markup, svg))


def number(value: float) -> str:
    """A coordinate with one decimal, without superfluous zeros."""
    return f"{round(value, 1):.1f}".removesuffix(".0")
