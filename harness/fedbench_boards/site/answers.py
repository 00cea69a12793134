"""What the site answers first, computed from the result folders: what to try, and when a method is worth it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, log10
from pathlib import Path
from statistics import fmean
from typing import Any

from fedbench.core.errors import FedbenchError
from fedbench.core.spec import stack_names
from fedbench.core.wording import NONE, counted
from fedbench_boards.advice.advising import advise, doubts, interval_shown
from fedbench_boards.advice.evidence import SHIPPED, Evidence, Measures, read_evidence
from fedbench_boards.site.folders import PICTURES, BoardLine, BoardTable, ResultsOf, is_own, own_text
from fedbench_boards.site.text import slug

MOST_SHOWN = 8
"""The most rows of advice; the first ones are the shortlist of `fedbench advise`."""
_SIZES = (5, 100, 1000)
"""Numbers of clients to choose from, beside that of the map."""
_AXES = {
    "dirichlet alpha": "Label skew (Dirichlet α, small is strong)",
    "imbalance factor": "Long tail (largest class over smallest)",
}


def front_pictures(results: Path) -> list[tuple[Path, str]]:
    """The pictures that README.md beside the result folders shows, with its words for them, in its order."""
    shown = re.findall(r"!\[([^\]]+)\]\(([^()\s/]+)\)", own_text(results / "README.md"))
    return [
        (results / name, words) for words, name in shown if Path(name).suffix in PICTURES and is_own(results / name)
    ]


@dataclass(frozen=True)
class WhatToTry:
    """Advice as texts for every choice on the page, and the pages of the methods by label."""

    results: ResultsOf
    picks: Mapping[str, Sequence[str]]
    """What can be chosen -> its values."""
    default: Sequence[str]
    answers: Mapping[str, Mapping[str, Any]]
    """Chosen values, joined by ``|`` -> rows, and what is said of them."""
    pages: Mapping[str, str]


def what_to_try(folders: Sequence[ResultsOf]) -> WhatToTry | None:
    """Advice by the largest map among ``folders``; None without one, or where it is too small for advice."""
    maps = [(read_evidence(one.path / SHIPPED), one) for one in folders if is_own(one.path / SHIPPED)]
    if not maps:
        return None
    evidence, results = max(maps, key=lambda pair: len(pair[0].places))
    at = {setting: dict(part.partition("=")[::2] for part in setting.split(", ")) for setting in evidence.places}
    if len({tuple(values) for values in at.values()}) > 1:
        at = {setting: {"Setting": setting} for setting in at}  # names that are no axes and values
    middle = list(at.values())[len(at) // 2]
    picks = {_AXES.get(axis, axis): list(dict.fromkeys(values[axis] for values in at.values())) for axis in middle}
    default = list(middle.values())
    own = {round(10**measures.clients) for measures in evidence.places.values()}
    sizes = sorted({*own, *_SIZES}) if len(own) == 1 else []  # else the map itself varies them
    if sizes:
        picks["Clients"] = [str(size) for size in sizes]
        default += map(str, own)
    answers = {}
    for setting, measures in evidence.places.items():
        for size in sizes or [round(10**measures.clients)]:
            here = measures if size in own else replace(measures, clients=log10(size))
            chosen = [*at[setting].values(), *([str(size)] if sizes else [])]
            answers["|".join(chosen)] = _answer(evidence, here, results.tables[0].baseline)
    if not answers["|".join(default)]["rows"]:
        return None
    stacks = evidence.runs.drop_duplicates("label").set_index("label")["method"].map(stack_names)
    pages = {str(label): f"methods/{slug(stack[0])}.html" for label, stack in stacks.items()}
    return WhatToTry(results, picks, default, answers, pages)


def _answer(evidence: Evidence, measures: Measures, baseline: str) -> dict[str, Any]:
    """The advice for a federation, as texts; without rows where there can be none."""
    try:
        advice = advise(evidence, measures, baseline, most=MOST_SHOWN)
    except FedbenchError as error:
        return {"rows": [], "said": str(error)}
    nearest, steps = next(iter(advice.nearest.items()))
    clients = counted(round(10 ** evidence.places[nearest].clients), "client")
    rows: list[list[str]] = []
    for choice in advice.choices:
        lead = advice.choices[0].score - choice.score
        # the first choice has the interval of its margin, others that of the first one's lead
        interval = interval_shown(lead if rows else choice.margin, choice.half_width)
        intervals = ["", f"{lead:.1f}", interval] if rows else [interval, NONE, ""]
        numbers = [f"{choice.score:.1f}", f"{choice.margin:+.1f}", *intervals, f"{choice.megabytes:.3g}"]
        rows.append([choice.label, *numbers])
    near = f"Nearest measured setting: {nearest}, {clients}; {steps:.1f} steps away."
    return {"rows": rows, "said": " ".join([near, *doubts(advice)])}


_KINDS = {
    "few or wrong labels": r"label noise|labels (at|of)|shots=",
    "label skew": r"\b(dirichlet|creff_equal|shards|classes_per_client)\(|pachinko|label_drift",
    "feature skew": r"\b(domain|domain_drift)\(",
    "a long tail": r"imbalance (?!1\.0,)",
}
"""Kind of heterogeneity -> what a board's words for the scenario then have."""
_UNLABELLED = " (no labels)"
_REFERENCES = {"fedavg": "FedAvg", "clip-zs": "CLIP without training"}
"""What rows are compared with: the first with labels, the other without."""


def worth(name: str, tables: Sequence[BoardTable]) -> str:
    """When a method is worth trying, by ranked rows of it alone and as it is, else by all ranked rows with it."""
    met = [table for table in tables if len(table.entries) > 1]
    of_it = [(table, entry) for table in met for entry in table.entries if name in entry.methods and entry.rank]
    places = [(table, entry) for table, entry in of_it if _plain(entry) == name] or of_it
    if not places:
        return "Not tried in any of these results."
    best = {table for table, entry in places if entry.rank == 1}
    tied = {table for table, entry in places if entry.tied_rank == 1} - best
    said = "" if _plain(places[0][1]) == name else "Tried only with others or changed. "
    said += f"Best mean in {len(best) or 'none'} of {counted(len({table for table, _ in places}), 'table')}"
    said += f", not told from the best in {len(tied)} more." if tied else "."
    said += "".join(_compared(places, reference) for reference in _REFERENCES if name != reference)
    tried = {kind for table, _ in places for kind in _kinds(table)}
    missing = [kind for kind in _KINDS if kind not in tried and any(kind in _kinds(table) for table in tables)]
    return f"{said} Not tried under {' or under '.join(missing)}." if missing else said


def _plain(entry: BoardLine) -> str:
    return entry.label.removesuffix(_UNLABELLED).removesuffix(" (tuned)")


def _kinds(table: BoardTable) -> list[str]:
    return [kind for kind, pattern in _KINDS.items() if re.search(pattern, table.scenario)]


def _compared(places: Sequence[tuple[BoardTable, BoardLine]], reference: str) -> str:
    """How rows do beside the reference, and under which kinds they gain most and least; "" where they never met it."""
    who, is_unlabelled = _REFERENCES[reference], reference != "fedavg"
    alike = [(table, entry) for table, entry in places if (_UNLABELLED in entry.label) == is_unlabelled]
    pairs = [
        (table, entry, other)
        for table, entry in alike
        for other in table.entries
        if other.rank
        and other is not entry
        and (_plain(other), other.backbone, other.tuned) == (reference, entry.backbone, entry.tuned)
    ]
    if not pairs:
        return ""
    gains: dict[str, list[float]] = {}
    for table, own, other in pairs:
        is_iid = re.search(r"\biid\b", table.scenario)
        under = " and ".join(_kinds(table)) or ("no heterogeneity" if is_iid else "other kinds")
        gains.setdefault(under, []).append(own.mean - other.mean)
    means = sorted(((fmean(gain), under, len(gain)) for under, gain in gains.items()), reverse=True)
    ends = [f"{round(gain, 1) + 0.0:+.1f} under {under} ({count})" for gain, under, count in means]
    ahead = sum(own.mean > other.mean for _, own, other in pairs)
    told = sum((own.tied_rank or inf) < (other.tied_rank or 0) for _, own, other in pairs)
    said = f" Ahead of {who} by mean in {ahead} of {counted(len(pairs), 'comparison')}, by rank in {told}"
    if all(own.mean < other.mean for _, own, other in pairs):
        said = f" Behind {who} wherever both were tried, in {counted(len(pairs), 'comparison')}"
    return f"{said}; mean difference in points: {' to '.join(dict.fromkeys(ends[:1] + ends[-1:]))}."
