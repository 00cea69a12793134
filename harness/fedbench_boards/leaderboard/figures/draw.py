"""Figures of numbers: curves over a swept setting, grids of two, metrics by round, by layer, gains by group, gaps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure

from fedbench.core.errors import FedbenchError
from fedbench.core.files import replacing
from fedbench.core.metric_names import OF_EACH
from fedbench.core.wording import counted, heading
from fedbench_boards.leaderboard.figures.points import Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg", ".pdf")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c6d31")
"""Okabe and Ito's palette, which colour-blind readers can tell apart."""
_MARKERS = "os^Dv*PX"
_MEASURED = {"cka_global/": "CKA with the global model", "cka_clients/": "CKA between clients"}
_COLUMN = 3.4
"""The width of a page's column in inches."""
_STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "fedbench",
}


def figure(panels: int = 1, height: float = 2.5) -> tuple[Figure, list[Axes]]:
    """A figure of ``panels`` side by side, each as wide as a column (two share a page's width)."""
    width = _COLUMN if panels == 1 else _COLUMN * 0.62 * panels
    fig = Figure(figsize=(width, height), layout="constrained")
    axes = fig.subplots(1, panels, sharey=panels > 1, squeeze=False)[0]
    return fig, list(axes)


def lines(series: Mapping[str, Sequence[Point]], key: str, metric: str) -> Figure:
    """``metric`` over the values of one setting, a line a method, with its deviation over seeds.

    A point of fewer seeds than others of its line, the rest of which diverged or were not run, says of how many.
    """
    fig, (axes,) = figure()
    values = [point.at[0] for points in series.values() for point in points]
    numbers = [value for value in values if isinstance(value, float)]
    if len(numbers) == len(values) and min(numbers) > 0 and max(numbers) / min(numbers) >= 8:
        axes.set_xscale("log")
        axes.set_xticks(sorted(set(numbers)), [f"{value:g}" for value in sorted(set(numbers))])
        axes.minorticks_off()
    for place, (name, points) in enumerate(series.items()):
        deviations = [0.0 if math.isnan(point.std) else point.std for point in points]
        axes.errorbar(
            [point.at[0] for point in points],
            [point.mean for point in points],
            deviations,
            label=name,
            capsize=2,
            **_look(place),
        )
        most = max(point.seeds for point in points)
        for point in points:
            if point.seeds < most:
                few, at = f"{point.seeds} of {counted(most, 'seed')}", (point.at[0], point.mean)
                axes.annotate(few, at, (0, -10), textcoords="offset points", ha="center", fontsize=6)
    _finish(axes, key, heading(metric), len(series))
    return fig


def grid(points: Sequence[Point], keys: Sequence[str], metric: str, name: str) -> Figure:
    """``metric`` over the values of two settings, as a grid of cells with their numbers."""
    across, down = ({point.at[axis]: None for point in points} for axis in (0, 1))
    columns, rows = (sorted(values, key=lambda v: (isinstance(v, str), v)) for values in (across, down))
    means = {point.at: point.mean for point in points}
    table = np.array([[means.get((column, row), math.nan) for column in columns] for row in rows])
    fig, (axes,) = figure(height=max(2.2, 0.32 * len(rows) + 1.0))
    image = axes.imshow(table, cmap="viridis", aspect="auto", origin="lower")
    middle = (np.nanmin(table) + np.nanmax(table)) / 2
    for (row, column), value in np.ndenumerate(table):
        if not math.isnan(value):
            colour = "black" if value > middle else "white"
            axes.text(column, row, f"{value:.1f}", ha="center", va="center", color=colour, fontsize=7)
    for axis, values, key in ((axes.xaxis, columns, keys[0]), (axes.yaxis, rows, keys[1])):
        axis.set_ticks(range(len(values)), [_text(value) for value in values])
        axis.set_label_text(key)
    axes.set_title(f"{name}: {heading(metric)}", fontsize=8)
    fig.colorbar(image, ax=axes)
    return fig


def rounds(curves: pd.DataFrame, owners: Mapping[str, str], metrics: Sequence[str]) -> Figure:
    """Each of ``metrics`` by round in a panel of its own, a line a row: ``owners`` has the row of every run."""
    known = [metric for metric in metrics if metric in curves and curves[metric].notna().any()]
    if not known:
        raise FedbenchError("these runs have no curve of any of the metrics; runs with --set eval_every=... have.")
    fig, panels = figure(len(known))
    frame = curves.assign(row=curves["mlflow_id"].map(owners)).dropna(subset=["row"])
    for axes, metric in zip(panels, known, strict=True):
        for place, (row, of) in enumerate(frame.groupby("row", sort=False)):
            mean = of.groupby("round")[metric].mean().dropna()
            # a line of one point would not be seen
            marker = "." if len(mean) == 1 else ""
            axes.plot(mean.index, mean.to_numpy(), label=row, linewidth=1.2, color=_look(place)["color"], marker=marker)
        axes.set_title(_titled(metric), fontsize=8)
        axes.set_xlabel("round")
    panels[0].set_ylabel("%" if all("accuracy" in metric for metric in known) else "")
    _legend_below(fig, panels[0])
    return fig


def _titled(metric: str) -> str:
    """A metric's title; a measure of a group of classes has both names: ``drift/head`` is ``drift, head``."""
    whole, _, part = metric.rpartition("/")
    return f"{heading(whole)}, {heading(part)}" if whole and whole not in OF_EACH else heading(metric)


def layers(rows: Mapping[str, pd.DataFrame], prefix: str) -> Figure:
    """The mean over runs of a measure of each layer, a line a row, the deepest layer last.

    ``rows``: row -> a line a run, a column a layer.
    """
    fig, (axes,) = figure()
    for place, (row, of) in enumerate(rows.items()):
        axes.plot(range(1, of.shape[1] + 1), of.mean().to_numpy(), label=row, **_look(place))
    longest = max(rows.values(), key=lambda of: of.shape[1])
    names = [str(name).removeprefix(prefix) for name in longest]
    axes.set_xticks(range(1, len(names) + 1), names, rotation=60, ha="right", fontsize=6)
    _finish(axes, "layer", "", len(rows))
    axes.set_ylabel(_MEASURED.get(prefix, prefix.rstrip("/").replace("_", " ")))
    return fig


def gains(rows: Mapping[str, Mapping[str, pd.Series]], base: str, metrics: Sequence[str]) -> Figure:
    """Bars of each row's difference to the row ``base`` in each of ``metrics``: means over the seeds of both."""
    others = [name for name, own in rows.items() if name != base and any(metric in own for metric in metrics)]
    known = [metric for metric in metrics if metric in rows.get(base, {})]
    if base not in rows or not others or not known:
        raise FedbenchError(
            f"there is no row {base!r}, or nothing beside it, with {', '.join(map(heading, metrics))}; --baseline is "
            f"one of {', '.join(rows)}."
        )
    fig, (axes,) = figure(height=max(2.5, 0.075 * len(others) * len(known) + 1.0))
    thickness = 0.8 / len(known)
    for place, metric in enumerate(known):
        at = np.arange(len(others)) + (place - (len(known) - 1) / 2) * thickness
        above = [
            (rows[name][metric] - rows[base][metric]).mean() if metric in rows[name] else math.nan for name in others
        ]
        axes.barh(at, above, thickness, label=heading(metric), color=COLOURS[place % len(COLOURS)])
    axes.set_yticks(range(len(others)), others)
    axes.set_ylim(len(others) - 0.4, -0.6)
    axes.axvline(0, color="black", linewidth=0.6)
    _finish(axes, f"points above {base}", "", 1)
    _legend_below(fig, axes)
    return fig


def save(fig: Figure, file: Path) -> None:
    """Write a figure atomically in the format of the file's name. FedbenchError for another format."""
    if file.suffix.lower() not in SUFFIXES:
        raise FedbenchError(f"--output {str(file)!r} is none of {', '.join(SUFFIXES)}; write for instance sweep.pdf.")
    undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(file.suffix.lower(), {})
    with replacing(file, "figure", "choose another --output") as temporary, rc_context(_STYLE):
        fig.savefig(temporary, format=file.suffix.lower()[1:], dpi=200, metadata=undated)


def style() -> AbstractContextManager[None]:
    """A context with the type sizes of a page's column."""
    return rc_context(_STYLE)


def _look(place: int) -> dict[str, Any]:
    colour, marker = COLOURS[place % len(COLOURS)], _MARKERS[place % len(_MARKERS)]
    return {"color": colour, "marker": marker, "markersize": 3.5, "linewidth": 1.2}


def _finish(axes: Axes, across: str, up: str, count: int) -> None:
    axes.set_xlabel(across)
    axes.set_ylabel(f"{up} (%)" if up else "")
    axes.grid(alpha=0.25, linewidth=0.5)
    if count > 1:
        axes.legend(fontsize=6, frameon=False)


def _legend_below(fig: Figure, of: Axes) -> None:
    fig.legend(*of.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=6, frameon=False)


def _text(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"
