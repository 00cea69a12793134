"""Rows of a table: which runs they are made of, their numbers, seeds and versions, their ranks, rounds to a target.

Runs that several versions of a method's code made are rows of their own, never averaged. The version stands among such
a row's settings (``fedprox.code=1a2b3c4d``), so whatever tells rows apart by their settings does so by it as well:
names, tables, pairs of a significance test, pages and files. Code that all methods share makes no row of its own;
captions say where it differs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from fedbench.core.spec import BUDGET
from fedbench.kinds.measured import lower_is_better, says_nothing_of_quality
from fedbench.tracking.schema import FINAL
from fedbench_boards.leaderboard.model import FINISHED, Line, ScoreCell
from fedbench_boards.leaderboard.own_models import is_of_global_model
from fedbench_boards.statistics import Scores, Test, holm, probability_best, rank_intervals, verdict

PROTOCOL = ("dataset", "files_hash", "scenario_settings", *(name for name in BUDGET if name != "precision"))
"""Columns in which all runs of a table agree. The runs read the same files, at the sizes of their backbones or
teachers."""
ROW = ("row", "method", "backbone", "tune", "precision", "row_settings")
"""Columns in which all runs of a row agree, besides their table's protocol; the runs differ in their seeds."""
_COSTS = ("bytes_up", "bytes_down", "train_seconds", "seconds")


def named_rows(protocol: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The rows of one protocol by their full names, each with its runs by seed."""
    rows = grouped(protocol)
    return dict(zip(names(rows), rows, strict=True))


def grouped(protocol: pd.DataFrame) -> list[pd.DataFrame]:
    """The runs of each row of one protocol, by seed."""
    return [runs.sort_values("seed") for _, runs in protocol.groupby(list(ROW), sort=False, dropna=False)]


def names(rows: Sequence[pd.DataFrame]) -> list[str]:
    """The rows' names; if two have the same, the settings in which they differ are added."""
    # the method as well: two may have been given one label
    kinds = ("method", "backbone", "tune", "precision")
    settings = [{**{k: runs[k].iloc[0] for k in kinds}, **json.loads(runs["row_settings"].iloc[0])} for runs in rows]
    return told_apart([row_of(runs) for runs in rows], settings)


def told_apart(called: Sequence[str], settings: Sequence[Mapping[str, str]]) -> list[str]:
    """The names ``called``; to those that are the same the settings in which they differ are added."""
    full = []
    for name, own in zip(called, settings, strict=True):
        namesakes = [other for n, other in zip(called, settings, strict=True) if n == name]
        keys = sorted({key for other in namesakes for key in {*own, *other} if own.get(key) != other.get(key)})
        differing = ", ".join(f"{key.removeprefix('training.')}={own.get(key, '-')}" for key in keys)
        full.append(f"{name} [{differing}]" if differing else name)
    return full


def row_of(runs: pd.DataFrame) -> str:
    """The row's name in the runs' suite."""
    return str(runs["row"].iloc[0])


def label_of(row: str) -> str:
    """A row's name without its backbone."""
    return row.partition(" · ")[0]


def seeds_of(runs: pd.DataFrame) -> tuple[int, ...]:
    """The seeds of a row's runs, in their order."""
    return tuple(int(seed) for seed in runs["seed"])


def scores_of(runs: pd.DataFrame, metric: str) -> dict[int, float]:
    """Seed -> ``metric`` of its run, where the run has it."""
    if FINAL + metric not in runs:
        return {}
    pairs = zip(seeds_of(runs), map(float, runs[FINAL + metric]), strict=True)
    return {seed: score for seed, score in pairs if not math.isnan(score)}


def line_of(name: str, runs: pd.DataFrame, metrics: Iterable[str], *, has_failed: bool) -> Line:
    """The line of the row called ``name``: its settings, and its ``metrics`` over ``runs`` (none finished, or all).

    A mean is NaN for a metric that any of the runs lacks.
    """
    first = runs.iloc[0]
    seeds = seeds_of(runs)
    settings = {key: str(first[key]) for key in ("backbone", "tune")} | json.loads(first["row_settings"])
    return Line(
        row=name,
        label=name.replace(f" · {first['backbone']}", "", 1),
        setting=str(first["setting"]),
        scale=str(first["scale"]),
        dataset=str(first["dataset"]),
        scenario=str(first["scenario"]),
        method=str(first["method"]),
        backbone=str(first["backbone"]),
        precision=str(first["precision"]),
        server_data=str(first["server_data"]),
        not_on_unseen=str(first["not_on_unseen"]),
        tuned=bool(first["tuned"]),
        tuning=json.loads(first["tuning"]),
        runs={} if has_failed else dict(zip(seeds, runs["run_id"], strict=True)),
        mlflow_ids={} if has_failed else dict(zip(seeds, runs["mlflow_id"], strict=True)),
        seeds=seeds,
        settings={key.removeprefix("training."): value for key, value in settings.items() if value != ""},
        cells={metric: _cell(runs, metric) for metric in dict.fromkeys(metrics)},
        costs={cost: mean_of(runs, cost) for cost in _COSTS},
    )


def _cell(runs: pd.DataFrame, metric: str) -> ScoreCell:
    if FINAL + metric not in runs:
        return ScoreCell()
    return ScoreCell(mean_of(runs, metric), float(runs[FINAL + metric].std(ddof=1, skipna=False)))


def mean_of(runs: pd.DataFrame, metric: str) -> float:
    """The mean over all seeds; NaN if one lacks the metric, since a mean over other seeds would not be comparable."""
    return float(runs[FINAL + metric].mean(skipna=False)) if FINAL + metric in runs else float("nan")


def times(line: Line, runs: pd.DataFrame) -> dict[str, float]:
    """Times that papers print: seconds in all, and a round."""
    seconds, rounds = line.cost("train_seconds"), int(runs["rounds"].iloc[0])
    return {"train_seconds": seconds, "seconds_a_round": seconds / rounds if rounds else float("nan")}


CODE = ".code"
"""Suffix of the setting that names a version, behind the method's name."""
_HASH_DIGITS = 8


def by_version(tried: pd.DataFrame) -> pd.DataFrame:
    """``tried`` (of `failures.attempts`) with the version among the ``row_settings`` of rows that have several.

    A failed run is of its own version where a run of that has finished, else of the newest one that finished.
    """
    if tried.empty:
        return tried
    tried = tried.reset_index(drop=True)
    versions = pd.Series([version_of(line) for line in tried.to_dict("records")], index=tried.index)
    settings = tried["row_settings"].copy()
    for _, runs in tried.groupby([*PROTOCOL, *ROW], sort=False, dropna=False):
        finished = runs[runs["failure"] == ""].sort_values("started", kind="stable")
        known = [versions[index] for index in finished.index]
        for index in runs.index if len({json.dumps(version) for version in known}) > 1 else ():
            version = versions[index] if versions[index] in known else known[-1]
            differing = {f"{name}{CODE}": value for name, value in version.items() if _differ(known, name)}
            own = json.loads(settings[index]) | differing
            settings[index] = json.dumps(own, sort_keys=True)
    return tried.assign(row_settings=settings)


def version_of(line: Mapping[Any, Any]) -> dict[str, str]:
    """Method -> the beginning of the hash of its code."""
    return {code["method"]: code["hash"][:_HASH_DIGITS] for code in json.loads(line["method_code"] or "[]")}


def newest_version(rows: Sequence[pd.DataFrame]) -> list[pd.DataFrame]:
    """``rows`` reduced to the newest of those that differ only in the version of their code."""
    newest: dict[str, pd.DataFrame] = {}
    for runs in sorted(rows, key=lambda runs: runs["started"].max()):
        settings = json.loads(runs["row_settings"].iloc[0])
        known = {key: value for key, value in settings.items() if not key.endswith(CODE)}
        rest = [str(runs[name].iloc[0]) for name in ROW if name != "row_settings"]
        newest[json.dumps([rest, known], sort_keys=True)] = runs
    return list(newest.values())


def remarks(runs: pd.DataFrame) -> Iterator[str]:
    """Remarks of a table's caption on the versions of its rows, and on code that did not come with fedbench."""
    split = {key.removesuffix(CODE) for text in runs["row_settings"] for key in json.loads(text) if key.endswith(CODE)}
    if split:
        yield f"seeds by another version of {', '.join(sorted(split))} are a row of their own"
    third: dict[str, None] = {}
    for text in filter(None, runs["method_code"]):
        third |= {_named(code): None for code in json.loads(text) if "package" in code or "plugin" in code}
    yield from third


def _named(code: Mapping[str, str]) -> str:
    """A description of code: ``plugin mine.py (1a2b3c4d)``, ``median of some-package 1.0 (1a2b3c4d)``."""
    from_where = (
        f"plugin {code['plugin']}"
        if "plugin" in code
        else f"{code['method']} of {code['package']} {code.get('version', '')}".strip()
    )
    return f"{from_where} ({code['hash'][:_HASH_DIGITS]})"


def _differ(versions: Sequence[Mapping[str, str]], method: str) -> bool:
    return len({version.get(method) for version in versions}) > 1


DIFFER = (
    "rows differ in their seeds: a mean, and so the rank, is over the row's own; Δ over those shared with the baseline"
)
_MOST_PARTS = 4
"""The most ranges that are listed; more are counted."""


def seeds_differ(lines: Sequence[Line]) -> bool:
    """Whether rows of a table differ in their seeds, apart from those lost to failed runs."""
    return len({line.seeds for line in lines if line.status.status == FINISHED}) > 1


def seed_cells(lines: Sequence[Line]) -> list[str]:
    """Each row's seeds in short form; "" for a row without a finished run."""
    return [ranges(line.seeds) if line.runs else "" for line in lines]


def seed_counts(lines: Sequence[Line]) -> str:
    """The number of seeds: ``3 seeds``, ``1 to 3 seeds``; "" if no run has finished."""
    whole = {len(line.runs) for line in lines if line.status.status == FINISHED}
    counts = sorted(whole or {max(len(line.runs) for line in lines)})
    least, most = counts[0], counts[-1]
    if not most:
        return ""
    return f"{least} to {most} seeds" if least < most else f"{most} seed{'s' if most > 1 else ''}"


def seeds_named(seeds: Sequence[int]) -> str:
    """All seeds, which are in order, as ``seeds 0-4, 7``."""
    return f"seed{'s' if len(seeds) != 1 else ''} {', '.join(spans(seeds))}"


def ranges(seeds: Sequence[int]) -> str:
    """Seeds, which are in order, as ``0-4, 7``; their number if that is too long."""
    texts = spans(seeds)
    return ", ".join(texts) if len(texts) <= _MOST_PARTS else f"{len(seeds)} seeds"


def spans(seeds: Sequence[int]) -> list[str]:
    """Ranges of seeds: ``0-4`` and ``7`` for 0, 1, 2, 3, 4, 7."""
    parts: list[list[int]] = []
    for seed in seeds:
        if parts and parts[-1][-1] == seed - 1:
            parts[-1].append(seed)
        else:
            parts.append([seed])
    return [f"{part[0]}-{part[-1]}" if len(part) > 2 else ", ".join(map(str, part)) for part in parts]


_DIGITS = 9
"""Means of percentages that agree to so many digits share a rank."""


def compared(lines: Sequence[Line], headline: str, test: Test = Test.t) -> tuple[Line, ...]:
    """The lines of one table in order, with ranks, ``p_best``, ``whole``, ``p_adjusted`` and the verdict on the
    difference; intervals of ranks are by ``test``.

    ``whole`` is a line that lost no seed which another one finished. Rank 1 has the best ``headline``; equal means
    share the smaller rank. It is None for a line without a mean, one that is not whole, and the accuracy of a global
    model that is never trained.
    """
    finished = {seed for line in lines for seed in line.runs}
    lines = [replace(line, whole=not line.has_failed and not _lost(line) & finished) for line in lines]
    means = [line.cell(headline).mean if may_be_best(line, headline) else math.nan for line in lines]
    ranks = pd.Series(means, dtype=float).round(_DIGITS).rank(method="min", ascending=lower_is_better(headline))
    tested = [number for number, line in enumerate(lines) if not math.isnan(line.delta.p_value)]
    adjusted = dict(zip(tested, holm([lines[number].delta.p_value for number in tested]), strict=True))
    scores = _scores(lines, [not math.isnan(rank) for rank in ranks], headline)
    intervals = rank_intervals(scores, test) if _can_be_told(scores, test) else [None] * len(lines)
    best = probability_best(scores)
    ranked = []
    for number, (line, rank) in enumerate(zip(lines, ranks, strict=True)):
        delta = line.delta
        if number in adjusted:
            delta = replace(delta, p_adjusted=adjusted[number], significance=verdict(adjusted[number]))
        own = None if math.isnan(rank) else int(rank)
        low, high = intervals[number] or (None, None)
        ranked.append(replace(line, rank=own, rank_low=low, rank_high=high, p_best=best[number], delta=delta))
    return tuple(sorted(ranked, key=lambda line: (line.rank or len(lines) + 1, -len(line.runs))))


def _scores(lines: Sequence[Line], ranked: Sequence[bool], headline: str) -> Scores:
    """Scores (rows, seeds), larger is better, NaN for rows without a rank."""
    seeds = sorted({seed for line in lines for seed in line.scores})
    sign = -1 if lower_is_better(headline) else 1
    rows = [
        [sign * line.scores.get(seed, math.nan) if has_rank else math.nan for seed in seeds]
        for line, has_rank in zip(lines, ranked, strict=True)
    ]
    return np.array(rows, dtype=float).reshape(len(lines), len(seeds))


def _can_be_told(scores: Scores, test: Test) -> bool:
    """Whether any two rows share as many seeds as the test needs."""
    known = (~np.isnan(scores)).astype(int)
    shared = known @ known.T
    return bool((shared - np.diag(np.diag(shared)) >= test.needed).any())


def may_be_best(line: Line, metric: str) -> bool:
    """Whether the row may have its table's best ``metric``."""
    return line.whole and not says_nothing_of_quality(metric) and not (line.untrained and is_of_global_model(metric))


def best_of(lines: Sequence[Line], metric: str) -> list[bool]:
    """Whether each line has the best ``metric`` at the shown precision, one decimal; False for a single line."""
    means = [line.cell(metric).mean for line in lines]
    eligible = [may_be_best(line, metric) and not math.isnan(mean) for line, mean in zip(lines, means, strict=True)]
    choose = min if lower_is_better(metric) else max
    best = choose((round(mean, 1) for mean, may in zip(means, eligible, strict=True) if may), default=math.nan)
    return [len(lines) > 1 and may and round(mean, 1) == best for mean, may in zip(means, eligible, strict=True)]


def _lost(line: Line) -> set[int]:
    """Seeds with a failed run and no finished one."""
    return {failure.seed for failure in line.status.failures} - line.runs.keys()


_NOISE = 1e-9
"""Tolerance of a target: accuracies are means of shares, and one equal to the target must count."""


def reached(curves: pd.DataFrame, mlflow_ids: Sequence[str], metric: str, target: float) -> pd.DataFrame:
    """The first evaluated line of each run at which ``metric`` is at least ``target``; NaN for a run that has none.

    If less is better, it is the first line at most at ``target``. ``curves`` is `results.load_curves`;
    runs without a curve are left out. Round 0, the model before training, counts.
    """
    known = curves[curves["mlflow_id"].isin(mlflow_ids) & curves[metric].notna()]
    sign = -1 if lower_is_better(metric) else 1
    at = known[sign * (known[metric] - target) >= -_NOISE].sort_values("round", kind="stable")
    with_curve = set(known["mlflow_id"])
    return at.drop_duplicates("mlflow_id").set_index("mlflow_id").reindex([r for r in mlflow_ids if r in with_curve])


def is_tracked(curves: pd.DataFrame, mlflow_ids: list[str], metric: str) -> bool:
    """Whether all runs with a curve have ``metric`` in every evaluated round.

    Round 0 is excepted, since there are no own models before it.
    """
    own = curves[curves["mlflow_id"].isin(mlflow_ids)]
    if metric not in own:
        return False
    known = own[metric].notna()
    have = set(own.loc[known, "mlflow_id"])
    return bool(have) and have == set(own["mlflow_id"]) and bool(known[own["round"] > 0].all())
