"""Figures of recorded runs, as papers draw them, and the data of figures over seeds: sized for one column of a page."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib import colormaps, rc_context
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fedbench.core.errors import FedbenchError, unknown_name
from fedbench.core.files import replacing
from fedbench.core.metric_names import OF_EACH
from fedbench.core.spec import BUDGET
from fedbench.core.wording import counted, heading
from fedbench.tracking.schema import FINAL
from fedbench_boards.leaderboard.failures import attempts
from fedbench_boards.leaderboard.rows import (
    PROTOCOL,
    ROW,
    grouped,
    label_of,
    newest_version,
    row_of,
    scores_of,
    told_apart,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage


@dataclass(frozen=True)
class Point:
    """Mean and deviation (of the sample; NaN for one seed) of a metric at the values of the swept settings."""

    at: tuple[float | str, ...]
    mean: float
    std: float
    seeds: int


def settings_of(run: pd.Series) -> dict[str, str]:
    """All settings of a run, by their names for ``--set``."""
    row = {name.removeprefix("training."): str(value) for name, value in json.loads(run["row_settings"]).items()}
    scenario = {name: str(value) for name, value in json.loads(run["scenario_settings"]).items()}
    return {**scenario, **{name: str(run[name]) for name in BUDGET}, **row}


def swept(results: pd.DataFrame, keys: Sequence[str], metric: str) -> dict[str, list[Point]]:
    """The points of each method, ascending, over the values that its runs have of the settings ``keys``.

    Methods whose runs have only one value are left out; rows of one method that differ in these settings only are taken
    together, and lines of one method have the settings in their names by which they differ. FedbenchError for a setting
    of which no run has several values.
    """
    frame = results.copy()
    settings = [settings_of(run) for _, run in frame.iterrows()]
    for key in keys:
        known = sorted({name for run in settings for name in run})
        if not any(key in run for run in settings):
            raise unknown_name("setting of these runs", key, known)
        frame[f"at {key}"] = [_value(run.get(key, "")) for run in settings]
    kinds = frame[["backbone", "tune", "dataset"]].to_dict("records")
    rests = [{k: v for k, v in run.items() if k not in keys} for run in settings]
    frame["apart"] = [json.dumps(kind | rest, sort_keys=True) for kind, rest in zip(kinds, rests, strict=True)]
    at = [f"at {key}" for key in keys]
    names: list[str] = []
    apart: list[dict[str, str]] = []
    series: list[list[Point]] = []
    for (method, _, rest), runs in frame.groupby(["method", "setting", "apart"], sort=False):
        runs = runs[(runs[at] != "").all(axis=1)]
        points = [_point(values, of, metric) for values, of in runs.groupby(at, sort=False)]
        if len(points) > 1:
            setting = runs["setting"].iloc[0] if frame["setting"].nunique() > 1 else ""
            names.append(f"{method}, {setting}" if setting else str(method))
            apart.append(json.loads(str(rest)))
            series.append(sorted(points, key=lambda point: tuple(map(_order, point.at))))
    if not series:
        raise FedbenchError(
            f"no method has runs at several values of {' and '.join(keys)}; run some, for instance with --set "
            f"{keys[0]}=VALUE,VALUE."
        )
    return dict(zip(told_apart(names, apart), series, strict=True))


def rows_of(results: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The runs of each row, of its newest code, one a seed, by its label; by its full name if others have the same
    label, with the settings in which they differ if others have the same name, such as another budget.
    """
    runs = results.sort_values("started", kind="stable").drop_duplicates([*PROTOCOL, *ROW, "seed"], keep="last")
    protocols = [own for _, own in attempts(runs, None).groupby(list(PROTOCOL), sort=False, dropna=False)]
    rows = [row for own in protocols for row in newest_version(grouped(own))]
    kinds = ("method", "backbone", "tune", "precision", "dataset", "files_hash")
    settings = [{**{kind: str(row[kind].iloc[0])[:40] for kind in kinds}, **settings_of(row.iloc[0])} for row in rows]
    named = dict(zip(told_apart([row_of(row) for row in rows], settings), rows, strict=True))
    alike = Counter(map(label_of, named))
    return {label_of(name) if alike[label_of(name)] == 1 else name: row for name, row in named.items()}


def by_row(results: pd.DataFrame, metrics: Sequence[str]) -> dict[str, dict[str, pd.Series]]:
    """Row, as in `rows_of` -> metric -> its value by seed, of the metrics that the row has."""
    rows: dict[str, dict[str, pd.Series]] = {}
    for name, runs in rows_of(results).items():
        scores = {metric: scores_of(runs, metric) for metric in metrics}
        rows[name] = {metric: pd.Series(own) for metric, own in scores.items() if own}
    return rows


def _point(values: Any, runs: pd.DataFrame, metric: str) -> Point:
    own = runs.drop_duplicates("seed", keep="last")[FINAL + metric]
    return Point(tuple(values), float(own.mean(skipna=False)), float(own.std(ddof=1)), len(own))


def _value(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _order(value: float | str) -> tuple[bool, float, str]:
    return (isinstance(value, str), 0.0 if isinstance(value, str) else value, str(value))


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
    for number, (name, points) in enumerate(series.items()):
        deviations = [0.0 if math.isnan(point.std) else point.std for point in points]
        axes.errorbar(
            [point.at[0] for point in points],
            [point.mean for point in points],
            deviations,
            label=name,
            capsize=2,
            **look_of(number),
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
    image = shaded(axes, table)
    for (row, column), value in np.ndenumerate(table):
        if not math.isnan(value):
            axes.text(column, row, f"{value:.1f}", color=ink(table, value), **CENTRED)
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
        for number, (row, of) in enumerate(frame.groupby("row", sort=False)):
            mean = of.groupby("round")[metric].mean().dropna()
            # a line of one point would not be seen
            marker = "." if len(mean) == 1 else ""
            axes.plot(
                mean.index, mean.to_numpy(), label=row, linewidth=1.2, color=look_of(number)["color"], marker=marker
            )
        axes.set_title(_titled(metric), fontsize=8)
        axes.set_xlabel("round")
    panels[0].set_ylabel("%" if all("accuracy" in metric for metric in known) else "")
    legend_below(fig, panels[0])
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
    for number, (row, of) in enumerate(rows.items()):
        axes.plot(range(1, of.shape[1] + 1), of.mean().to_numpy(), label=row, **look_of(number))
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
    for number, metric in enumerate(known):
        at = np.arange(len(others)) + (number - (len(known) - 1) / 2) * thickness
        above = [
            (rows[name][metric] - rows[base][metric]).mean() if metric in rows[name] else math.nan for name in others
        ]
        axes.barh(at, above, thickness, label=heading(metric), color=COLOURS[number % len(COLOURS)])
    axes.set_yticks(range(len(others)), others)
    axes.set_ylim(len(others) - 0.4, -0.6)
    axes.axvline(0, color="black", linewidth=0.6)
    _finish(axes, f"points above {base}", "", 1)
    legend_below(fig, axes)
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


CENTRED: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7}
"""How words stand in a square of a grid."""


def shaded(axes: Axes, table: NDArray[np.float64], **limits: Any) -> AxesImage:
    """A grid of squares shaded by the values of ``table``, its first line below."""
    return axes.imshow(table, cmap="viridis", aspect="auto", origin="lower", **limits)


def ink(table: NDArray[np.float64], value: float) -> str:
    """The colour that is read on the shade of ``value`` in a grid of ``table``."""
    return "black" if value > (np.nanmin(table) + np.nanmax(table)) / 2 else "white"


def look_of(number: int) -> dict[str, Any]:
    colour, marker = COLOURS[number % len(COLOURS)], _MARKERS[number % len(_MARKERS)]
    return {"color": colour, "marker": marker, "markersize": 3.5, "linewidth": 1.2}


def _finish(axes: Axes, across: str, up: str, count: int) -> None:
    axes.set_xlabel(across)
    axes.set_ylabel(f"{up} (%)" if up else "")
    axes.grid(alpha=0.25, linewidth=0.5)
    if count > 1:
        axes.legend(fontsize=6, frameon=False)


def legend_below(fig: Figure, of: Axes, **look: Any) -> None:
    """What the series of ``of`` are, below the whole figure."""
    look = {"ncols": 4, "fontsize": 6, "frameon": False} | look
    fig.legend(*of.get_legend_handles_labels(), loc="outside lower center", **look)


def _text(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


MOST_IN_LEGEND = 12
_LARGEST = 60
"""Area of the largest dot, in square points."""


def entropies(rows: Mapping[str, NDArray[np.float64]], classes: int) -> Figure:
    """A panel a row: a dot for the entropy of every test sample's prediction, and the bound log2 C as a line."""
    made, panels = figure(len(rows), height=2.0)
    for axes, (row, values) in zip(panels, rows.items(), strict=True):
        axes.plot(values, ".", markersize=1.5, alpha=0.5, color=COLOURS[2], rasterized=True)
        axes.axhline(math.log2(classes), color=COLOURS[1], linewidth=1)
        axes.set_title(f"{row}: mean {values.mean():.2f}", fontsize=8)
        axes.set_xlabel("test sample")
        axes.set_ylim(0, 1.05 * math.log2(classes))
    panels[0].set_ylabel("entropy (bits)")
    return made


def embedding(rows: Mapping[str, tuple[NDArray[np.float64], NDArray[np.int64]]], classnames: Sequence[str]) -> Figure:
    """A panel a row: the samples in the plane, (n, 2), a colour a class (n,)."""
    made, panels = figure(len(rows))
    colours = colormaps["tab20" if len(classnames) > 10 else "tab10"]
    for axes, (row, (plane, labels)) in zip(panels, rows.items(), strict=True):
        for label, name in enumerate(classnames):
            own = plane[labels == label]
            axes.plot(own[:, 0], own[:, 1], ".", markersize=2, color=colours(label % colours.N), label=name)
        axes.set_title(row, fontsize=8)
        axes.set_xticks([])
        axes.set_yticks([])
    if len(classnames) <= MOST_IN_LEGEND:
        legend_below(made, panels[0], ncols=5, markerscale=2)
    return made


def holdings(
    counts: Sequence[Sequence[int]], classnames: Sequence[str], clusters: Mapping[str, NDArray[np.int64]]
) -> Figure:
    """Which client holds what: a dot for each client and class, its area as the root of the samples, a panel a
    way to cluster.

    ``counts`` (clients, classes). Clients stand in the order of their clusters, which have a colour each and lines
    between them; in the order of their numbers where there are none.
    """
    held = np.array(counts)
    ways = dict(clusters) or {"": np.zeros(len(held), dtype=np.int64)}
    made, panels = figure(len(ways), height=max(2.5, 0.13 * len(classnames) + 1.0))
    for axes, (way, own) in zip(panels, ways.items(), strict=True):
        order = np.argsort(own[: len(held)], kind="stable")
        for position, client in enumerate(order):
            sizes = _LARGEST * np.sqrt(held[client] / held.max())
            colour = COLOURS[own[client] % len(COLOURS)]
            axes.scatter(np.full(len(sizes), position), np.arange(len(sizes)), s=sizes, color=colour, linewidths=0)
        for edge in np.flatnonzero(np.diff(own[order])):
            axes.axvline(edge + 0.5, color="black", linewidth=0.5, linestyle=":")
        axes.set_xticks(range(len(order)), [str(client) for client in order], fontsize=5, rotation=90)
        axes.set_xlabel("client")
        axes.set_title(f"clusters of {way}" if way else "", fontsize=8)
    panels[0].set_yticks(range(len(classnames)), classnames, fontsize=6)
    return made
