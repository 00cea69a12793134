"""From frames to what the template writes: sections with tables and charts, an overview, how to make it again."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from markupsafe import Markup

from fedbench.core.wording import (
    NONE,
    OWN_MODELS,
    UNSEEN,
    heading,
    megabytes,
    not_on_unseen_notes,
    server_data_notes,
    spread,
)
from fedbench.leaderboard import untrained
from fedbench.leaderboard.failures import MARK, reasons, shortened
from fedbench.leaderboard.page.charts import Bars, Series, against_cost, bars, by_round
from fedbench.leaderboard.page.heatmap import HeatMap, heat_map
from fedbench.leaderboard.page.svg import swatch
from fedbench.leaderboard.page.table import (
    AGREEING,
    MARKS,
    Cell,
    Column,
    assigned,
    columns_of,
    domains_of,
    has,
    mappings,
    metrics_of,
    numbers,
    probability,
    shared_settings,
    texts,
    without_numbers,
)
from fedbench.leaderboard.rows.seeds import DIFFER, seed_counts, seeds_differ
from fedbench.leaderboard.rows.significance import ALPHA, BASELINE, NO_BASELINE
from fedbench.plugins.provenance import versions

_OVERALL = "global_accuracy"
_REASON = 120
"""Characters of a reason beside a row's name; all of it is under the name."""
_GROUPS = (("head", "mid", "tail"), ("many", "medium", "few"))
MOST_CURVES = 12
"""More than these are drawn, but shown only once they are chosen in the legend."""


@dataclass(frozen=True)
class Row:
    """A row of a table; ``details`` are what opens under it, as (term, text)."""

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
    """``failed: reason``, cut short, of a row without a number; "" of others."""
    mark: str
    """Stands after the name of a row of which some run failed, or whose global model is never trained."""
    searched: str
    cells: list[Cell]
    details: list[tuple[str, str]]

    @property
    def title(self) -> str:
        """Name and backbone, as legends say them."""
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
    rows: list[Row]
    notes: list[str]
    shared: str
    charts: list[Chart]
    clients: HeatMap | None
    clients_of: str
    legend: bool
    """Whether a chart draws one series a row."""


@dataclass(frozen=True)
class Overview:
    """The headline of every row in every section."""

    rows: list[tuple[str, str, Markup, list[Cell]]]
    """Name, backbone ("" where all have the same one), sign, cells."""


@dataclass(frozen=True)
class Reproduction:
    """What made the numbers: ``states`` are (what, its full hashes or commits), ``runs`` one line a run."""

    command: str
    versions: dict[str, str]
    states: list[tuple[str, list[str]]]
    seeds: str
    runs: list[dict[str, str]]


@dataclass(frozen=True)
class Page:
    """All that the template needs."""

    suite: str
    description: str
    facts: list[tuple[str, str]]
    sections: list[Section]
    overview: Overview | None
    settings: list[str]
    kinds: bool
    """Whether there are both tuned rows and rows with default parameters."""
    most_curves: int
    reproduction: Reproduction


def page_of(
    suite_name: str,
    description: str,
    results: pd.DataFrame,
    board: pd.DataFrame,
    curves: pd.DataFrame,
    federations: Mapping[str, Mapping[str, Any]],
    command: str,
) -> Page:
    """The page's content; see ``write_page`` for the arguments."""
    styles = {name: number for number, name in enumerate(dict.fromkeys(texts(board, "row")))}
    blocks = [block for _, block in board.groupby("block", sort=False)] if len(board) else []
    titles = _titles(blocks)
    sections = [
        _section(f"table-{number}", title, block, styles, curves, federations)
        for number, (title, block) in enumerate(zip(titles, blocks, strict=True), start=1)
    ]
    settings = [name for name in dict.fromkeys(texts(board, "setting")) if name]
    return Page(
        suite=suite_name,
        # a number and its percent sign stay on one line
        description=description.replace(" %", "\N{NO-BREAK SPACE}%"),
        facts=_facts(results, board, settings),
        sections=sections,
        overview=_overview(sections, blocks, styles) if len(sections) > 1 else None,
        settings=settings if len(settings) > 1 else [],
        kinds=len(set(_tuned(board))) > 1,
        most_curves=MOST_CURVES,
        reproduction=_reproduction(results, command),
    )


def _facts(results: pd.DataFrame, board: pd.DataFrame, settings: Sequence[str]) -> list[tuple[str, str]]:
    """What was compared, when and by which code."""
    methods = len(set(texts(board, "method")))
    days = pd.to_datetime(results["started"], utc=True) if has(results, "started") else pd.Series([], dtype=object)
    span = sorted({f"{day:%Y-%m-%d}" for day in days})
    commits = sorted({_short_commit(text) for text in texts(results, "commit")} - {""})
    facts = [
        ("methods", str(methods)),
        ("rows", str(len(set(texts(board, "row"))))),
        ("settings", str(len(settings) or (1 if len(board) else 0))),
        ("seeds", ", ".join(_seeds(results))),
        ("runs", str(len(results))),
        ("failed runs", str(sum(len(json.loads(text)) for text in texts(board, "failures") if text) or "")),
        ("run on", " to ".join(dict.fromkeys(span[:1] + span[-1:]))),
        ("commit", ", ".join(commits)),
    ]
    return [(term, text) for term, text in facts if text]


def _section(
    anchor: str,
    title: str,
    block: pd.DataFrame,
    styles: Mapping[str, int],
    curves: pd.DataFrame,
    federations: Mapping[str, Mapping[str, Any]],
) -> Section:
    headline = _headline(block)
    measured = columns_of(block, headline)
    rows = _rows(anchor, block, styles, [cells for _, cells in measured])
    drawn = [not failed for failed in without_numbers(block)]
    measured_rows = [row for row, is_drawn in zip(rows, drawn, strict=True) if is_drawn]
    series = _series(block[drawn], measured_rows, curves, headline)
    charts = _charts(anchor, block[drawn], measured_rows, series, headline)
    clients, clients_of = _clients(anchor, block, federations)
    settings = mappings(block, "settings")
    return Section(
        anchor=anchor,
        title=title,
        facts=_caption(block),
        columns=[column for column, _ in measured],
        rows=rows,
        notes=_notes(block, headline),
        shared=assigned(shared_settings(settings)),
        charts=charts,
        clients=clients,
        clients_of=clients_of,
        legend=any(chart.heading in (_BY_ROUND, _BY_COST) for chart in charts),
    )


def _caption(block: pd.DataFrame) -> list[str]:
    """The parts of the table's caption without the settings, which are its heading."""
    parts = [part for part in texts(block, "caption")[0].split(" · ") if part]
    return parts[1:] if parts and set(parts[0].split(" / ")) == set(texts(block, "setting")) else parts


def _labels(board: pd.DataFrame) -> list[str]:
    """What rows are called without their backbone; the row's full name where the board has no labels."""
    labels = texts(board, "label")
    return [label or row for label, row in zip(labels, texts(board, "row"), strict=True)]


def _tuned(board: pd.DataFrame) -> list[bool]:
    return [text not in ("", "False", "0") for text in texts(board, "tuned")]


def _headline(block: pd.DataFrame) -> str:
    named = texts(block, "headline")[0]
    if f"{named}_mean" in block:
        return named
    return _OVERALL if f"{_OVERALL}_mean" in block else next(iter(metrics_of(block, "")), _OVERALL)


def _titles(blocks: Sequence[pd.DataFrame]) -> list[str]:
    """A name for every table: its settings, else its data; with its number, where that repeats."""
    names = []
    for block in blocks:
        settings = [name for name in dict.fromkeys(texts(block, "setting")) if name]
        data = [text for text in (texts(block, "dataset")[0], texts(block, "scenario")[0]) if text]
        names.append(" / ".join(settings) or (", ".join(data) if len(blocks) > 1 else "") or "Results")
    return [f"{name} ({n})" if names.count(name) > 1 else name for n, name in enumerate(names, start=1)]


def _rows(anchor: str, block: pd.DataFrame, styles: Mapping[str, int], columns: Sequence[Sequence[Cell]]) -> list[Row]:
    names, labels, backbones = texts(block, "row"), _labels(block), texts(block, "backbone")
    settings = mappings(block, "settings")
    common = shared_settings(settings)
    rows = []
    lost = without_numbers(block)
    for position, (name, label, backbone, tuned) in enumerate(
        zip(names, labels, backbones, _tuned(block), strict=True)
    ):
        line = block.iloc[[position]]
        own = {key: value for key, value in settings[position].items() if key not in common}
        setting = texts(line, "setting")[0]
        why = reasons(texts(line, "failures")[0]) if lost[position] else ""
        rows.append(
            Row(
                anchor=f"{anchor}-row-{position}",
                name=label,
                backbone=backbone if len(set(backbones)) > 1 and backbone not in label else "",
                style=styles[name],
                sign=swatch(styles[name]),
                setting=setting,
                tuned=tuned,
                shown=position < MOST_CURVES,
                failed=shortened(why, _REASON),
                mark=(MARK if texts(line, "failure")[0] and not why else "")
                + (untrained.MARK if texts(line, "untrained")[0] == "True" else ""),
                searched=" ".join([name, label, texts(line, "method")[0], backbone, setting]).lower(),
                cells=[cells[position] for cells in columns],
                details=_details(line, own),
            )
        )
    return rows


def _details(line: pd.DataFrame, own: Mapping[str, Any]) -> list[tuple[str, str]]:
    """All that a row's cells have no room for; ``line`` is the row's line of the board."""
    raw, adjusted, seconds = (numbers(line, name)[0] for name in ("p_value", "p_adjusted", "seconds_mean"))
    up, down = numbers(line, "bytes_up_mean")[0], numbers(line, "bytes_down_mean")[0]
    means = [numbers(line, f"domain_accuracy/{name}_mean")[0] for name in domains_of(line)]
    deviations = [numbers(line, f"domain_accuracy/{name}_std")[0] for name in domains_of(line)]
    domains = zip(domains_of(line), means, deviations, strict=True)
    tested = [texts(line, "significance")[0]]
    tested += [f"{texts(line, 'test')[0]}, {probability(raw)}"] if not math.isnan(raw) else []
    tested += [f"adjusted {probability(adjusted)}"] if not math.isnan(adjusted) else []
    source, flag, differs = (texts(line, name)[0] for name in ("published_source", "comparable", "differs"))
    comparable = AGREEING.get(flag, "") + (differs and f": {differs}")
    printed = ", ".join(f"{value:g}" for value in numbers(line, "published") if not math.isnan(value))
    details = [
        ("failed", texts(line, "failure")[0]),
        ("own settings", assigned(own)),
        ("tuned in", assigned(mappings(line, "tuning")[0]) if _tuned(line)[0] else ""),
        ("by domain", ", ".join(f"{name} {spread(mean, std)}" for name, mean, std in domains)),
        ("significance", ", ".join(text for text in tested if text)),
        ("published", "; ".join(text for text in (printed, source, comparable) if text) if flag else ""),
        ("sent", "" if math.isnan(up + down) else f"{megabytes(up)} MB up, {megabytes(down)} MB down"),
        ("seconds in all", "" if math.isnan(seconds) else f"{seconds:,.1f}"),
        ("seeds", texts(line, "seed_list")[0]),
        ("run ids", _by_seed(mappings(line, "runs")[0])),
        ("MLflow ids", _by_seed(mappings(line, "mlflow_ids")[0])),
        ("failed runs", _failed_runs(texts(line, "failures")[0])),
    ]
    return [(term, text) for term, text in details if text]


def _by_seed(ids: Mapping[str, Any]) -> str:
    return ", ".join(f"seed {seed}: {name}" for seed, name in ids.items())


def _failed_runs(failures: str) -> str:
    """By seed, with both ids; ``failures`` is the board's JSON."""
    runs = json.loads(failures) if failures else []
    return ", ".join(f"seed {one['seed']}: {one['run_id']}, MLflow {one['mlflow_id']}" for one in runs)


def _failures(block: pd.DataFrame) -> list[str]:
    """What became of the failed runs of rows that have a number, and where those without one say it."""
    lost = without_numbers(block)
    facts = zip(_labels(block), texts(block, "failure"), lost, strict=True)
    notes = [f"{MARK} {label}: {failure}." for label, failure, without in facts if failure and not without]
    return [*notes, *(["Failed: no run of the row has finished; why is under its name."] if any(lost) else [])]


def _notes(block: pd.DataFrame, headline: str) -> list[str]:
    """How to read the table."""
    measured = block[[not failed for failed in without_numbers(block)]]
    return [*_failures(block), *(_how_to_read(measured, headline) if len(measured) else [])]


def _how_to_read(block: pd.DataFrame, headline: str) -> list[str]:
    counted = seed_counts(block) if has(block, "seeds") else ""
    told = f"Mean ± sample standard deviation over {counted}. " if counted.endswith("s") else "One seed. "
    notes = [f"{told}Accuracies of the last round, in %. Bold: the best of a column. –: not measured."]
    if has(block, "delta_mean"):
        baseline = texts(block, "baseline")[0].partition(" · ")[0]
        notes.append(f"Δ {baseline}: {heading(headline)} minus that of {baseline}, paired over the seeds both have.")
    said = [text for text in dict.fromkeys(texts(block, "significance")) if text]
    marks = [mark for mark in MARKS if mark in said]
    reasons = [text for text in said if text not in (*MARKS, BASELINE, NO_BASELINE)]
    if reasons:
        notes.append(f"Δ without a mark was not tested ({'; '.join(reasons)}).")
    if marks:
        told = ", ".join(f"{MARKS[mark]} {mark}" for mark in marks)
        notes.append(
            f"{told} ({texts(block, 'test')[0]}, p adjusted by Holm over the table, level {ALPHA:g}); "
            "p-values are under the rows' names."
        )
    reasons = texts(block, "baseline_note")
    for why in dict.fromkeys(filter(None, reasons)):
        without = [label for label, reason in zip(_labels(block), reasons, strict=True) if reason == why]
        notes.append(f"No baseline for {', '.join(dict.fromkeys(without))}: {why}.")
    for metric in dict.fromkeys(metric for text in texts(block, "incomplete") if text for metric in json.loads(text)):
        last = "; it has no rank" if metric == headline else ""
        notes.append(f"{heading(metric)}: a row of which some seed lacks it has no mean{last}.")
    used = server_data_notes(_labels(block), texts(block, "server_data"))
    unnamed = not_on_unseen_notes(_labels(block), texts(block, "not_on_unseen"))
    own = [UNSEEN] if has(block, "new_accuracy_mean") else []
    own += [OWN_MODELS] if has(block, "personal_mean_client_accuracy_mean") else []
    own += [f"{untrained.MARK} {untrained.NOTE}"] if "True" in texts(block, "untrained") else []
    own += [DIFFER] if seeds_differ(block) else []
    notes += [f"{note[:1].upper()}{note[1:]}." for note in (*used, *unnamed, *own)]
    if has(block, "published"):
        notes.append("Published: the paper's number; what differs, or is not printed, is under the row's name.")
    notes.append("MB: sent up and down by all clients in all rounds, 10⁶ bytes.")
    notes.append("Under a row's name: its settings, tuning, single domains and run ids.")
    return notes


_BY_ROUND = "By round"
_BY_COST = "Against what is sent"


def _series(block: pd.DataFrame, rows: Sequence[Row], curves: pd.DataFrame, headline: str) -> list[Series]:
    metric = headline if headline in curves else _OVERALL
    ids = [list(known.values()) for known in mappings(block, "mlflow_ids")]
    means, deviations = numbers(block, f"{headline}_mean"), numbers(block, f"{headline}_std")
    sent = [u + d for u, d in zip(numbers(block, "bytes_up_mean"), numbers(block, "bytes_down_mean"), strict=True)]
    names = [row.name if [other.name for other in rows].count(row.name) == 1 else row.title for row in rows]
    return [
        Series(row.style, name, _rounds(curves, own, metric), mean, deviation, cost, row.shown)
        for row, name, own, mean, deviation, cost in zip(rows, names, ids, means, deviations, sent, strict=True)
    ]


def _rounds(curves: pd.DataFrame, ids: Sequence[str], metric: str) -> pd.DataFrame:
    """Mean, sample standard deviation and mean bytes by round, over the rounds that all runs were evaluated in."""
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


def _charts(
    anchor: str, block: pd.DataFrame, rows: Sequence[Row], series: Sequence[Series], headline: str
) -> list[Chart]:
    metric = heading(headline)
    band = " A band is ± a standard deviation over seeds." if any(not math.isnan(one.spread) for one in series) else ""
    drawn = [
        (_BY_ROUND, f"Test {metric} after every evaluated round.{band}", by_round(series, f"{anchor}-rounds", metric)),
        (
            _BY_COST,
            "Thick steps: the Pareto front, rows that none beats in both. Thin lines: the way there, round by round.",
            against_cost(series, f"{anchor}-cost", metric),
        ),
    ]
    for groups in _GROUPS:
        if all(f"{group}_accuracy_mean" in block for group in groups):
            title = f"{groups[0].capitalize()}, {groups[1]} and {groups[2]} classes"
            measured = _bars(block, rows, [f"{group}_accuracy" for group in groups])
            drawn.append((title, _BARS_READ, bars(measured, groups, f"{anchor}-{groups[0]}", title)))
    domains = domains_of(block)
    if len(domains) > 1:
        measured = _bars(block, rows, [f"domain_accuracy/{name}" for name in domains])
        drawn.append(("By domain", _BARS_READ, bars(measured, domains, f"{anchor}-domains", "Accuracy by domain")))
    return [Chart(title, read, picture) for title, read, picture in drawn if picture is not None]


_BARS_READ = "Accuracy of the last round; a whisker is ± a standard deviation over seeds."


def _bars(block: pd.DataFrame, rows: Sequence[Row], metrics: Sequence[str]) -> list[Bars]:
    pairs = [
        list(zip(numbers(block, f"{metric}_mean"), numbers(block, f"{metric}_std"), strict=True)) for metric in metrics
    ]
    return [Bars(row.title, [group[position] for group in pairs]) for position, row in enumerate(rows)]


def _clients(
    anchor: str, block: pd.DataFrame, federations: Mapping[str, Mapping[str, Any]]
) -> tuple[HeatMap | None, str]:
    """The federation of the lowest seed that is known, and which seed that is."""
    runs = [(int(seed), name) for known in mappings(block, "mlflow_ids") for seed, name in known.items()]
    for seed, name in sorted(runs, key=lambda run: run[0]):
        if name in federations:
            one = federations[name]
            drawn = heat_map(one["class_counts"], one["classnames"], f"{anchor}-clients", one.get("clients", 0))
            return drawn, f"seed {seed}"
    return None, ""


def _overview(sections: Sequence[Section], blocks: Sequence[pd.DataFrame], styles: Mapping[str, int]) -> Overview:
    """A line a row, a cell a section: the section's headline."""
    cells: dict[str, list[Cell]] = {}
    called: dict[str, tuple[str, str]] = {}
    for column, (section, block) in enumerate(zip(sections, blocks, strict=True)):
        place = next(i for i, c in enumerate(section.columns) if c.key == _headline(block))
        for name, backbone, row in zip(texts(block, "row"), texts(block, "backbone"), section.rows, strict=True):
            cells.setdefault(name, [Cell(NONE)] * len(sections))[column] = replace(row.cells[place], mark=row.mark)
            called[name] = (row.name, "" if backbone in row.name else backbone)
    several = len({backbone for _, backbone in called.values()}) > 1
    rows = []
    for name, line in cells.items():
        label, backbone = called[name]
        rows.append((label, backbone if several else "", swatch(styles[name]), line))
    return Overview(rows)


def _reproduction(results: pd.DataFrame, command: str) -> Reproduction:
    states: dict[str, list[str]] = {}
    code = "harness_hash" if has(results, "harness_hash") else "code_hash"
    for name, term in (("commit", "commit"), (code, "code"), ("data_hash", "data"), ("weights_hash", "weights")):
        states[term] = [text for text in dict.fromkeys(texts(results, name)) if text]
    wanted = ("row", "setting", "seed", "run_id", "mlflow_id", "commit", "code_hash", "data_hash", "weights_hash")
    columns = {name: texts(results, name) for name in wanted}
    columns["commit"] = [_short_commit(text) for text in columns["commit"]]
    for name in ("code_hash", "data_hash", "weights_hash"):
        columns[name] = [text[:8] for text in columns[name]]
    runs = [dict(zip(columns, line, strict=True)) for line in zip(*columns.values(), strict=True)]
    return Reproduction(
        command, versions(), [one for one in states.items() if one[1]], ", ".join(_seeds(results)), runs
    )


def _seeds(results: pd.DataFrame) -> list[str]:
    return [str(seed) for seed in sorted({int(seed) for seed in numbers(results, "seed") if not math.isnan(seed)})]


def _short_commit(text: str) -> str:
    revision, dirty, _ = text.partition("+dirty")
    return revision[:7] + dirty
