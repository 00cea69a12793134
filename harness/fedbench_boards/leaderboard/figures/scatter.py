"""Figures of points: entropies of predictions, features in the plane, which client holds what."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fedbench_boards.leaderboard.figures.draw import COLOURS, figure

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
        handles = panels[0].get_legend_handles_labels()
        made.legend(*handles, loc="outside lower center", ncols=5, fontsize=6, frameon=False, markerscale=2)
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
        for place, client in enumerate(order):
            sizes = _LARGEST * np.sqrt(held[client] / held.max())
            colour = COLOURS[own[client] % len(COLOURS)]
            axes.scatter(np.full(len(sizes), place), np.arange(len(sizes)), s=sizes, color=colour, linewidths=0)
        for edge in np.flatnonzero(np.diff(own[order])):
            axes.axvline(edge + 0.5, color="black", linewidth=0.5, linestyle=":")
        axes.set_xticks(range(len(order)), [str(client) for client in order], fontsize=5, rotation=90)
        axes.set_xlabel("client")
        axes.set_title(f"clusters of {way}" if way else "", fontsize=8)
    panels[0].set_yticks(range(len(classnames)), classnames, fontsize=6)
    return made
