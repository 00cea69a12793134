"""A section of a board's page: a table with what its rows hold in full, notes on it, and its charts."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from markupsafe import Markup

from fedbench.core.wording import NONE, heading, spread
from fedbench.kinds.measured import lower_is_better
from fedbench_boards.leaderboard.failures import reasons, shortened
from fedbench_boards.leaderboard.model import Line, Printed, ScoreCell, Table
from fedbench_boards.leaderboard.page.charts import Bars, HeatMap, Series, against_cost, bars, by_round, heat_map
from fedbench_boards.leaderboard.page.svg import swatch
from fedbench_boards.leaderboard.rows import may_be_best, seed_counts, spans
from fedbench_boards.leaderboard.tables import (
    AGREEING,
    BYTES_TO_TARGET,
    NOT_TOLD,
    ROUNDS,
    Cell,
    Column,
    TextTable,
    marks_of,
    probability,
    scored,
    sent,
    text_table,
)

DOMAIN = "domain_accuracy/"
_APART = (DOMAIN, "class_accuracy/", BYTES_TO_TARGET)
"""Beginnings of keys without a column: single domains and classes are too many, traffic stands with the rounds."""
_ALWAYS = ("rank", "bytes")
"""Columns that are there also where no row has a number."""
_OVERALL = "global_accuracy"
_REASON = 120
"""The most characters of a reason beside a row's name; all of it is shown when the row is opened."""
_GROUPS = (("head", "mid", "tail"), ("many", "medium", "few"))
MOST_CURVES = 12
"""The number of curves shown at first; further ones are drawn, but shown only when chosen in the legend."""


@dataclass(frozen=True)
class PageRow:
    """A row of a table; ``details`` are shown when it is opened, as (term, text)."""

    anchor: str
    name: str
    backbone: str
    style: int
    sign: Markup
    setting: str
    tuned: bool
    shown: bool
    """Whether the charts show it at first."""
    failed: str
    """The text ``failed: reason``, shortened, for a row without a number; "" for others."""
    mark: str
    """Mark behind the name of a row with a failed run, or whose global model is never trained."""
    searched: str
    cells: list[Cell]
    details: list[tuple[str, str]]

    @property
    def title(self) -> str:
        """Name and backbone, as in legends."""
        return f"{self.name} · {self.backbone}" if self.backbone else self.name


@dataclass(frozen=True)
class Chart:
    """A figure: its heading, a sentence on how to read it, the drawing."""

    heading: str
    read: str
    picture: Markup


@dataclass(frozen=True)
class Section:
    """A table with its charts."""

    anchor: str
    title: str
    facts: list[str]
    columns: list[Column]
    rows: list[PageRow]
    notes: list[str]
    shared: str
    charts: list[Chart]
    clients: HeatMap | None
    clients_of: str

    @property
    def legend(self) -> bool:
        """Whether a chart draws one series per row."""
        return any(chart.heading in (_BY_ROUND, _BY_COST) for chart in self.charts)


def section_of(
    anchor: str,
    title: str,
    table: Table,
    styles: Mapping[str, int],
    curves: pd.DataFrame,
    federations: Mapping[str, Mapping[str, Any]],
) -> Section:
    shown = text_table(table)
    columns = _columns(table, shown)
    rows = _rows(anchor, table, styles, columns)
    drawn = [row for row, line in zip(rows, table.lines, strict=True) if not line.has_failed]
    clients, clients_of = _clients(anchor, table.lines, federations)
    return Section(
        anchor=anchor,
        title=title,
        facts=_caption(table),
        columns=columns,
        rows=rows,
        notes=_notes(table, shown),
        shared=assigned(table.shared_settings),
        charts=_charts(anchor, table, drawn, curves),
        clients=clients,
        clients_of=clients_of,
    )


def _columns(table: Table, shown: TextTable) -> list[Column]:
    """The table's columns without those that no row has a number in, and those of single domains and classes."""
    columns = []
    for column in (shown.rank, *shown.scores, *shown.further):
        is_apart = column.key.startswith(_APART) and column.key != table.headline
        if not is_apart and (column.is_known or column.key in _ALWAYS):
            column = _fastest(table, column) if column.key == ROUNDS else column
            columns.append(replace(column, heading=re.sub(r"^Δ | s$", _unbroken, column.heading)))
    return columns


def _unbroken(match: re.Match[str]) -> str:
    return match.group().replace(" ", "\N{NO-BREAK SPACE}")


def _fastest(table: Table, column: Column) -> Column:
    """The column of rounds with its target as the heading, each with its deviation, the fewest in bold."""
    milestones = [line.milestone for line in table.lines]
    known = {round(milestone.target, 1) for milestone in milestones if not math.isnan(milestone.target)}
    metric = milestones[0].metric
    title = f"rounds to {next(iter(known)):g} %" if len(known) == 1 else "rounds to target"
    title += f" {heading(metric)}" if metric != table.headline else ""
    # a mean over the seeds that were fast enough is no number of the others
    whole = [may_be_best(line, metric) and line.milestone.reached == line.milestone.seeds for line in table.lines]
    rounded = [round(milestone.rounds.mean, 1) for milestone in milestones]
    means = [mean if is_whole else math.nan for mean, is_whole in zip(rounded, whole, strict=True)]
    fewest = min((mean for mean in means if not math.isnan(mean)), default=math.nan)
    may_be_bold = len(known) < 2 and len(milestones) > 1
    cells = []
    for cell, milestone, mean in zip(column.cells, milestones, means, strict=True):
        in_full = scored(
            milestone.rounds.mean, milestone.rounds.std, best=may_be_bold and mean == fewest, title=cell.title
        )
        note = f"{milestone.reached} of {milestone.seeds} seeds" if milestone.reached != milestone.seeds else ""
        cells.append(replace(in_full, shown=in_full.shown.removesuffix(".0"), note=note))
    return replace(column, heading=title, cells=cells)


def _notes(table: Table, shown: TextTable) -> list[str]:
    """The sentences below the table."""
    names = [*(line.label for line in table.lines), *shown.names[0].texts]
    notes = [sentence(note, names) for note in shown.failures]
    if any(line.has_failed for line in table.lines):
        notes.append("Failed: no run of the row has finished; why is under its name.")
    if not table.measured:
        return notes
    counted = seed_counts(table.measured)
    over = f"Mean ± sample standard deviation over {counted}. " if counted.endswith("s") else "One seed. "
    chosen = [column.heading for column in shown.scores if column.key.startswith("selected_")]
    other = f"; columns {', '.join(chosen)}: of the round that is best on validation data" if chosen else ""
    notes.append(f"{over}Accuracies of the last round, in %{other}. Bold: the best of a column. –: not measured.")
    notes += (sentence(note, names) for note in shown.notes)
    if any(cell.mark == NOT_TOLD for column in shown.scores for cell in column.cells):
        notes.append(f"{NOT_TOLD} not significant; p-values are under the rows' names.")
    notes.append("MB: sent up and down by all clients in all rounds, 10⁶ bytes.")
    notes.append("Under a row's name: its settings, tuning, single domains and run ids.")
    return notes


def sentence(note: str, names: Collection[str] = ()) -> str:
    """The note as a sentence; one of the ``names`` of rows at its beginning stays as it is."""
    is_of_row = note.startswith(tuple(f"{name}{sign}" for name in names for sign in ",:"))
    return f"{note}." if is_of_row else f"{note[:1].upper()}{note[1:]}."


def _caption(table: Table) -> list[str]:
    """The parts of the table's caption without the settings, which are its heading."""
    parts = [part for part in table.caption.split(" · ") if part]
    return parts[1:] if parts and set(parts[0].split(" / ")) == {line.setting for line in table.lines} else parts


def _rows(anchor: str, table: Table, styles: Mapping[str, int], columns: Sequence[Column]) -> list[PageRow]:
    backbones = {line.backbone for line in table.lines}
    rows = []
    for position, line in enumerate(table.lines):
        searched = " ".join([line.row, line.label, line.method, line.backbone, line.setting])
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
                searched=" ".join(dict.fromkeys(searched.lower().split())),
                cells=[column.cells[position] for column in columns],
                details=_details(line, table.own_settings(line)),
            )
        )
    return rows


def _details(line: Line, own: Mapping[str, str]) -> list[tuple[str, str]]:
    """The details of a row that have no room in its cells."""
    domains = [(name, line.cell(DOMAIN + name)) for name in _domains([line])]
    delta, printed, seconds = line.delta, line.printed or Printed(), line.cost("seconds")
    # as many digits as `fedbench evaluate` needs
    runs = [f"seed {seed}: {name} ({line.mlflow_ids.get(seed, NONE)[:8]})" for seed, name in line.runs.items()]
    tested = [delta.significance]
    tested += [] if math.isnan(delta.p_value) else [f"{delta.test}, {probability(delta.p_value)}"]
    tested += [] if math.isnan(delta.p_adjusted) else [f"adjusted {probability(delta.p_adjusted)}"]
    comparable = AGREEING.get(printed.comparable, "") + (printed.differs and f": {printed.differs}")
    number = "" if math.isnan(printed.value) else f"{printed.value:g}"
    published = [text for text in (number, printed.source, comparable) if text] if printed.comparable else []
    failures = [
        f"seed {failure.seed}: {failure.run_id}, MLflow {failure.mlflow_id}" for failure in line.status.failures
    ]
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
        ("run ids (MLflow's)", ", ".join(runs)),
        ("failed runs", ", ".join(failures)),
    ]
    return [(term, text) for term, text in details if text]


def assigned(settings: Mapping[str, Any]) -> str:
    """Settings written as ``a=1, b=2``."""
    texts = {k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for k, v in settings.items()}
    return ", ".join(f"{key}={value}" for key, value in texts.items() if value != "")


def _domains(lines: Sequence[Line]) -> list[str]:
    """The domains that any row has an accuracy of."""
    cells = [(name, cell) for line in lines for name, cell in line.cells.items() if name.startswith(DOMAIN)]
    return list(dict.fromkeys(name.removeprefix(DOMAIN) for name, cell in cells if not math.isnan(cell.mean)))


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
    if not any(len(curve.rounds) > 1 for curve in ranked):
        # what is ranked is known of one round only, such as the one that is best on validation data
        metric, way = _OVERALL, ""
        series = _series(table, rows, curves, metric)
    band = " A band is ± a standard deviation over seeds." if any(curve.has_band for curve in series) else ""
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
    domains = _domains(lines)
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
            federation = federations[name]
            drawn = heat_map(
                federation["class_counts"], federation["classnames"], f"{anchor}-clients", federation.get("clients", 0)
            )
            return drawn, f"seed {seed}"
    return None, ""
