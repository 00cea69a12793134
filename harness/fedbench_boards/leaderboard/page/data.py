"""Build a page's content from a board: sections with tables and charts, an overview, how to make it again.

Parts over all settings are rows by mean rank, critical differences, and the map of a suite with axes.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
from markupsafe import Markup

from fedbench.core.wording import MEGA, NONE, heading, spread
from fedbench.kinds.measured import lower_is_better
from fedbench.plugins.provenance import versions
from fedbench_boards.leaderboard.across import NEAR, Map, Place, across_table, labels_of
from fedbench_boards.leaderboard.failures import reasons, shortened
from fedbench_boards.leaderboard.model import Board, Line, Printed, ScoreCell, Table
from fedbench_boards.leaderboard.page.charts import Bars, HeatMap, Series, against_cost, bars, by_round, heat_map
from fedbench_boards.leaderboard.page.model import (
    Chart,
    MapCell,
    MapSection,
    MapView,
    Overview,
    Page,
    PageCell,
    PageColumn,
    PageRow,
    Ranking,
    Reproduction,
    Section,
)
from fedbench_boards.leaderboard.page.svg import swatch
from fedbench_boards.leaderboard.page.table import (
    AGREEING,
    DOMAIN,
    assigned,
    columns_of,
    domains_of,
    notes_of,
    probability,
    sent,
)
from fedbench_boards.leaderboard.rows import spans
from fedbench_boards.leaderboard.tables import TextColumn, marks_of


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
    from fedbench_boards.leaderboard.across_figures import critical_differences
    from fedbench_boards.leaderboard.drawing import style

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


_OVERALL = "global_accuracy"
_REASON = 120
"""The most characters of a reason beside a row's name; all of it is shown when the row is opened."""
_GROUPS = (("head", "mid", "tail"), ("many", "medium", "few"))
MOST_CURVES = 12
"""The number of curves shown at first; further ones are drawn, but shown only when chosen in the legend."""


def page_of(
    suite_name: str,
    description: str,
    results: pd.DataFrame,
    board: Board,
    curves: pd.DataFrame,
    federations: Mapping[str, Mapping[str, Any]],
    command: str,
    map_: Map | None = None,
) -> Page:
    """The page's content; see ``write_page`` for the arguments."""
    styles = {name: number for number, name in enumerate(dict.fromkeys(line.row for line in board.lines))}
    sections = [
        _section(f"table-{number}", title, table, styles, curves, federations)
        for number, (title, table) in enumerate(zip(_titles(board), board.tables, strict=True), start=1)
    ]
    settings = _settings(board.lines)
    return Page(
        suite=suite_name,
        # a number and its percent sign stay on one line
        description=description.replace(" %", "\N{NO-BREAK SPACE}%"),
        facts=_facts(results, board, settings),
        sections=sections,
        overview=overview_of(sections, board, styles) if len(sections) > 1 else None,
        ranking=ranking_of(board, styles),
        map=None
        if map_ is None
        else map_section(
            map_, {id(table): one.anchor for table, one in zip(board.tables, sections, strict=True)}, styles
        ),
        settings=settings if len(settings) > 1 else [],
        kinds=len({line.tuned for line in board.lines}) > 1,
        most_curves=MOST_CURVES,
        reproduction=_reproduction(results, command),
    )


def _settings(lines: Sequence[Line]) -> list[str]:
    return list(dict.fromkeys(line.setting for line in lines if line.setting))


def _facts(results: pd.DataFrame, board: Board, settings: Sequence[str]) -> list[tuple[str, str]]:
    """Facts on what was compared, when and by which code."""
    days = sorted({f"{day:%Y-%m-%d}" for day in results["started"]})
    commits = sorted({_short_commit(text) for text in results["commit"]} - {""})
    facts = [
        ("methods", str(len({line.method for line in board.lines}))),
        ("rows", str(len({line.row for line in board.lines}))),
        ("settings", str(len(settings) or (1 if board.tables else 0))),
        ("seeds", _seeds(results)),
        ("runs", str(len(results))),
        ("failed runs", str(sum(len(line.status.failures) for line in board.lines) or "")),
        ("run on", " to ".join(dict.fromkeys(days[:1] + days[-1:]))),
        ("commit", ", ".join(commits)),
    ]
    return [(term, text) for term, text in facts if text]


def _section(
    anchor: str,
    title: str,
    table: Table,
    styles: Mapping[str, int],
    curves: pd.DataFrame,
    federations: Mapping[str, Mapping[str, Any]],
) -> Section:
    columns = columns_of(table)
    rows = _rows(anchor, table, styles, [cells for _, cells in columns])
    drawn = [row for row, line in zip(rows, table.lines, strict=True) if not line.has_failed]
    charts = _charts(anchor, table, drawn, curves)
    clients, clients_of = _clients(anchor, table.lines, federations)
    return Section(
        anchor=anchor,
        title=title,
        facts=_caption(table),
        columns=[column for column, _ in columns],
        rows=rows,
        notes=notes_of(table),
        shared=assigned(table.shared_settings),
        charts=charts,
        clients=clients,
        clients_of=clients_of,
        legend=any(chart.heading in (_BY_ROUND, _BY_COST) for chart in charts),
    )


def _caption(table: Table) -> list[str]:
    """The parts of the table's caption without the settings, which are its heading."""
    parts = [part for part in table.caption.split(" · ") if part]
    return parts[1:] if parts and set(parts[0].split(" / ")) == {line.setting for line in table.lines} else parts


def _titles(board: Board) -> list[str]:
    """A name for every table: its settings, else its data; numbered if it repeats."""
    names = []
    for table in board.tables:
        data = [text for text in (table.lines[0].dataset, table.lines[0].scenario) if text]
        several = ", ".join(data) if len(board.tables) > 1 else ""
        names.append(" / ".join(_settings(table.lines)) or several or "Results")
    return [f"{name} ({n})" if names.count(name) > 1 else name for n, name in enumerate(names, start=1)]


def _rows(anchor: str, table: Table, styles: Mapping[str, int], columns: Sequence[Sequence[PageCell]]) -> list[PageRow]:
    backbones = {line.backbone for line in table.lines}
    rows = []
    for position, line in enumerate(table.lines):
        rows.append(
            PageRow(
                anchor=f"{anchor}-row-{position}",
                name=line.label,
                backbone=line.backbone if len(backbones) > 1 and line.backbone not in line.label else "",
                style=styles[line.row],
                sign=swatch(styles[line.row]),
                setting=line.setting,
                tuned=line.tuned,
                shown=position < MOST_CURVES,
                failed=shortened(reasons(line.status.failures), _REASON) if line.has_failed else "",
                mark=marks_of(line),
                searched=" ".join([line.row, line.label, line.method, line.backbone, line.setting]).lower(),
                cells=[cells[position] for cells in columns],
                details=_details(line, table.own_settings(line)),
            )
        )
    return rows


def _details(line: Line, own: Mapping[str, str]) -> list[tuple[str, str]]:
    """The details of a row that have no room in its cells."""
    domains = [(name, line.cell(DOMAIN + name)) for name in domains_of([line])]
    delta, printed, seconds = line.delta, line.printed or Printed(), line.cost("seconds")
    tested = [delta.significance]
    tested += [] if math.isnan(delta.p_value) else [f"{delta.test}, {probability(delta.p_value)}"]
    tested += [] if math.isnan(delta.p_adjusted) else [f"adjusted {probability(delta.p_adjusted)}"]
    comparable = AGREEING.get(printed.comparable, "") + (printed.differs and f": {printed.differs}")
    number = "" if math.isnan(printed.value) else f"{printed.value:g}"
    published = [text for text in (number, printed.source, comparable) if text] if printed.comparable else []
    failures = [f"seed {one.seed}: {one.run_id}, MLflow {one.mlflow_id}" for one in line.status.failures]
    details = [
        ("failed", line.status.text),
        ("own settings", assigned(own)),
        ("tuned in", assigned(line.tuning) if line.tuned else ""),
        ("by domain", ", ".join(f"{name} {spread(cell.mean, cell.std)}" for name, cell in domains)),
        ("significance", ", ".join(text for text in tested if text)),
        ("published", "; ".join(published)),
        ("sent", sent(line)),
        ("seconds in all", "" if math.isnan(seconds) else f"{seconds:,.1f}"),
        ("seeds", ", ".join(spans(line.seeds))),
        ("run ids", _by_seed(line.runs)),
        ("MLflow ids", _by_seed(line.mlflow_ids)),
        ("failed runs", ", ".join(failures)),
    ]
    return [(term, text) for term, text in details if text]


def _by_seed(ids: Mapping[int, str]) -> str:
    return ", ".join(f"seed {seed}: {name}" for seed, name in ids.items())


_BY_ROUND = "By round"
_BY_COST = "Against what is sent"


def _series(table: Table, rows: Sequence[PageRow], curves: pd.DataFrame, metric: str) -> list[Series]:
    names = [row.name if [other.name for other in rows].count(row.name) == 1 else row.title for row in rows]
    series = []
    for line, row, name in zip(table.measured, rows, names, strict=True):
        rounds = _rounds(curves, list(line.mlflow_ids.values()), metric)
        final = line.cell(metric)
        if metric != table.headline and len(rounds):
            final = ScoreCell(*rounds[["mean", "std"]].iloc[-1])
        series.append(Series(row.style, name, rounds, final.mean, final.std, line.sent, row.shown))
    return series


def _rounds(curves: pd.DataFrame, ids: Sequence[str], metric: str) -> pd.DataFrame:
    """Mean, sample standard deviation and mean bytes by round, for rounds in which all runs were evaluated."""
    none = pd.DataFrame({"mean": [], "std": [], "bytes": []}, index=pd.Index([], name="round"), dtype=float)
    if metric not in curves or not ids:
        return none
    runs = curves[curves["mlflow_id"].isin(ids)].dropna(subset=[metric])
    if runs.empty:
        return none
    sent = runs if "bytes_total" in runs else runs.assign(bytes_total=math.nan)
    by_round = sent.groupby("round")
    table = by_round[metric].agg(["mean", "std", "count"]).assign(bytes=by_round["bytes_total"].mean())
    return table[table["count"] == runs["mlflow_id"].nunique()].drop(columns="count").sort_index()


def _charts(anchor: str, table: Table, rows: Sequence[PageRow], curves: pd.DataFrame) -> list[Chart]:
    lines, metric = table.measured, table.headline
    series = ranked = _series(table, rows, curves, metric)
    way = " Thin lines: the way there, round by round."
    if not any(len(one.rounds) > 1 for one in ranked):
        # what is ranked is known of one round only, such as the one that is best on validation data
        metric, way = _OVERALL, ""
        series = _series(table, rows, curves, metric)
    band = " A band is ± a standard deviation over seeds." if any(one.has_band for one in series) else ""
    read = f"Test {heading(metric)} after every evaluated round.{band}"
    drawn = [
        (_BY_ROUND, read, by_round(series, f"{anchor}-rounds", heading(metric))),
        (
            _BY_COST,
            f"Thick steps: the Pareto front, rows that none beats in both.{way}",
            against_cost(ranked, f"{anchor}-cost", heading(table.headline), lower_is_better(table.headline)),
        ),
    ]
    for groups in _GROUPS:
        metrics = [f"{group}_accuracy" for group in groups]
        if all(metric in line.cells for line in lines for metric in metrics):
            title = f"{groups[0].capitalize()}, {groups[1]} and {groups[2]} classes"
            drawn.append((title, _BARS_READ, bars(_bars(lines, rows, metrics), groups, f"{anchor}-{groups[0]}", title)))
    domains = domains_of(lines)
    if len(domains) > 1:
        measured = _bars(lines, rows, [DOMAIN + name for name in domains])
        drawn.append(("By domain", _BARS_READ, bars(measured, domains, f"{anchor}-domains", "Accuracy by domain")))
    return [Chart(title, read, picture) for title, read, picture in drawn if picture is not None]


_BARS_READ = "Accuracy of the last round; a whisker is ± a standard deviation over seeds."


def _bars(lines: Sequence[Line], rows: Sequence[PageRow], metrics: Sequence[str]) -> list[Bars]:
    cells = [[line.cell(metric) for metric in metrics] for line in lines]
    return [Bars(row.title, [(cell.mean, cell.std) for cell in own]) for row, own in zip(rows, cells, strict=True)]


def _clients(
    anchor: str, lines: Sequence[Line], federations: Mapping[str, Mapping[str, Any]]
) -> tuple[HeatMap | None, str]:
    """The heat map of the federation with the lowest known seed, and that seed in words."""
    runs = [(seed, name) for line in lines for seed, name in line.mlflow_ids.items()]
    for seed, name in sorted(runs, key=lambda run: run[0]):
        if name in federations:
            one = federations[name]
            drawn = heat_map(one["class_counts"], one["classnames"], f"{anchor}-clients", one.get("clients", 0))
            return drawn, f"seed {seed}"
    return None, ""


def _reproduction(results: pd.DataFrame, command: str) -> Reproduction:
    states = {}
    hashes = {"commit": "commit", "harness_hash": "code", "data_hash": "data", "weights_hash": "weights"}
    for name, term in hashes.items():
        states[term] = [text for text in dict.fromkeys(results[name]) if text]
    wanted = ["row", "setting", "seed", "run_id", "mlflow_id", "commit", "code_hash", "data_hash", "weights_hash"]
    runs = [{str(name): str(value) for name, value in run.items()} for run in results[wanted].to_dict("records")]
    for run in runs:
        run["commit"] = _short_commit(run["commit"])
        run |= {name: run[name][:8] for name in ("code_hash", "data_hash", "weights_hash")}
    return Reproduction(command, versions(), [one for one in states.items() if one[1]], _seeds(results), runs)


def _seeds(results: pd.DataFrame) -> str:
    return ", ".join(spans(sorted({int(seed) for seed in results["seed"]})))


def _short_commit(text: str) -> str:
    revision, dirty, _ = text.partition("+dirty")
    return revision[:7] + dirty
