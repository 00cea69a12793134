"""The leaderboard: rows of methods by mean and spread over seeds, beside a baseline, only like with like in a table.

A table (block) holds rows that agree in data, scenario and budget. Where they differ in their seeds the table says
which each row has; the difference to the baseline is paired over the seeds both have. A row that lost seeds to failed
runs has the numbers of the others and no rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedbench.core.errors import FedbenchError, unknown_name
from fedbench.core.files import csv_text, replacing
from fedbench.core.metric_names import DOMAINS
from fedbench.core.wording import heading
from fedbench.leaderboard import failures
from fedbench.leaderboard.captions import caption
from fedbench.leaderboard.formats.latex import to_latex
from fedbench.leaderboard.formats.terminal import render_terminal, to_csv, to_markdown
from fedbench.leaderboard.published import Published, beside
from fedbench.leaderboard.results import GROUPS, load_results
from fedbench.leaderboard.rows.identity import (
    PROTOCOL,
    ROW,
    cells,
    grouped,
    identity,
    label_of,
    mean_of,
    named_rows,
    row_of,
    seeds_of,
)
from fedbench.leaderboard.rows.milestones import is_tracked, rounds_to_target
from fedbench.leaderboard.rows.ranking import compared
from fedbench.leaderboard.rows.significance import BASELINE, NO_BASELINE, Test, paired
from fedbench.leaderboard.rows.versions import newest_version
from fedbench.suites.suite import Suite
from fedbench.tracking.store import FINAL

__all__ = ["leaderboard", "load_results", "of_suite", "render_terminal", "to_csv", "to_latex", "to_markdown", "write"]

HEADLINE = "global_accuracy"
_STANDARD = (
    *GROUPS,
    "domain_mean_accuracy",
    "unseen_domain_accuracy",
    "new_accuracy",
    "harmonic_accuracy",
    "worst_client_accuracy",
)
_KINDS = ("backbone", "tune", "tuned")
"""What a row shares with its baseline; a row that has no such baseline has none."""
_NAN = float("nan")
_UNPUBLISHED = {"published": _NAN, "published_delta": _NAN, "published_source": "", "published_keys": "[]"}
_UNPUBLISHED |= {"published_several": "[]", "comparable": "", "differs": "", "differences": "[]", "not_printed": "[]"}
"""What a row without a number says of the paper's."""


@dataclass(frozen=True, eq=False)
class _Reading:
    """How results are read, for the rows of one protocol."""

    headline: str
    test: Test
    target: float | None
    target_metric: str
    curves: pd.DataFrame | None
    published: Published | None


@dataclass(frozen=True, eq=False)
class _Baseline:
    """The runs that a row is compared with, or why there are none."""

    runs: pd.DataFrame | None
    why: str = ""


def of_suite(
    suite: Suite,
    results: pd.DataFrame,
    curves: pd.DataFrame,
    published: Published | None,
    test: Test = Test.t,
    failed: pd.DataFrame | None = None,
) -> pd.DataFrame:
    """The `leaderboard` of ``results`` and ``failed`` runs as ``suite`` has them read."""
    return leaderboard(
        results,
        suite.columns,
        suite.baseline,
        suite.headline,
        suite.setting_names,
        test=test,
        target=suite.target,
        curves=curves,
        published=published,
        failed=failed,
    )


def leaderboard(
    results: pd.DataFrame,
    columns: Sequence[str] = (),
    baseline: str = "fedavg",
    headline: str = HEADLINE,
    settings: Sequence[str] = (),
    *,
    test: Test = Test.t,
    target: float | None = None,
    curves: pd.DataFrame | None = None,
    published: Published | None = None,
    failed: pd.DataFrame | None = None,
) -> pd.DataFrame:
    """One line a table and row, best ``headline`` first within a table, the newest table first.

    Tables of a suite's ``settings`` come first, in that order. Of the runs of a row and seed (they differ in
    ``eval_every``) the newest counts. A table in which no row has the headline is ranked by the overall accuracy and
    says so. Columns, beside those that say what a row is (``row`` in full, ``label`` without its backbone,
    ``settings`` beside its table's protocol as JSON, ``tuning`` as JSON, ``runs`` and ``mlflow_ids`` by seed as JSON):

    - ``M_mean`` and ``M_std`` (sample standard deviation over seeds, NaN for one seed) of every metric M in ``columns``
      (``head`` is short for ``head_accuracy``; by default groups, domain mean, unseen classes and the worst client,
      where any run has them), of clients' own models, of every domain, and of costs. Both are NaN where a seed lacks
      the metric; ``incomplete`` are the shown metrics that only some seeds have, ``shown`` those for tables, as JSON.
    - ``rank``: 1 has the best ``headline`` of its table, see `fedbench.leaderboard.rows.ranking.compared`, also for
      ``whole``. ``untrained`` says whether its global model is never trained.
    - ``server_data``: what samples at the server the row's method learns from (unlabelled, labelled), or "".
    - ``not_on_unseen``: why the row has no accuracy on the scenario's unseen classes; "" where it has, or none are.
    - ``delta_*``: the headline minus the baseline's, paired over the ``delta_seeds`` common seeds. ``baseline`` is a
      label or method, met on the row's own backbone and tuned like it and not otherwise, or a whole row.
      ``baseline_note`` says why a row has none.
    - ``p_value`` of ``test`` on those pairs, ``p_adjusted`` by Holm over the p-values of the table, ``significance``.
    - ``rounds_to_target_*`` over the seeds that reach ``target`` in ``curves`` (`load_curves`), ``target_reached`` as
      "2/3"; by default the target is the mean that the row's baseline ends with.
    - what ``published`` prints for the row, see `fedbench.leaderboard.published.beside`.
    - ``status`` (finished, partly failed, failed), ``failure`` in words and ``failures`` as JSON: what `failures.told`
      says of the row's runs among ``failed`` (`fedbench.leaderboard.results.load_runs`). They enter no number;
      ``seeds`` is 0 for a row without a finished run.
    """
    by_age = results.sort_values("started", kind="stable")
    results = by_age.drop_duplicates([*PROTOCOL, *ROW, "seed"], keep="last")
    blocks: list[tuple[Any, str, list[dict[str, Any]]]] = []
    for _, tried in failures.attempts(results, failed).groupby(list(PROTOCOL), sort=False, dropna=False):
        protocol, lost = failures.split(tried)
        ranked_by = _ranked_by(protocol, headline)
        shown = _chosen(results, columns, ranked_by)
        tracked = curves is not None and is_tracked(curves, list(protocol["mlflow_id"]), ranked_by)
        reading = _Reading(ranked_by, test, target, ranked_by if tracked else HEADLINE, curves, published)
        remarks = [f"ranked by {ranked_by}, since no row has a mean of {headline}"] if ranked_by != headline else []
        block = _rows(protocol, lost, [*shown, *_domains(results)], baseline, reading)
        lines = compared([_told(line, runs, shown) for line, runs in block], ranked_by)
        seeds = seeds_of((tried if protocol.empty else protocol).drop_duplicates("seed").sort_values("seed"))
        told = caption(_captioned(block), seeds, [*remarks, *_target_remark(lines, baseline, reading)])
        setting = str((tried if protocol.empty else protocol)["setting"].iloc[0])
        place = -settings.index(setting) if setting in settings else -len(settings)
        blocks.append(((place, tried["started"].max()), told, lines))
    blocks.sort(key=lambda block: block[0], reverse=True)
    board = pd.DataFrame(
        [
            {"block": number, "caption": told, "baseline": baseline, **line}
            for number, (_, told, lines) in enumerate(blocks)
            for line in lines
        ]
    )
    # whole numbers stay whole beside a row without a rank
    return board.astype({"rank": "Int64"}) if len(board) and bool(board["rank"].isna().any()) else board


def metric_named(results: pd.DataFrame, name: str) -> str:
    """The accuracy that ``--metric`` means: ``tail`` is ``tail_accuracy``, ``own models`` what has this heading.

    FedbenchError for one that no run has.
    """
    known = [str(column).removeprefix(FINAL) for column in results if str(column).startswith(FINAL)]
    accuracies = [metric for metric in known if "accuracy" in metric and results[FINAL + metric].notna().any()]
    if not accuracies:
        raise FedbenchError(
            f"no run has finished, so there is no accuracy {name!r}; ask without --metric and --column."
        )
    short = {metric.removesuffix("_accuracy"): metric for metric in accuracies}
    called = {heading(metric).replace(" ", "_"): metric for metric in accuracies if "/" not in metric}
    called |= short | {metric: metric for metric in accuracies}
    found = called.get(name) or called.get(name.replace(" ", "_"))
    if found is None:
        raise unknown_name("accuracy in these results", name, short)
    return found


def baseline_named(results: pd.DataFrame, name: str, failed: pd.DataFrame | None = None) -> str:
    """``name`` if it is a row, a method or a label in ``results`` or of ``failed`` runs; FedbenchError otherwise."""
    tried = failures.attempts(results, failed)
    known = {*tried["row"], *tried["method"], *(label_of(row) for row in tried["row"])}
    for _, of_protocol in tried.groupby(list(PROTOCOL), sort=False, dropna=False):
        protocol, lost = failures.split(of_protocol)
        rows = named_rows(protocol)
        known |= {*rows, *failures.without_a_run(rows, lost)}
    if name not in known:
        raise unknown_name("baseline", name, known, "It is a row, or the method of one.")
    return name


def write(results: pd.DataFrame, board: pd.DataFrame, folder: Path, command: str) -> None:
    """Write ``results.csv`` (a line a run), ``leaderboard.csv``, ``.md`` and ``.tex``.

    ``command`` is what made all of it, a line a command. FedbenchError where ``folder`` can't be written.
    """
    prompts = "\n".join(f"$ {line}" for line in command.splitlines())
    made = f"Made by\n\n```console\n{prompts}\n```\n\n" if command else ""
    texts = {
        "results.csv": csv_text(results),
        "leaderboard.csv": csv_text(board),
        "leaderboard.md": f"# Leaderboard\n\n{made}{to_markdown(board)}",
        "leaderboard.tex": to_latex(board),
    }
    for name, text in texts.items():
        with replacing(folder / name, "leaderboard", "choose another --output") as temporary:
            temporary.write_text(text, encoding="utf-8")


def _rows(
    protocol: pd.DataFrame, lost: pd.DataFrame, metrics: Sequence[str], baseline: str, reading: _Reading
) -> list[tuple[dict[str, Any], pd.DataFrame]]:
    """The rows of one protocol with their runs; those without a finished run last."""
    rows = named_rows(protocol)
    failed = failures.without_a_run(rows, lost)
    found = []
    for name, runs in (rows | failed).items():
        base = _Baseline(None) if name in failed else _baseline_of(runs, rows, baseline)
        why = f"{baseline} failed" if base.why and failures.is_of_failed(baseline, runs, failed) else base.why
        line = {
            "row": name,
            **identity(name, runs, reading.headline),
            **cells(runs, metrics),
            **_paired(runs, base.runs, reading),
            "baseline_note": why,
            **_rounds_to_target(runs, base.runs, reading),
        }
        if reading.published is not None and name not in failed:
            line |= beside(reading.published, runs, reading.headline, line[f"{reading.headline}_mean"])
        line |= _without_numbers(reading) if name in failed else {}
        seeds, of_this = ((), runs) if name in failed else (seeds_of(runs), failures.of_row(runs, lost))
        codes = protocol["harness_hash"] if name in failed else runs["code_hash"]
        line |= failures.told(of_this, seeds, codes)
        line["untrained"] = name not in failed and bool(runs["untrained"].all())
        found.append((line, runs))
    return found


def _without_numbers(reading: _Reading) -> dict[str, Any]:
    """What the line of a row says of which no run has finished."""
    named = [f"{reading.headline}_mean", f"{reading.headline}_std"]
    unpublished = {} if reading.published is None else _UNPUBLISHED
    none = {"seeds": 0, "runs": "{}", "mlflow_ids": "{}", "significance": ""}
    return {**dict.fromkeys(named, _NAN), **none, **unpublished}


def _captioned(block: Sequence[tuple[Mapping[str, Any], pd.DataFrame]]) -> pd.DataFrame:
    """The runs that a table's caption tells of: those that finished, where any did."""
    finished = [runs for line, runs in block if line["status"] != failures.FAILED]
    return pd.concat(finished or [runs for _, runs in block])


def _ranked_by(protocol: pd.DataFrame, headline: str) -> str:
    """``headline``, or the overall accuracy for a table in which no row has it; the caption then says so."""
    column = FINAL + headline
    if protocol.empty or (column in protocol and any(runs[column].notna().all() for runs in grouped(protocol))):
        return headline
    return HEADLINE


def _chosen(results: pd.DataFrame, columns: Sequence[str], headline: str) -> list[str]:
    """The metrics to show, the headline first; those that no run has are left out, clients' own models never are."""
    wanted = [
        name for column in columns or _STANDARD for name in (_domains(results) if column == DOMAINS else [column])
    ]
    full = [headline, *(name if FINAL + name in results else f"{name}_accuracy" for name in wanted)]
    full += ["personal_mean_client_accuracy"]
    full += ["personal_worst_client_accuracy"] if "worst_client_accuracy" in full else []
    return [name for name in dict.fromkeys(full) if FINAL + name in results]


def _domains(results: pd.DataFrame) -> list[str]:
    return sorted(str(c).removeprefix(FINAL) for c in results if str(c).startswith(f"{FINAL}{DOMAINS}/"))


def _told(line: dict[str, Any], runs: pd.DataFrame, shown: Sequence[str]) -> dict[str, Any]:
    """The line with what tables show of it."""
    known = {metric: runs[FINAL + metric].notna() for metric in shown}
    incomplete = [metric for metric, has in known.items() if has.any() and not has.all()]
    return line | {"shown": json.dumps(shown), "incomplete": json.dumps(incomplete)}


def _baseline_of(runs: pd.DataFrame, rows: Mapping[str, pd.DataFrame], baseline: str) -> _Baseline:
    """What ``runs`` are compared with: the row of that name; or that of the label, else the method, of their kind."""
    # a tuned row is meant as it is; another stands for its tuned twin as well
    called_by = str if _untuned(baseline) != baseline else _untuned
    whole = [other for name, other in rows.items() if baseline in (called_by(name), called_by(row_of(other)))]
    if whole:
        return _one_of(runs, whole, _KINDS, baseline)
    called = [other for other in rows.values() if baseline in (label_of(row_of(other)), other["method"].iloc[0])]
    told = [baseline]
    for key in _KINDS:
        alike = [other for other in called if _alike(other, runs, key)]
        if len(alike) < len(called):
            told = _narrowed(told, key, runs)
        called = alike
    if not called:
        return _Baseline(None, f"no {' '.join(told)}")
    labelled = [other for other in called if baseline == label_of(row_of(other))]
    return _one_of(runs, labelled or called, (), baseline)


def _one_of(runs: pd.DataFrame, rows: list[pd.DataFrame], kinds: Sequence[str], baseline: str) -> _Baseline:
    """Of the ``rows`` the one most like ``runs``: of their kinds, then with their settings, as far as any is."""
    for key in (*kinds, "row_settings"):
        rows = [other for other in rows if _alike(other, runs, key)] or rows
    rows = newest_version(rows)
    if len(rows) > 1:
        return _Baseline(None, f"{len(rows)} rows are called {baseline}; give --baseline ROW")
    return _Baseline(rows[0])


def _narrowed(told: list[str], key: str, runs: pd.DataFrame) -> list[str]:
    """The words for a baseline, with what a row asks of it."""
    value = runs[key].iloc[0]
    if key == "tuned":
        return ["tuned" if value else "untuned", *told]
    return [*told, f"on {value}" if key == "backbone" else f"({value})"]


def _alike(one: pd.DataFrame, other: pd.DataFrame, key: str) -> bool:
    values = one[key].iloc[0], other[key].iloc[0]
    if key == "row_settings":
        return _shared(values[0]) == _shared(values[1])
    if key == "tuned":
        # every method has a study of its own; what counts is whether there was one, where there is anything to tune
        untunable = not int(one["trainable_parameters"].iloc[0])
        return untunable or bool(values[0]) == bool(values[1])
    return bool(values[0] == values[1])


def _shared(row_settings: str) -> dict[str, str]:
    """The settings that rows of two methods can agree in: not a method's own, nor its study."""
    settings = dict(json.loads(row_settings))
    return {k: v for k, v in settings.items() if ("." not in k or k.startswith("training.")) and k != "tuned"}


def _untuned(row: str) -> str:
    return row.replace(", tuned)", ")").replace(" (tuned)", "")


def _paired(runs: pd.DataFrame, base: pd.DataFrame | None, reading: _Reading) -> dict[str, Any]:
    """The difference to the baseline over common seeds, and how likely it is without one in the methods."""
    if base is None or base is runs:
        none = {"delta_mean": _NAN, "delta_std": _NAN, "delta_seeds": 0, "p_value": _NAN}
        return none | {"significance": NO_BASELINE if base is None else BASELINE, "test": reading.test.title}
    column = FINAL + reading.headline
    pairs = pd.concat([runs.set_index("seed")[column], base.set_index("seed")[column]], axis=1, keys=["ours", "theirs"])
    pairs = pairs.dropna()
    difference = pairs["ours"] - pairs["theirs"]
    outcome = paired(list(pairs["ours"]), list(pairs["theirs"]), reading.test)
    return {
        "delta_mean": difference.mean(),
        "delta_std": difference.std(ddof=1),
        "delta_seeds": len(difference),
        "p_value": outcome.p_value,
        "significance": outcome.reason if len(difference) else _unpaired(runs, base, reading),
        "test": reading.test.title,
    }


def _unpaired(runs: pd.DataFrame, base: pd.DataFrame, reading: _Reading) -> str:
    """Why a row and its baseline have no pair."""
    common = set(runs["seed"]) & set(base["seed"])
    return f"no {reading.headline}" if common else "no seed in common with the baseline"


def _rounds_to_target(runs: pd.DataFrame, base: pd.DataFrame | None, reading: _Reading) -> dict[str, Any]:
    metric, target = reading.target_metric, reading.target
    if target is None and base is not None:
        mean = mean_of(base, metric)
        target = None if np.isnan(mean) else mean
    first: list[int | None] = []
    if reading.curves is not None and target is not None:
        first = rounds_to_target(reading.curves, list(runs["mlflow_id"]), metric, target)
    reached = pd.Series([number for number in first if number is not None], dtype=float)
    return {
        "rounds_to_target_mean": reached.mean(),
        "rounds_to_target_std": reached.std(ddof=1),
        "target": _NAN if target is None else target,
        "target_metric": metric,
        "target_reached": f"{len(reached)}/{len(first)}" if first else "",
    }


def _target_remark(lines: Sequence[Mapping[str, Any]], baseline: str, reading: _Reading) -> list[str]:
    """Which target rounds were counted to."""
    if not any(line["target_reached"] for line in lines):
        return []
    if reading.target is not None:
        return [f"target {reading.target:g} ({reading.target_metric})"]
    targets = sorted({round(line["target"], 1) for line in lines if not np.isnan(line["target"])})
    told = " or ".join(f"{target:.1f}" for target in targets)
    counted = [line for line in lines if not np.isnan(line["target"])]
    each = {"backbone": "on the row's backbone", "tuned": "tuned or not like the row"}
    own = [words for key, words in each.items() if len({line[key] for line in counted}) > 1]
    which = f" {', '.join(own) or 'with the settings of the row'}" if len(targets) > 1 else ""
    return [f"target {told}, the mean {reading.target_metric} that {label_of(baseline)} ends with{which}"]
