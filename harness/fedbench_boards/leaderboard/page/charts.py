"""The charts of a leaderboard page as inline SVG: accuracy by round, by group, against what was sent, and a heat map.

The heat map shows which client holds how much of which class: a small PNG in an SVG with axes, sharp at any size.
"""

from __future__ import annotations

import base64
import io
import math
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from markupsafe import Markup
from PIL import Image

from fedbench.core.wording import MEGA, counted, megabytes, spread
from fedbench_boards.leaderboard.page import svg as draw
from fedbench_boards.leaderboard.page.svg import AxisScale, Frame

_WIDTH, _HEIGHT = 540.0, 350.0
_FRAME = Frame(54, 14, _WIDTH - 14, _HEIGHT - 50)
_MOST_POINTS = 150
_MARKS = 8
"""The approximate number of markers of a line."""
_THICK = 11.0  # a bar with the gap below it


@dataclass(frozen=True)
class Series:
    """A row's series: its mean accuracy by round, and its final value."""

    style: int
    """Number of the style (colour, dash and marker); the same for a row's name on the whole page."""
    name: str
    rounds: pd.DataFrame
    """Indexed by round: ``mean``, ``std`` (NaN for one seed), ``bytes`` (cumulative, NaN where unknown)."""
    accuracy: float
    spread: float
    """Sample standard deviation over seeds, NaN for one."""
    bytes: float
    """Bytes sent up and down in all rounds."""
    shown: bool = True
    """Whether it is visible before it is chosen in the legend."""

    @property
    def kind(self) -> str:
        """The CSS classes of the series."""
        return f"series s{self.style % 6}" + ("" if self.shown else " off")

    @property
    def has_band(self) -> bool:
        """Whether the spread over seeds is known in two rounds or more."""
        return int(self.rounds["std"].notna().sum()) > 1

    @property
    def summary(self) -> str:
        """Name, accuracy and cost, for tooltips."""
        return f"{self.name}: {spread(self.accuracy, self.spread)}, {megabytes(self.bytes)} MB"


@dataclass(frozen=True)
class Bars:
    """The bars of a row: a (mean, standard deviation) for every group."""

    name: str
    values: list[tuple[float, float]]


def by_round(series: Sequence[Series], key: str, metric: str) -> Markup | None:
    """Accuracy against round, with a band of ± a standard deviation over seeds; None without two rounds.

    A row evaluated only before training (nothing is trained) is a level line, one evaluated once after it a point.
    """
    drawn = [row for row in series if len(row.rounds)]
    if not any(len(row.rounds) > 1 for row in drawn):
        return None
    table = pd.concat([row.rounds for row in drawn])
    spread_ = table["std"].fillna(0.0)
    heights = [*(table["mean"] - spread_), *(table["mean"] + spread_)]
    x = draw.linear([float(r) for r in table.index], _FRAME.left, _FRAME.right, whole=True, tight=True)
    y = draw.linear([max(0.0, h) for h in heights], _FRAME.bottom, _FRAME.top)
    described = f"{metric} in % after each evaluated round; the last is in the table above"
    svg = draw.drawing(_WIDTH, _HEIGHT, key, f"{metric} by round", described, "chart")
    draw.axes(svg, _FRAME, x, y, ("round", f"{metric}, %"), lambda tick: f"{tick:g}")
    for row in reversed(drawn):
        _curve(svg, row, x, y)
    return draw.markup(svg)


def _curve(svg: draw.Element, row: Series, x: AxisScale, y: AxisScale) -> None:
    element = draw.group(svg, row.kind, row.style, row.summary)
    dash = draw.DASHES[row.style // 6 % len(draw.DASHES)]
    if len(row.rounds) == 1:
        when, height = row.rounds.index[0], y(float(row.rounds["mean"].iloc[0]))
        if when == 0:
            draw.path(element, f"M{draw.number(x.start)} {draw.number(height)}H{draw.number(x.end)}", "line", dash)
        draw.marker(element, x(float(when)) if when else (x.start + x.end) / 2, height, row.style)
        return
    shown = row.rounds.iloc[_thinned(len(row.rounds), _MOST_POINTS)]
    places = [(x(float(r)), float(m), float(s)) for r, m, s in shown[["mean", "std"]].itertuples()]
    edges = [(px, y(max(y.low, m - s)), y(m + s)) for px, m, s in places if not math.isnan(s)]
    if len(edges) > 1:
        outline = [(px, top) for px, _, top in edges] + [(px, low) for px, low, _ in reversed(edges)]
        draw.path(element, draw.polyline(outline) + "z", "band")
    draw.path(element, draw.polyline([(px, y(m)) for px, m, _ in places]), "line", dash)
    for position in _thinned(len(shown), _MARKS):
        px, mean, std = places[position]
        draw.marker(element, px, y(mean), row.style, f"{row.name}, round {shown.index[position]}: {spread(mean, std)}")


def _thinned(count: int, most: int) -> list[int]:
    """Positions out of ``count``, evenly spaced, about ``most``, the last always among them."""
    step = max(1, math.ceil((count - 1) / most))
    return list(range(count - 1, -1, -step))[::-1]


def against_cost(series: Sequence[Series], key: str, metric: str, less: bool = False) -> Markup | None:
    """Final accuracy against the total sent, the Pareto front drawn and named; None if nobody sent anything.

    If ``less`` of the metric is better, the front is below. The scale is logarithmic; rows that send nothing are at 0
    beside it. Thin lines show the way there by rounds.
    """
    known = [row for row in series if not math.isnan(row.bytes) and not math.isnan(row.accuracy)]
    sent = [row.bytes / MEGA for row in known if row.bytes > 0]
    if len(known) < 2 or not sent:
        return None
    free = len(sent) < len(known)
    start = _FRAME.left + (54 if free else 12)
    x = draw.logarithmic(sent, start, _FRAME.right)
    deviations = [0.0 if math.isnan(row.spread) else row.spread for row in known]
    heights = [row.accuracy + sign * d for row, d in zip(known, deviations, strict=True) for sign in (1, -1)]
    y = draw.linear([max(0.0, height) for height in heights], _FRAME.bottom, _FRAME.top)
    front = pareto([(row.bytes, -row.accuracy if less else row.accuracy) for row in known])
    names = ", ".join(known[i].name for i in front)
    described = f"Not beaten in both {metric} and MB: {names}"
    svg = draw.drawing(_WIDTH, _HEIGHT, key, f"{metric} against MB sent", described, "chart")
    draw.axes(svg, _FRAME, x, y, ("MB sent up and down by all clients, log scale", f"{metric}, %"), _plain)
    none = _FRAME.left + 22
    if free:
        draw.text(svg, none, _FRAME.bottom + 18, "0", "middle")
        draw.path(svg, f"M{none + 14} {_FRAME.bottom - 5}l6 10m0-10l6 10", "tick")
    places = [(x(row.bytes / MEGA) if row.bytes > 0 else none, y(row.accuracy)) for row in known]
    _front(svg, [places[i] for i in front])
    for row, centre in reversed(list(zip(known, places, strict=True))):
        _costing(svg, row, centre, x, y)
    _names(svg, [(known[i], places[i]) for i in front], places)
    return draw.markup(svg)


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Positions of the (cost, gain) points that no other beats in one without losing in the other; cheapest first."""
    order = sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1]))
    front: list[int] = []
    for i in order:
        if not front or points[i][1] > points[front[-1]][1]:
            front.append(i)
    return front


def _front(svg: draw.Element, places: Sequence[tuple[float, float]]) -> None:
    """The front as steps: between two of its points the cheaper one is the best there is."""
    steps = draw.polyline(places[:1])
    for px, py in places[1:]:
        steps += f"H{draw.number(px)}V{draw.number(py)}"
    draw.path(draw.group(svg, "front", title="Pareto front"), f"{steps}H{draw.number(_FRAME.right)}", "frontline")


def _costing(svg: draw.Element, row: Series, centre: tuple[float, float], x: AxisScale, y: AxisScale) -> None:
    element = draw.group(svg, row.kind, row.style, row.summary)
    way = row.rounds[(row.rounds["bytes"] >= x.low * MEGA) & (row.rounds["mean"] >= y.low)]
    way = way.iloc[_thinned(len(way), _MOST_POINTS)] if len(way) else way
    if len(way) > 1:
        points = [(x(float(b) / MEGA), y(float(m))) for m, b in zip(way["mean"], way["bytes"], strict=True)]
        draw.path(element, draw.polyline(points), "line way", draw.DASHES[row.style // 6 % len(draw.DASHES)])
    if not math.isnan(row.spread):
        low, high = (draw.number(y(max(y.low, row.accuracy + sign * row.spread))) for sign in (-1, 1))
        draw.path(element, f"M{draw.number(centre[0])} {low}V{high}", "whisker")
    draw.marker(element, *centre, row.style)


def _names(
    svg: draw.Element, named: Sequence[tuple[Series, tuple[float, float]]], points: Sequence[tuple[float, float]]
) -> None:
    """Names beside the points of the front, each where it covers the fewest names and points."""
    taken: list[tuple[float, float, float, float]] = [(px - 5, py - 5, px + 5, py + 5) for px, py in points]
    for row, (px, py) in named:
        width = 6.9 * len(row.name)
        right, left = px + 9, px - 9 - width
        places = [(start, py + rise) for rise in (-9, 16, -23, 30, -37, 44) for start in (right, left)]
        boxes = [(start, base - 11, start + width, base + 3) for start, base in places]
        inside = [b for b in boxes if b[0] >= _FRAME.left and b[2] <= _WIDTH and _FRAME.top <= b[3] <= _FRAME.bottom]
        best = min(inside or boxes[:1], key=lambda box: sum(_overlap(box, other) for other in taken))
        taken.append(best)
        draw.text(draw.group(svg, row.kind, row.style), best[0], best[3] - 3, row.name, "name")


def _overlap(box: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> float:
    width = min(box[2], other[2]) - max(box[0], other[0])
    height = min(box[3], other[3]) - max(box[1], other[1])
    return max(0.0, width) * max(0.0, height)


def bars(rows: Sequence[Bars], groups: Sequence[str], key: str, title: str) -> Markup | None:
    """Bars of every row's accuracy in every group, with ± a standard deviation; None if no row has any."""
    shown = [row for row in rows if not all(math.isnan(mean) for mean, _ in row.values)]
    if not shown:
        return None
    gap, top, left = 8.0, 34.0, 170.0
    step = max(30.0, _THICK * len(groups)) + gap
    height = top + step * len(shown) + 44
    frame = Frame(left, top, _WIDTH - 40, height - 44)
    x = draw.linear([0.0, 100.0], frame.left, frame.right)
    described = "Numbers are in the table above and under its rows' names"
    svg = draw.drawing(_WIDTH, height, key, title, described, "chart bars")
    _groups_legend(svg, groups)
    for tick in x.ticks:
        draw.path(svg, f"M{draw.number(x(tick))} {draw.number(top)}V{draw.number(frame.bottom)}", "rule")
        draw.text(svg, x(tick), frame.bottom + 16, f"{tick:g}", "middle")
    draw.text(svg, (frame.left + frame.right) / 2, frame.bottom + 36, "accuracy, %", "middle label")
    tops = [top + gap / 2 + position * step for position in range(len(shown))]
    for row, above in zip(shown, tops, strict=True):
        (name, _, rest), centre = row.name.partition(" · "), above + (step - gap) / 2
        draw.text(svg, x.start - 9, centre + (0 if rest else 4.5), _shortened(name, 24), "end name")
        if rest:
            draw.text(svg, x.start - 9, centre + 14, _shortened(rest, 26), "end small")
    room = (step - gap - _THICK * len(groups)) / 2
    for position, group in enumerate(groups):
        _bars_of(svg, shown, position, group, x, [above + room + position * _THICK for above in tops])
    return draw.markup(svg)


def _groups_legend(svg: draw.Element, groups: Sequence[str]) -> None:
    left = 2.0
    for position, name in enumerate(groups):
        _filled(svg, position, {_box(left, 4.0, 12.0, 12.0): name})
        draw.text(svg, left + 17, 15, name)
        left += 32 + 7.4 * len(name)


def _bars_of(
    svg: draw.Element, rows: Sequence[Bars], position: int, group: str, x: AxisScale, tops: Sequence[float]
) -> None:
    """The bars of one group in its colour, with whiskers and values."""
    boxes, whiskers, values = {}, "", ET.Element("g", {"class": "value"})
    for row, top in zip(rows, tops, strict=True):
        mean, std = row.values[position]
        if math.isnan(mean):
            continue
        end = x(mean)
        boxes[_box(x.start, top, end - x.start, _THICK - 1.5)] = f"{row.name}, {group}: {spread(mean, std)}"
        if not math.isnan(std):
            end = x(min(100.0, mean + std))
            start, middle = draw.number(x(max(0.0, mean - std))), draw.number(top + _THICK / 2 - 0.75)
            whiskers += f"M{start} {middle}H{draw.number(end)}"
        draw.text(values, end + 5, top + _THICK - 2, f"{mean:.1f}")
    _filled(svg, position, boxes)
    if whiskers:
        draw.path(svg, whiskers, "whisker")
    svg.append(values)


def _box(left: float, top: float, width: float, height: float) -> str:
    return f"M{draw.number(left)} {draw.number(top)}h{draw.number(width)}v{draw.number(height)}H{draw.number(left)}z"


def _filled(svg: draw.Element, position: int, boxes: Mapping[str, str]) -> None:
    """The ``boxes`` with their tooltips, in the colour of a group; hatched where colours repeat or look alike."""
    fill = draw.group(svg, f"fill s{position % 6}")
    for box, title in boxes.items():
        ET.SubElement(ET.SubElement(fill, "path", {"d": box}), "title").text = title
    if position % 3:
        draw.path(svg, "".join(boxes), f"hatch{position % 3}")


def _shortened(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


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
    svg: draw.Element, classnames: Sequence[str], clients: int, grid: tuple[float, float, float, float]
) -> None:
    left, top, wide, high = grid
    # every name where they have room, else every second, third ...
    for position in range(0, len(classnames), int(np.ceil(11 / wide))):
        name = classnames[position]
        shown = name if len(name) <= 18 else f"{name[:17]}…"
        draw.text(svg, left + (position + 0.5) * wide + 4, top - 6, shown, "small", turned=-90)
    for client in range(0, clients, 1 if high >= 14 else 5):
        draw.text(svg, left - 7, top + (client + 0.5) * high + 4, str(client), "end small")
    draw.text(svg, 13, top + high * clients / 2, "client", "middle label", turned=-90)


def _numbers(svg: draw.Element, table: np.ndarray, alpha: np.ndarray, grid: tuple[float, float, float, float]) -> None:
    left, top, wide, high = grid
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
    right = left + 52
    for mark, shade in zip(marks, _opacity(np.array(marks)), strict=True):
        box = draw.path(svg, f"M{draw.number(right)} {draw.number(top)}h16v14h-16z", "shade")
        box.set("fill-opacity", f"{shade:.2f}")
        draw.text(svg, right + 21, top + 11, f"{mark:,}", "small")
        right += 36 + _CHARACTER * len(f"{mark:,}")


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
