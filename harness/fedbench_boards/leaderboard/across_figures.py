"""A map as figures: who leads where, a heat map a method, margins, costs to a target, curves along an axis.

Mean ranks are drawn as the critical-difference diagram of Demšar (JMLR 2006), as scikit-posthocs draws it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from numpy.typing import NDArray

from fedbench.core.errors import FedbenchError
from fedbench.core.wording import heading
from fedbench_boards.leaderboard.across import MOST_AXES, NEAR, Map, Place, Square
from fedbench_boards.leaderboard.drawing import CENTRED, ink, legend_below, look_of, shaded
from fedbench_boards.statistics import Across

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def critical_differences(overall: Across, labels: Mapping[str, str]) -> Figure:
    """Mean ranks on a line, bars over rows that Nemenyi's test does not tell apart. ``labels``: row -> its name."""
    import scikit_posthocs  # takes seconds to import

    ranks = overall.mean_ranks.rename(index=dict(labels))
    apart = scikit_posthocs.posthoc_nemenyi_friedman(overall.ranks.rename(columns=dict(labels)).reset_index(drop=True))
    fig = Figure(figsize=(7.0, 1.1 + 0.105 * len(ranks)), layout="constrained")
    axes = fig.subplots()
    drawn = scikit_posthocs.critical_difference_diagram(
        ranks,
        apart,
        ax=axes,
        label_fmt_left="{label} {rank:.1f} ",
        label_fmt_right=" {rank:.1f} {label}",
        label_props={"fontsize": 7},
        crossbar_props={"linewidth": 2.5, "color": "#808890"},
        elbow_props={"linewidth": 0.7},
        marker_props={"s": 9},
        color_palette=["#000000"] * len(ranks),
    )
    for (bar,) in drawn["crossbars"]:  # it joins the rows of a set, which has another order in every process
        bar.set_xdata(sorted(bar.get_xdata()))
    axes.set_title(
        f"mean rank over {len(overall.ranks)} settings; critical difference {overall.critical_difference:.2f}",
        fontsize=8,
    )
    return fig


_WIDE, _HIGH = 1.25, 0.62
"""Width and height in inches of a cell with words."""
_CURVES = 8
"""The number of rows with curves: those with the best mean ranks."""
_PANELS = 5
"""The number of heat maps side by side."""
TIED = "///"


def figures(map_: Map) -> Iterator[tuple[str, Figure]]:
    """Every figure of a map of one or two axes, with the name of its file. FedbenchError for more axes."""
    if len(map_.axes) > MOST_AXES:
        raise FedbenchError(
            f"a map is drawn over {MOST_AXES} axes at most, and this one has {', '.join(map_.axes)}; fix the others "
            "with --at AXIS=VALUE."
        )
    yield "winners", winners(map_)
    for name, row in (("zero-shot", map_.zero_shot()), ("baseline", map_.base())):
        if row is not None:
            yield f"margin-over-{name}", margins(map_, row)
    yield "methods", methods(map_)
    if map_.costs:
        yield "cost-to-target", costs(map_)
    for number, axis in enumerate(map_.axes, start=1):
        yield f"curves-{number}", curves(map_, axis)


def winners(map_: Map) -> Figure:
    """The leader of every place by colour, hatched where others can't be told from it."""
    title = f"who leads in {heading(map_.headline)}; hatched: others can't be told from it"
    return _worded(map_, map_.leaders(), title)


def costs(map_: Map) -> Figure:
    """The row that comes near the leader with the least traffic, by place, and that traffic."""
    title = f"who first reaches the leader's mean less {NEAR:g} points, in every run, and what was sent until then"
    return _worded(map_, map_.cheapest(), title)


def margins(map_: Map, row: str) -> Figure:
    """The leader's lead over ``row`` in every place, with half of the 95 % interval."""
    squares = map_.leads_over(row)
    fig, axes = _figure(map_)
    table = _table(map_, squares)
    shaded(axes, table)
    for place, x, y in _cells(map_):
        if place in squares:
            axes.text(x, y, "\n".join(squares[place].words), color=ink(table, table[y, x]), **CENTRED)
    title = f"leader minus {map_.labels[row]}, points; * p < 0.05 (paired t-test, Holm over places;\n"
    title += "that the leader was chosen by the same seeds is not corrected for)"
    axes.set_title(title, fontsize=8)
    return fig


def methods(map_: Map) -> Figure:
    """A heat map of every row's accuracy, all on one scale."""
    rows = list(map_.labels)
    across = min(_PANELS, len(rows))
    down = math.ceil(len(rows) / across)
    columns, lines = _ends(map_)
    size = (1.1 + 1.35 * across, 0.5 + (0.65 + 0.16 * max(len(lines), 2)) * down)
    fig = Figure(figsize=size, layout="constrained")
    panels = fig.subplots(down, across, sharex=True, sharey=True, squeeze=False).flatten()
    means = {row: map_.means(row) for row in rows}
    known = [square.value for own in means.values() for square in own.values()]
    scale = (min(known, default=0.0), max(known, default=1.0))
    image = None
    for axes, row in zip(panels, rows, strict=False):
        image = shaded(axes, _table(map_, means[row]), vmin=scale[0], vmax=scale[1])
        axes.set_title(map_.labels[row], fontsize=6.5, pad=2)
        axes.spines[:].set_visible(False)
        axes.set_xticks(range(len(columns)), columns, fontsize=5, rotation=60)
        axes.set_yticks(range(len(lines)), lines, fontsize=5)
    for axes in panels[len(rows) :]:
        axes.set_visible(False)
    if image is not None:
        bar = fig.colorbar(image, ax=list(panels), shrink=0.6, label=heading(map_.headline))
        bar.ax.tick_params(labelsize=6)
    names = list(map_.axes)
    fig.supxlabel(names[0], fontsize=8)
    fig.supylabel(names[1] if len(names) > 1 else "", fontsize=8)
    return fig


def curves(map_: Map, axis: str) -> Figure:
    """The rows with the best mean ranks along one axis, means ± standard deviations; a panel by value of the other."""
    at = list(map_.axes).index(axis)
    values = map_.axes[axis]
    others = [value for name, own in map_.axes.items() if name != axis for value in own] or [""]
    fig = Figure(figsize=(1.0 + 1.75 * len(others), 2.6), layout="constrained")
    panels = fig.subplots(1, len(others), sharey=True, squeeze=False)[0]
    named = [name for name in map_.axes if name != axis]
    for axes, other in zip(panels, others, strict=True):
        for number, row in enumerate(list(map_.labels)[:_CURVES]):
            means, spreads = [], []
            for value in values:
                place = tuple(value if n == at else other for n in range(len(map_.axes)))
                line = map_.line(place, row) if place in map_.tables else None
                cell = None if line is None else line.cell(map_.headline)
                means.append(math.nan if cell is None else cell.mean)
                spreads.append(0.0 if cell is None or math.isnan(cell.std) else cell.std)
            look = look_of(number) | {"markersize": 3, "linewidth": 1}
            axes.errorbar(range(len(values)), means, spreads, label=map_.labels[row], capsize=1.5, **look)
        axes.set_xticks(range(len(values)), values, fontsize=6)
        axes.grid(alpha=0.25, linewidth=0.5)
        axes.set_title(f"{named[0]} {other}" if named else "", fontsize=7)
    panels[0].set_ylabel(f"{heading(map_.headline)} (%)", fontsize=8)
    fig.supxlabel(f"{axis} (mean ± standard deviation over seeds)", fontsize=8)
    legend_below(fig, panels[0])
    return fig


def _ends(map_: Map) -> tuple[Sequence[str], Sequence[str]]:
    """The values across and down; with one axis there is a single line."""
    first, *rest = map_.axes.values()
    return first, rest[0] if rest else ("",)


def _table(map_: Map, squares: Mapping[Place, Square]) -> NDArray[np.float64]:
    columns, lines = _ends(map_)
    table = np.full((len(lines), len(columns)), math.nan)
    for place, x, y in _cells(map_):
        table[y, x] = squares[place].value if place in squares else math.nan
    return table


def _figure(map_: Map, legend: bool = False) -> tuple[Figure, Axes]:
    columns, lines = _ends(map_)
    size = (1.2 + _WIDE * len(columns), 0.9 + _HIGH * len(lines) + (0.5 if legend else 0.0))
    fig = Figure(figsize=size, layout="constrained")
    axes = fig.subplots()
    names = list(map_.axes)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(lines)), lines)
    axes.set_xlabel(names[0])
    axes.set_ylabel(names[1] if len(names) > 1 else "")
    return fig, axes


def _cells(map_: Map) -> Iterator[tuple[Place, int, int]]:
    columns, lines = _ends(map_)
    for place in map_.tables:
        yield place, columns.index(place[0]), lines.index(place[1]) if len(place) > 1 else 0


def _worded(map_: Map, squares: Mapping[Place, Square], title: str) -> Figure:
    """Places coloured by the row that they are about, with their words."""
    counts = Counter(map_.labels[square.row] for square in squares.values() if square.row)
    names = sorted(counts, key=lambda name: (-counts[name], name))
    shades = {name: _shade(number) for number, name in enumerate(names)}
    fig, axes = _figure(map_, legend=True)
    columns, lines = _ends(map_)
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(-0.5, len(lines) - 0.5)
    for place, x, y in _cells(map_):
        square = squares[place]
        shade, hatch = shades.get(map_.labels.get(square.row, ""), "#eeeeee"), TIED if square.is_tied else None
        axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fc=shade, ec="white", hatch=hatch, linewidth=1.5))
        box = {"facecolor": shade, "edgecolor": "none", "pad": 1.0}
        axes.text(x, y, "\n".join(square.words), bbox=box, **CENTRED | {"fontsize": 6.5})
    axes.set_title(title, fontsize=8)
    patches = [Patch(facecolor=shades[name], label=f"{name} ({counts[name]})") for name in names]
    fig.legend(handles=patches, loc="outside lower center", ncols=5, fontsize=6.5, frameon=False)
    return fig


def _shade(number: int) -> str:
    """The strong colours of tab20 first, then its pale ones; all light enough for black words."""
    red, green, blue, _ = colormaps["tab20"](2 * number % 20 + number // 10 % 2)
    return to_hex((0.55 * red + 0.45, 0.55 * green + 0.45, 0.55 * blue + 0.45))
