"""A partition as a drawing: clients against classes, with class totals above and client sizes beside."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from fedbench.core.errors import FedbenchError
from fedbench.core.files import replacing
from fedbench.scenarios.groups import BY_COUNT, BY_POSITION
from fedbench.scenarios.picture import ClientPicture, PartitionPicture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

DPI = 150
"""Resolution in pixels per inch."""
MOST_CLIENTS = 2000
"""The most clients that are drawn; with more, a client would be thinner than a pixel."""
NAMED_CLASSES = 30
"""With more classes the axis shows their numbers."""
_LISTED_CLIENTS = 60
"""With more clients the axis shows every fifth id or fewer."""
_NUMBERED_CELLS = 240
"""With more cells the counts are shown by colour alone."""
_RULED = 200
"""With more clients or classes, lines between them would cover the cells."""
_GROUPS = dict(zip((*BY_POSITION, *BY_COUNT), 2 * ("#0072b2", "#e69f00", "#009e73"), strict=True))
"""Colours of reporting groups, from Okabe and Ito's palette, which colour-blind readers can tell apart."""
_PLAIN, _LINES = "#5f6b7a", "#dfe3e8"
_SMALL = 7
# without the palest blues, in which a single sample would look like none
_CELLS = ListedColormap(colormaps["Blues"](np.linspace(0.2, 1.0, 256)))


def check_png(file: Path) -> None:
    """FedbenchError for a file that is not called ``*.png``, ``*.pdf`` or ``*.svg``."""
    if file.suffix.lower() not in _UNDATED:
        raise FedbenchError(
            f"--png {str(file)!r} is not a .png, .pdf or .svg file; write for instance --png partition.png."
        )


_UNDATED: dict[str, dict[str, None]] = {".png": {}, ".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
"""File ending -> metadata to leave out, so that drawing one figure again gives the same file."""


def write_png(figure: Figure, file: Path) -> None:
    """Write ``figure`` atomically in the format of the file's ending; creates folders. FedbenchError if that fails."""
    check_png(file)
    with replacing(file, "picture", "choose another --png") as temporary:
        ending = file.suffix.lower()
        figure.savefig(temporary, format=ending[1:], dpi=DPI, metadata=_UNDATED[ending])


def draw(picture: PartitionPicture, title: Sequence[str]) -> Figure:
    """The drawing, with the paragraphs of ``title`` above it. Its size grows with clients and classes, to 18 inches.

    If there are more than 2,000 clients, the first are drawn and the title says so; class totals are over all clients.
    """
    everybody, paragraphs = picture, list(title)
    if len(picture.clients) > MOST_CLIENTS:
        paragraphs.append(f"Drawn are the first {MOST_CLIENTS:,} of {len(picture.clients):,} clients.")
        picture = replace(picture, clients=picture.clients[:MOST_CLIENTS])
    width, height = _inches(*picture.counts.shape)
    lines = [line for paragraph in paragraphs for line in textwrap.wrap(paragraph, int(14 * width))]
    height += 0.17 * len(lines)
    figure = Figure(figsize=(width, height), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(width - 2.6, 1.5), height_ratios=(1.1, height - 2.6))
    cells = figure.add_subplot(grid[1, 0])
    image = _draw_cells(cells, picture)
    _draw_classes(figure.add_subplot(grid[0, 0], sharex=cells), everybody)
    _draw_sizes(figure.add_subplot(grid[1, 1], sharey=cells), picture)
    _draw_keys(figure.add_subplot(grid[0, 1]), picture, image)
    figure.suptitle("\n".join(lines), fontsize=10, x=0.01, ha="left")
    return figure


def _inches(clients: int, classes: int) -> tuple[float, float]:
    """Width and height: the first clients and classes get room for their names, the further ones less."""
    width = 3.6 + 0.33 * min(classes, NAMED_CLASSES) + 0.05 * max(classes - NAMED_CLASSES, 0)
    height = 3.0 + 0.26 * min(clients, 20) + 0.085 * max(clients - 20, 0)
    return min(max(width, 8.0), 18.0), min(max(height, 4.5), 18.0)


def _draw_cells(axes: Axes, picture: PartitionPicture) -> AxesImage:
    counts = picture.counts
    # logarithmic, so that a few samples of a rare class show beside thousands; empty cells stay white
    norm = LogNorm(vmin=1, vmax=max(int(counts.max()), 2))
    held = np.ma.masked_equal(counts, 0)
    image = axes.imshow(held, cmap=_CELLS, norm=norm, aspect="auto", interpolation="nearest")
    if counts.size <= _NUMBERED_CELLS:
        for client, label in np.argwhere(counts).tolist():
            count = int(counts[client, label])
            colour = "white" if norm(count) > 0.55 else "black"
            axes.text(label, client, str(count), ha="center", va="center", fontsize=_SMALL, color=colour)
    _name_axes(axes, picture)
    _rule(axes, *counts.shape)
    return image


def _name_axes(axes: Axes, picture: PartitionPicture) -> None:
    axes.set_xlabel("class")
    axes.set_ylabel("client")
    axes.tick_params(labelsize=_SMALL)
    if len(picture.classnames) <= NAMED_CLASSES:
        axes.set_xticks(range(len(picture.classnames)), picture.classnames, rotation=45, ha="right")
    else:
        axes.xaxis.set_major_locator(MaxNLocator(20, integer=True))
    if len(picture.clients) <= _LISTED_CLIENTS:
        axes.set_yticks(range(len(picture.clients)), [_called(client) for client in picture.clients])
    else:
        axes.yaxis.set_major_locator(MaxNLocator(20, integer=True))


def _called(client: ClientPicture) -> str:
    return f"{client.id} {client.domains[0]}" if len(client.domains) == 1 else str(client.id)


def _rule(axes: Axes, clients: int, classes: int) -> None:
    if max(clients, classes) <= _RULED:
        for position in np.arange(clients - 1) + 0.5:
            axes.axhline(position, color=_LINES, linewidth=0.5)
        for position in np.arange(classes - 1) + 0.5:
            axes.axvline(position, color=_LINES, linewidth=0.5)


def _draw_classes(axes: Axes, picture: PartitionPicture) -> None:
    group_of = {label: group for group, members in picture.groups.items() for label in members}
    colours = _colours(picture)
    bars = [colours[group_of[label]] if label in group_of else _PLAIN for label in range(len(picture.classnames))]
    axes.bar(range(len(bars)), picture.class_counts, color=bars, width=0.85)
    axes.set_ylabel("samples")
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.tick_params(labelbottom=False, labelsize=_SMALL)


def _colours(picture: PartitionPicture) -> dict[str, str]:
    """Colour by group; groups that a data set's own lists name otherwise get matplotlib's cycle."""
    return {group: _GROUPS.get(group, f"C{position}") for position, group in enumerate(picture.groups)}


def _draw_sizes(axes: Axes, picture: PartitionPicture) -> None:
    axes.barh(range(len(picture.clients)), picture.sizes, color=_PLAIN, height=0.85)
    axes.set_xlabel("samples")
    axes.xaxis.set_major_locator(MaxNLocator(3, integer=True))
    axes.tick_params(labelleft=False, labelsize=_SMALL)


def _draw_keys(axes: Axes, picture: PartitionPicture, image: AxesImage) -> None:
    """Keys to the colours of bars and cells."""
    axes.set_axis_off()
    if picture.groups:
        patches = [Patch(color=colour, label=group) for group, colour in _colours(picture).items()]
        axes.legend(handles=patches, fontsize=_SMALL, frameon=False, loc="upper left", borderpad=0, borderaxespad=0)
    bar = axes.figure.colorbar(image, cax=axes.inset_axes((0.0, 0.22, 1.0, 0.1)), orientation="horizontal")
    bar.ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    bar.ax.xaxis.set_minor_formatter(NullFormatter())
    bar.ax.tick_params(labelsize=_SMALL)
    bar.ax.set_title(f"samples in a cell, up to {picture.counts.max():,}", fontsize=_SMALL, loc="left", pad=2)
