"""The leaderboard: rows of methods by mean and spread over seeds, beside a baseline, only like with like in a table.

A table (block) holds rows that agree in data, scenario, budget and seeds. Rows with other seeds get a table of their
own; their difference to the baseline is still paired, over the seeds both have.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from fedbench.render import render_terminal, to_csv, to_markdown
from fedbench.results import BUDGET, load_results
from fedbench.store import FINAL

__all__ = ["leaderboard", "load_results", "render_terminal", "to_csv", "to_markdown", "write"]

HEADLINE = "global_accuracy"
_STANDARD = (
    *(f"{group}_accuracy" for group in ("head", "mid", "tail", "many", "medium", "few")),
    "domain_mean_accuracy",
    "unseen_domain_accuracy",
    "worst_client_accuracy",
)
_COSTS = ("bytes_up", "bytes_down", "train_seconds", "seconds")
_PROTOCOL = ("dataset", "data_hash", "scenario_settings", *BUDGET)
_UNUSUAL = {"weighting": "samples", "augment": "none"}
"""Budget fields that a caption names only where they differ from this."""
_ROW = ("row", "method", "backbone", "tune", "row_settings")


def leaderboard(
    results: pd.DataFrame,
    columns: Sequence[str] = (),
    baseline: str = "fedavg",
    headline: str = HEADLINE,
    settings: Sequence[str] = (),
) -> pd.DataFrame:
    """One line a table and row, best ``headline`` first within a table, the newest table first.

    Tables of a suite's ``settings`` come first, in that order.

    Of the runs of a row and seed (they differ in ``eval_every``) the newest counts. A table of which some run lacks the
    headline is ranked by the overall accuracy and says so. ``settings`` is what a row was run with beside its table's
    protocol, as JSON.
    Every metric M has columns ``M_mean`` and ``M_std`` (sample standard deviation over seeds, NaN for one seed).
    ``columns`` are the metrics beside the headline (``head`` is short for ``head_accuracy``); by default groups,
    domains and the worst client, where any run has them. ``delta_*`` is the headline minus the baseline's, paired over
    the ``delta_seeds`` common seeds; ``baseline`` is a method, met on the row's own backbone, or a whole row.
    """
    by_age = results.sort_values("started", kind="stable")
    results = by_age.drop_duplicates([*_PROTOCOL, *_ROW, "seed"], keep="last")
    blocks: list[tuple[Any, ...]] = []
    for _, protocol in results.groupby(list(_PROTOCOL), sort=False, dropna=False):
        rows = [runs.sort_values("seed") for _, runs in protocol.groupby(list(_ROW), sort=False, dropna=False)]
        labels = _labels(rows)
        ranked_by = _ranked_by(protocol, headline)
        metrics = _chosen(results, columns, ranked_by)
        lines: dict[tuple[int, ...], list[tuple[dict[str, Any], pd.DataFrame]]] = {}
        for label, runs in zip(labels, rows, strict=True):
            seeds = tuple(int(seed) for seed in runs["seed"])
            paired = _paired(runs, _baseline_of(runs, rows, baseline), ranked_by)
            lines.setdefault(seeds, []).append(({"row": label, **_cells(runs, metrics), **paired}, runs))
        for seeds, block in lines.items():
            caption = _caption(pd.concat([runs for _, runs in block]), seeds)
            if ranked_by != headline:
                caption += f" · ranked by {ranked_by}, since not every run has {headline}"
            setting = str(protocol["setting"].iloc[0])
            place = -settings.index(setting) if setting in settings else -len(settings)
            rank = (place, protocol["started"].max(), len(block) * len(seeds))
            ranked = sorted((line for line, _ in block), key=lambda line: -float(line[f"{ranked_by}_mean"]))
            blocks.append((rank, caption, ranked))
    blocks.sort(key=lambda block: block[0], reverse=True)
    lines_in_order = [
        {"block": number, "caption": caption, "baseline": baseline, **line}
        for number, (_, caption, block) in enumerate(blocks)
        for line in block
    ]
    return pd.DataFrame(lines_in_order)


def write(results: pd.DataFrame, board: pd.DataFrame, folder: Path, command: str) -> None:
    """Write ``results.csv`` (a line a run), ``leaderboard.csv`` and ``leaderboard.md``, which names ``command``."""
    folder.mkdir(parents=True, exist_ok=True)
    results.to_csv(folder / "results.csv", index=False)
    to_csv(board, folder / "leaderboard.csv")
    made = f"Made by `{command}`.\n\n" if command else ""
    (folder / "leaderboard.md").write_text(f"# Leaderboard\n\n{made}{to_markdown(board)}", encoding="utf-8")


def _ranked_by(protocol: pd.DataFrame, headline: str) -> str:
    """``headline``, or the overall accuracy for a table of which some run lacks it; the caption then says so."""
    column = FINAL + headline
    return headline if column in protocol and bool(protocol[column].notna().all()) else HEADLINE


def _chosen(results: pd.DataFrame, columns: Sequence[str], headline: str) -> list[str]:
    """The metrics to show, the headline first; those that no run has are left out."""
    wanted = list(columns) or list(_STANDARD)
    full = [headline, *(name if FINAL + name in results else f"{name}_accuracy" for name in wanted)]
    return [name for name in dict.fromkeys(full) if FINAL + name in results]


def _labels(rows: Sequence[pd.DataFrame]) -> list[str]:
    """The rows' names; where two are called the same, with the settings in which they differ."""
    names = [str(runs["row"].iloc[0]) for runs in rows]
    settings = [dict(json.loads(runs["row_settings"].iloc[0])) for runs in rows]
    labels = []
    for name, own in zip(names, settings, strict=True):
        namesakes = [other for n, other in zip(names, settings, strict=True) if n == name]
        keys = sorted({key for other in namesakes for key in {*own, *other} if own.get(key) != other.get(key)})
        told = ", ".join(f"{key.removeprefix('training.')}={own.get(key, '-')}" for key in keys)
        labels.append(f"{name} [{told}]" if told else name)
    return labels


def _cells(runs: pd.DataFrame, metrics: Iterable[str]) -> dict[str, Any]:
    cells: dict[str, Any] = {"seeds": len(runs)}
    for metric in metrics:
        cells[f"{metric}_mean"] = runs[FINAL + metric].mean()
        cells[f"{metric}_std"] = runs[FINAL + metric].std(ddof=1)
    for cost in _COSTS:
        cells[f"{cost}_mean"] = runs[FINAL + cost].mean() if FINAL + cost in runs else float("nan")
    first = runs.iloc[0]
    named = {name: str(first[name]) for name in ("backbone", "tune")} | json.loads(first["row_settings"])
    own = {key.removeprefix("training."): value for key, value in named.items() if value != ""}
    cells["seed_list"] = ", ".join(str(seed) for seed in runs["seed"])
    cells["settings"] = json.dumps(own, ensure_ascii=False)
    return cells


def _baseline_of(runs: pd.DataFrame, rows: Sequence[pd.DataFrame], baseline: str) -> pd.DataFrame | None:
    """The baseline's runs: the row of that name, or the method's row nearest to ``runs``; None if that is not one."""
    named = [other for other in rows if baseline == other["row"].iloc[0]]
    candidates = named or [other for other in rows if baseline == other["method"].iloc[0]]
    for key in ("backbone", "tune", "row_settings"):
        alike = [other for other in candidates if other[key].iloc[0] == runs[key].iloc[0]]
        candidates = alike or candidates
    return candidates[0] if len(candidates) == 1 else None


def _paired(runs: pd.DataFrame, base: pd.DataFrame | None, headline: str) -> dict[str, Any]:
    if base is None or base is runs:
        return {"delta_mean": float("nan"), "delta_std": float("nan"), "delta_seeds": 0}
    column = FINAL + headline
    difference = (runs.set_index("seed")[column] - base.set_index("seed")[column]).dropna()
    return {"delta_mean": difference.mean(), "delta_std": difference.std(ddof=1), "delta_seeds": len(difference)}


def _caption(runs: pd.DataFrame, seeds: tuple[int, ...]) -> str:
    first = runs.iloc[0]
    rounds, epochs, batch = first["rounds"], first["local_epochs"], first["batch_size"]
    parts = [
        *filter(None, [" / ".join(dict.fromkeys(runs["setting"]))]),
        f"{first['dataset']} (data {str(first['data_hash'])[:8] or 'unknown'})",
        str(first["scenario"]),
        f"{runs['num_clients'].max()} clients",
        f"{_counted(rounds, 'round')} of {_counted(epochs, 'local epoch')}, batch {batch}",
        *(f"{name} {first[name]}" for name, usual in _UNUSUAL.items() if first[name] != usual),
        f"seed{'s' if len(seeds) > 1 else ''} {', '.join(str(seed) for seed in seeds)}",
        "commit " + ", ".join(sorted(set(_code(runs)))),
        *(["several code states"] if runs["code_hash"].nunique() > 1 else []),
    ]
    return " · ".join(parts)


def _counted(number: str, noun: str) -> str:
    return f"{number} {noun}" if number == "1" else f"{number} {noun}s"


def _code(runs: pd.DataFrame) -> Iterator[str]:
    for commit, code in zip(runs["commit"], runs["code_hash"], strict=True):
        revision, dirty, _ = str(commit).partition("+dirty")
        # two states of a work tree with changes are told apart by their code
        yield revision[:7] if revision and not dirty else f"{revision[:7] or 'none'}{dirty} (code {str(code)[:8]})"
