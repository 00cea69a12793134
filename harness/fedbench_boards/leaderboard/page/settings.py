"""Parts of a page over all settings: rows by mean rank, critical differences, and the map of a suite with axes."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from markupsafe import Markup

from fedbench.core.wording import MEGA, NONE, heading
from fedbench_boards.leaderboard.across.map import NEAR, Map, Place
from fedbench_boards.leaderboard.across.table import across_table, labels_of
from fedbench_boards.leaderboard.model import Board
from fedbench_boards.leaderboard.page.model import (
    MapCell,
    MapSection,
    MapView,
    Overview,
    PageCell,
    PageColumn,
    Ranking,
    Section,
)
from fedbench_boards.leaderboard.page.svg import swatch
from fedbench_boards.leaderboard.tables import TextColumn


def overview_of(sections: Sequence[Section], board: Board, styles: Mapping[str, int]) -> Overview:
    """A line per row, a cell per section: the section's headline."""
    cells: dict[str, list[PageCell]] = {}
    called: dict[str, tuple[str, str]] = {}
    for column, (section, table) in enumerate(zip(sections, board.tables, strict=True)):
        place = next(i for i, c in enumerate(section.columns) if c.key == table.headline)
        for line, row in zip(table.lines, section.rows, strict=True):
            own = cells.setdefault(line.row, [PageCell(NONE)] * len(sections))
            own[column] = replace(row.cells[place], mark=row.mark)
            called[line.row] = (row.name, "" if line.backbone in row.name else line.backbone)
    several = len({backbone for _, backbone in called.values()}) > 1
    rows = []
    for name, own in cells.items():
        label, backbone = called[name]
        rows.append((label, backbone if several else "", swatch(styles[name]), own))
    return Overview(rows)


def ranking_of(board: Board, styles: Mapping[str, int]) -> Ranking | None:
    """The table and the diagram of ``board.across``; ``styles`` are the numbers of the rows' signs."""
    table, overall = across_table(board), board.across
    if table is None or overall is None:
        return None
    shown = [table.rank, *table.scores]
    columns = [PageColumn(column.heading, column.heading, first=_first(column)) for column in shown]
    rows = []
    for number, row in enumerate(overall.mean_ranks.index):
        cells = [_cell(column.cells[number]) for column in shown]
        rows.append((table.names[0].cells[number], swatch(styles[row]), cells))
    notes = [f"{note[:1].upper()}{note[1:]}." for note in table.notes]
    return Ranking(table.caption, columns, rows, notes, _diagram(board))


def _first(column: TextColumn) -> str:
    return "ascending" if column.heading in ("#", "mean rank", "losses") else "descending"


def _cell(text: str) -> PageCell:
    value, sign, half = text.partition(" ± ")
    return PageCell(value, value=value, spread=f"± {half}" if sign else "", deviation=half)


def _diagram(board: Board) -> Markup:
    from fedbench_boards.leaderboard.across.diagram import critical_differences
    from fedbench_boards.leaderboard.figures.draw import style

    assert board.across is not None
    with style():
        fig = critical_differences(board.across, labels_of(board))
        file = io.StringIO()
        fig.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    drawn = file.getvalue()
    # the page's own colour in place of black, for dark pages; the drawing scales with the column
    drawn = drawn[drawn.index("<svg") :].replace("#000000", "currentColor")
    return Markup(re.sub(r'(<svg [^>]*?)width="[^"]*" height="[^"]*"|(<svg )height="[^"]*"', r"\1\2", drawn, count=1))


def map_section(map_: Map, of_tables: Mapping[int, str], styles: Mapping[str, int]) -> MapSection:
    """The map's views; ``of_tables`` are the anchors of tables by their `id`, ``styles`` the numbers of rows' signs."""
    anchors = {place: of_tables[id(table)] for place, table in map_.tables.items()}
    metric = heading(map_.headline)
    tied = "Hatched: others can't be told from it by their seeds."
    views = [_view(map_, "who leads", f"The best mean {metric} of every place. {tied}", _leader(map_, anchors, styles))]
    for row in (map_.zero_shot(), map_.base()):
        if row is not None:
            read = f"The leader's {metric} minus that of {map_.labels[row]}, in points. * p < 0.05, Holm over places; "
            read += "that the leader was chosen by the same seeds is not corrected for."
            views.append(_view(map_, f"leader minus {map_.labels[row]}", read, _margin(map_, row, anchors)))
    if map_.costs:
        read = f"Who first reaches the leader's mean less {NEAR:g} points in every run, and what was sent until then."
        views.append(_view(map_, "least traffic to come near", read, _cost(map_, anchors, styles)))
    for row, label in map_.labels.items():
        read = f"Mean {metric} of {label}, and its rank; shades are those of all rows."
        views.append(_view(map_, label, read, _mean(map_, row, anchors)))
    axes = list(map_.axes.items())
    return MapSection(axes[0][0], axes[1][0] if len(axes) > 1 else "", list(axes[0][1]), views)


def _view(map_: Map, name: str, read: str, cell: Callable[[Place], MapCell]) -> MapView:
    first, *rest = map_.axes.values()
    lines: Sequence[str] = rest[0] if rest else ("",)
    rows = []
    for line in reversed(lines):
        places = [(column, line) if rest else (column,) for column in first]
        rows.append((line, [cell(place) if place in map_.tables else MapCell("", [NONE]) for place in places]))
    return MapView(name, read, rows)


def _leader(map_: Map, anchors: Mapping[Place, str], styles: Mapping[str, int]) -> Callable[[Place], MapCell]:
    def cell(place: Place) -> MapCell:
        first, tied = map_.leader(place), map_.tied(place)
        if first is None:
            return MapCell(anchors[place], ["no rank"])
        others = [f"= {len(tied) - 1} more"] if len(tied) > 1 else []
        words = [map_.labels[first.row], f"{first.cell(map_.headline).mean:.1f}", *others]
        return MapCell(anchors[place], words, hatched=bool(others), sign=swatch(styles[first.row]))

    return cell


def _margin(map_: Map, row: str, anchors: Mapping[Place, str]) -> Callable[[Place], MapCell]:
    measured = map_.margins(row)
    most = max((one.mean for one in measured.values()), default=0.0)

    def cell(place: Place) -> MapCell:
        if place not in measured:
            return MapCell(anchors[place], [NONE])
        one = measured[place]
        half = [] if math.isnan(one.low) else [f"± {(one.high - one.low) / 2:.1f}"]
        words = [f"{one.mean:+.1f}{' *' if one.is_significant else ''}", *half]
        return MapCell(anchors[place], words, _shade(one.mean, 0.0, most))

    return cell


def _cost(map_: Map, anchors: Mapping[Place, str], styles: Mapping[str, int]) -> Callable[[Place], MapCell]:
    def cell(place: Place) -> MapCell:
        cost = map_.costs.get(place)
        if cost is None:
            return MapCell(anchors[place], ["none"])
        words = [map_.labels[cost.row], f"{cost.bytes / MEGA:.3g} MB", f"to {cost.target:.1f} %"]
        return MapCell(anchors[place], words, sign=swatch(styles[cost.row]))

    return cell


def _mean(map_: Map, row: str, anchors: Mapping[Place, str]) -> Callable[[Place], MapCell]:
    every = [line.cell(map_.headline).mean for table in map_.tables.values() for line in table.lines]
    known = [mean for mean in every if not math.isnan(mean)]

    def cell(place: Place) -> MapCell:
        line = map_.line(place, row)
        if line is None or math.isnan(line.cell(map_.headline).mean):
            return MapCell(anchors[place], [NONE])
        mean = line.cell(map_.headline).mean
        rank = [] if line.place is None else [f"# {line.place}"]
        return MapCell(anchors[place], [f"{mean:.1f}", *rank], _shade(mean, min(known), max(known)))

    return cell


def _shade(value: float, low: float, high: float) -> str:
    return f"{min(max((value - low) / (high - low), 0.0), 1.0):.2f}" if high > low else "0"
