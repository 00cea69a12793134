"""The leaderboard: rows with mean and spread over seeds, compared with a baseline in tables of comparable runs.

A table (block) holds rows that agree in data, scenario and budget. If rows differ in their seeds or their precision,
the table lists each row's; the difference to the baseline is paired over the seeds both have. A row that lost seeds to
failed runs has the numbers of the others and no rank. The baseline of a row is its runs on the row's own backbone, in
its precision where there are any, tuned like the row.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from fedbench.core.metric_names import DOMAINS, EACH_DOMAIN
from fedbench.core.spec import BUDGET, untuned
from fedbench.kinds.measured import says_nothing_of_quality
from fedbench.suites.suite import Mean, Suite
from fedbench.tracking.schema import FINAL
from fedbench_boards.leaderboard import failures
from fedbench_boards.leaderboard.across import across_settings
from fedbench_boards.leaderboard.model import NAN, Board, Delta, Line, Milestone, Printed, ScoreCell, Table
from fedbench_boards.leaderboard.notes import caption
from fedbench_boards.leaderboard.own_models import SHARED, ranks_own_models, with_global_models
from fedbench_boards.leaderboard.published import Published, beside
from fedbench_boards.leaderboard.results import GROUPS
from fedbench_boards.leaderboard.rows import (
    PROTOCOL,
    ROW,
    compared,
    grouped,
    is_tracked,
    label_of,
    line_of,
    mean_of,
    named_rows,
    newest_version,
    reached,
    row_of,
    scores_of,
    seeds_of,
    times,
)
from fedbench_boards.statistics import BASELINE, NO_BASELINE, Test, interval, paired


def with_means(results: pd.DataFrame, suite: Suite) -> pd.DataFrame:
    """``results`` with a line for every row and seed that has a run in all settings of one of the suite's means."""
    lines = [line for mean in suite.means for line in _of(results, mean)]
    return pd.concat([results, pd.DataFrame(lines)], ignore_index=True) if lines else results


def _of(results: pd.DataFrame, mean: Mean) -> Iterator[pd.Series]:
    among = results[results["setting"].isin(mean.over)].sort_values("started", kind="stable")
    same = dict.fromkeys(["dataset", "files_hash", *ROW, *BUDGET, "seed"])
    for _, runs in among.groupby(list(same), sort=False, dropna=False):
        newest = runs.drop_duplicates("setting", keep="last").set_index("setting", drop=False)
        if set(newest.index) == set(mean.over):
            yield _line(newest.loc[list(mean.over)], mean)


def _line(runs: pd.DataFrame, mean: Mean) -> pd.Series:
    """One line for the ``runs`` of a seed: means of what was measured, everything else the first run's."""
    line = runs.iloc[0].copy()
    measured = [str(name) for name in runs if str(name).startswith(FINAL)]
    line[measured] = runs[measured].mean(skipna=False)
    keys = [{**key, **mean.published} for key in json.loads(line["published"])] if mean.published else []
    known = "".join(sorted(runs["run_id"]))
    line["setting"], line["started"] = mean.name, runs["started"].max()
    line["scenario"] = f"mean over {', '.join(mean.over)}"
    # a table of its own, beside those of its settings
    line["scenario_settings"] = json.dumps(json.loads(line["scenario_settings"]) | {"mean over": list(mean.over)})
    line["published"] = json.dumps([key for at, key in enumerate(keys) if key not in keys[:at]])
    line["run_id"] = line["mlflow_id"] = f"mean {hashlib.sha256(known.encode()).hexdigest()[:16]}"
    return line


_KINDS = ("backbone", "tune", "tuned")
"""Properties that a row shares with its baseline; without such a baseline a row has none."""


@dataclass(frozen=True, eq=False)
class Baseline:
    """The runs that a row is compared with, or the reason why there are none."""

    runs: pd.DataFrame | None
    why: str = ""


def baseline_of(runs: pd.DataFrame, rows: Mapping[str, pd.DataFrame], baseline: str) -> Baseline:
    """The baseline of ``runs``: the row of that full name, else one of that label or method that is of their kind."""
    # a tuned row's name means that row; another name stands for its tuned twin as well
    called_by = str if untuned(baseline) != baseline else untuned
    whole = [other for name, other in rows.items() if baseline in (called_by(name), called_by(row_of(other)))]
    if whole:
        return _one_of(runs, whole, _KINDS, baseline)
    called = [other for other in rows.values() if baseline in (label_of(row_of(other)), other["method"].iloc[0])]
    words = [baseline]
    for key in _KINDS:
        alike = [other for other in called if _alike(other, runs, key)]
        if key == "tuned" and not alike and not int(runs["trainable_parameters"].iloc[0]):
            continue  # a row that has nothing to tune, where all others are tuned
        if len(alike) < len(called):
            words = _narrowed(words, key, runs)
        called = alike
    if not called:
        return Baseline(None, f"no {' '.join(words)}")
    labelled = [other for other in called if baseline == label_of(row_of(other))]
    return _one_of(runs, labelled or called, (), baseline)


def _one_of(runs: pd.DataFrame, rows: list[pd.DataFrame], kinds: Sequence[str], baseline: str) -> Baseline:
    """Choose the one of ``rows`` most like ``runs``: of the same kind, then with the same settings, as far as any
    is."""
    for key in (*kinds, "precision", "row_settings"):
        rows = [other for other in rows if _alike(other, runs, key)] or rows
    rows = newest_version(rows)
    if len(rows) > 1:
        return Baseline(None, f"{len(rows)} rows are called {baseline}; give --baseline ROW")
    return Baseline(rows[0])


def _narrowed(words: list[str], key: str, runs: pd.DataFrame) -> list[str]:
    """The description of a baseline, extended by what a row requires of it."""
    value = runs[key].iloc[0]
    if key == "tuned":
        return ["tuned" if value else "untuned", *words]
    return [*words, f"on {value}" if key == "backbone" else f"({value})"]


def _alike(runs: pd.DataFrame, other: pd.DataFrame, key: str) -> bool:
    values = runs[key].iloc[0], other[key].iloc[0]
    if key == "row_settings":
        return _shared(values[0]) == _shared(values[1])
    if key == "tuned":
        # every method has a study of its own; what counts is whether there was one, where anything can be tuned
        untunable = not int(runs["trainable_parameters"].iloc[0])
        return untunable or bool(values[0]) == bool(values[1])
    return bool(values[0] == values[1])


def _shared(row_settings: str) -> dict[str, str]:
    """The settings in which rows of two methods can agree: neither a method's own, nor its study."""
    settings = dict(json.loads(row_settings))
    return {k: v for k, v in settings.items() if ("." not in k or k.startswith("training.")) and k != "tuned"}


def delta_of(runs: pd.DataFrame, baseline: Baseline, headline: str, test: Test) -> Delta:
    """The difference to the baseline over common seeds, with its test."""
    base = baseline.runs
    if base is None or base is runs:
        return Delta(significance=NO_BASELINE if base is None else BASELINE, test=test.title, note=baseline.why)
    column = FINAL + headline
    pairs = pd.concat([runs.set_index("seed")[column], base.set_index("seed")[column]], axis=1, keys=["ours", "theirs"])
    pairs = pairs.dropna()
    difference = pairs["ours"] - pairs["theirs"]
    outcome = paired(list(pairs["ours"]), list(pairs["theirs"]), test)
    low, high = interval(list(difference))
    return Delta(
        cell=ScoreCell(float(difference.mean()), float(difference.std(ddof=1))),
        low=low,
        high=high,
        seeds=len(difference),
        p_value=outcome.p_value,
        significance=outcome.reason if len(difference) else _unpaired(runs, base, headline),
        test=test.title,
        note=baseline.why,
    )


def _unpaired(runs: pd.DataFrame, base: pd.DataFrame, headline: str) -> str:
    """The reason why a row and its baseline have no pair."""
    common = set(runs["seed"]) & set(base["seed"])
    return f"no {headline}" if common else "no seed in common with the baseline"


HEADLINE = "global_accuracy"
_STANDARD = (
    *GROUPS,
    "domain_mean_accuracy",
    "unseen_domain_accuracy",
    "new_accuracy",
    "harmonic_accuracy",
    "worst_client_accuracy",
)


@dataclass(frozen=True, eq=False)
class _Reading:
    """How results are read, for all rows of one protocol."""

    headline: str
    shown: tuple[str, ...]
    domains: tuple[str, ...]
    test: Test
    target: float | None
    target_metric: str
    curves: pd.DataFrame | None
    published: Published | None


def of_suite(
    suite: Suite,
    results: pd.DataFrame,
    curves: pd.DataFrame | None,
    published: Published | None,
    test: Test = Test.t,
    failed: pd.DataFrame | None = None,
) -> Board:
    """The `leaderboard` of ``results`` and ``failed`` runs as ``suite`` has them read, with its means over settings."""
    board = leaderboard(
        with_means(results, suite),
        suite.columns,
        suite.baseline,
        suite.headline,
        (*suite.setting_names, *(mean.name for mean in suite.means)),
        headlines={name: suite.headline_of(name) for name in suite.setting_names},
        test=test,
        target=suite.target,
        curves=curves,
        published=published,
        failed=failed,
    )
    return replace(board, across=across_settings(board.tables, [mean.name for mean in suite.means], test))


def leaderboard(
    results: pd.DataFrame,
    columns: Sequence[str] = (),
    baseline: str = "fedavg",
    headline: str = HEADLINE,
    settings: Sequence[str] = (),
    *,
    headlines: Mapping[str, str] | None = None,
    test: Test = Test.t,
    target: float | None = None,
    curves: pd.DataFrame | None = None,
    published: Published | None = None,
    failed: pd.DataFrame | None = None,
) -> Board:
    """Rows and tables of ``results`` and ``failed`` runs (`fedbench_boards.leaderboard.results.load_runs`).

    Lines have the best ``headline`` of their table first; ``headlines`` are in its place in the settings they name.
    Tables of a suite's ``settings`` come first, in that order, then the newest. Of the runs of a row and seed (they
    differ in ``eval_every`` or ``own_every``) the newest counts. A table in which no row has the headline is ranked by
    the overall accuracy, and its caption says so.

    - A line has cells of every metric in ``columns`` (``head`` is short for ``head_accuracy``; by default groups,
      domain mean, unseen classes and the worst client, where any run has them), of clients' own models, and of every
      domain.
    - ``baseline`` is a label or method, compared with on the row's own backbone and tuned like it, or a whole row.
      ``test`` is made on the pairs of seeds and corrected by Holm within a table.
    - Rounds are counted to ``target`` in ``curves`` (`load_curves`); by default it is the mean that the row's baseline
      ends with.
    - ``published`` are the numbers that the suite's paper prints.
    - Ranked by own models, a row without them is there by its global model (`own_models`).
    - Failed runs enter no number. A row without a finished run has a line without numbers.
    """
    results = with_global_models(results, (headline, *(headlines or {}).values()))
    by_age = results.sort_values("started", kind="stable")
    results = by_age.drop_duplicates([*PROTOCOL, *ROW, "seed"], keep="last")
    tables: list[tuple[Any, Table]] = []
    for _, tried in failures.attempts(results, failed).groupby(list(PROTOCOL), sort=False, dropna=False):
        protocol, lost = failures.split(tried)
        shown = tried if protocol.empty else protocol
        setting = str(shown["setting"].iloc[0])
        wanted = (headlines or {}).get(setting, headline)
        ranked_by = _ranked_by(protocol, wanted)
        tracked = curves is not None and is_tracked(curves, list(protocol["mlflow_id"]), ranked_by)
        reading = _Reading(
            headline=ranked_by,
            shown=tuple(_chosen(results, columns, ranked_by)),
            domains=tuple(_domains(results)),
            test=test,
            target=target,
            target_metric=ranked_by if tracked else HEADLINE,
            curves=curves,
            published=published,
        )
        remarks = [f"ranked by {ranked_by}, since no row has a mean of {wanted}"] if ranked_by != wanted else []
        block = _rows(protocol, lost, baseline, reading)
        lines = compared([line for line, _ in block], ranked_by, test)
        seeds = seeds_of(shown.drop_duplicates("seed").sort_values("seed"))
        above = caption(_captioned(block), seeds, [*remarks, *_target_remark(lines, baseline, reading)])
        order = -settings.index(setting) if setting in settings else -len(settings)
        tables.append(((order, tried["started"].max()), Table(above, baseline, ranked_by, reading.shown, lines)))
    tables.sort(key=lambda table: table[0], reverse=True)
    return Board(tuple(table for _, table in tables))


def _rows(
    protocol: pd.DataFrame, lost: pd.DataFrame, baseline: str, reading: _Reading
) -> list[tuple[Line, pd.DataFrame]]:
    """The rows of one protocol with their runs; rows without a finished run are last."""
    rows = named_rows(protocol)
    failed = failures.without_a_run(rows, lost)
    measured = [
        (_measured(name, runs, lost, _baseline(runs, rows, failed, baseline), reading), runs)
        for name, runs in rows.items()
    ]
    return [*measured, *((_failed(name, runs, protocol, reading), runs) for name, runs in failed.items())]


def _baseline(
    runs: pd.DataFrame, rows: dict[str, pd.DataFrame], failed: dict[str, pd.DataFrame], baseline: str
) -> Baseline:
    base = baseline_of(runs, rows, baseline)
    return Baseline(None, f"{baseline} failed") if base.why and failures.is_of_failed(baseline, runs, failed) else base


def _measured(name: str, runs: pd.DataFrame, lost: pd.DataFrame, base: Baseline, reading: _Reading) -> Line:
    """The line of a row with finished ``runs``."""
    line = line_of(name, runs, (*reading.shown, *reading.domains), has_failed=False)
    known = {metric: runs[FINAL + metric].notna() for metric in reading.shown}
    delta, printed = delta_of(runs, base, reading.headline, reading.test), None
    if reading.published is not None:
        measured = {name.removeprefix(FINAL): mean_of(runs, name.removeprefix(FINAL)) for name in map(str, runs)}
        measured |= {"std": line.cell(reading.headline).std, "p_value": delta.p_value} | times(line, runs)
        printed = beside(reading.published, runs, reading.headline, measured)
    return replace(
        line,
        scores=scores_of(runs, reading.headline),
        delta=delta,
        milestone=_milestone(runs, base, reading),
        printed=printed,
        status=failures.status_of(failures.of_row(runs, lost), seeds_of(runs), runs["code_hash"]),
        untrained=bool(runs["untrained"].all()),
        one_for_all=bool(runs[SHARED].all()) and any(map(ranks_own_models, reading.shown)),
        incomplete=tuple(metric for metric, has in known.items() if has.any() and not has.all()),
    )


def _failed(name: str, runs: pd.DataFrame, protocol: pd.DataFrame, reading: _Reading) -> Line:
    """The line of a row all of whose ``runs`` failed."""
    return replace(
        line_of(name, runs, (*reading.shown, *reading.domains, reading.headline), has_failed=True),
        delta=Delta(test=reading.test.title),
        milestone=_milestone(runs, Baseline(None), reading),
        printed=None if reading.published is None else Printed(),
        status=failures.status_of(runs, (), protocol["harness_hash"]),
    )


def _captioned(block: Sequence[tuple[Line, pd.DataFrame]]) -> pd.DataFrame:
    """The runs that a table's caption describes: finished ones if there are any."""
    finished = [runs for line, runs in block if not line.has_failed]
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
        name
        for column in columns or _STANDARD
        for name in (_domains(results, column) if column in EACH_DOMAIN else [column])
    ]
    full = [headline, *(name if FINAL + name in results else f"{name}_accuracy" for name in wanted)]
    full += ["personal_mean_client_accuracy"]
    full += ["personal_worst_client_accuracy"] if "worst_client_accuracy" in full else []
    return [name for name in dict.fromkeys(full) if FINAL + name in results]


def _domains(results: pd.DataFrame, column: str = DOMAINS) -> list[str]:
    return sorted(str(c).removeprefix(FINAL) for c in results if str(c).startswith(f"{FINAL}{column}/"))


def _milestone(runs: pd.DataFrame, baseline: Baseline, reading: _Reading) -> Milestone:
    metric, target = reading.target_metric, reading.target
    if target is None:
        untold = says_nothing_of_quality(metric)
        target = NAN if untold or baseline.runs is None else mean_of(baseline.runs, metric)
    first = pd.DataFrame({"round": []}, dtype=float)
    if reading.curves is not None and not math.isnan(target):
        first = reached(reading.curves, list(runs["mlflow_id"]), metric, target)
    hits = first[first["round"].notna()].astype({"round": float})
    rounds = ScoreCell(float(hits["round"].mean()), float(hits["round"].std(ddof=1)))
    spent = [float(hits[cost].mean()) if cost in hits else NAN for cost in ("bytes_total", "seconds_total")]
    return Milestone(rounds, target, metric, len(hits), len(first), *spent)


def _target_remark(lines: Sequence[Line], baseline: str, reading: _Reading) -> list[str]:
    """Remarks on the target to which rounds are counted."""
    if not any(line.milestone.text for line in lines):
        return []
    if reading.target is not None:
        return [f"target {reading.target:g} ({reading.target_metric})"]
    counted = [line for line in lines if not math.isnan(line.milestone.target)]
    targets = sorted({round(line.milestone.target, 1) for line in counted})
    values = " or ".join(f"{target:.1f}" for target in targets)
    own = ["on the row's backbone"] if len({line.backbone for line in counted}) > 1 else []
    own += ["tuned or not like the row"] if len({line.tuned for line in counted}) > 1 else []
    alike: dict[tuple[str, bool], set[float]] = {}
    for line in counted:
        alike.setdefault((line.backbone, line.tuned), set()).add(round(line.milestone.target, 1))
    own += ["at the row's settings"] if any(len(own_targets) > 1 for own_targets in alike.values()) else []
    which = f" {', '.join(own)}" if len(targets) > 1 else ""
    return [f"target {values}, the mean {reading.target_metric} that {label_of(baseline)} ends with{which}"]
