"""What the site answers first, computed from the result folders: what to try, and when a method is worth it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from fedbench.core.errors import FedbenchError
from fedbench.core.randomness import numpy_generator
from fedbench.core.scenario import Scenario
from fedbench.core.spec import stack_names
from fedbench.core.wording import counted
from fedbench.kinds.kinds import PartitionTask, Samples
from fedbench.scenarios.build import partition_of
from fedbench.scenarios.partitions.parts import IntArray
from fedbench_boards.advice.advising import Forecaster, caveats, interval_shown
from fedbench_boards.advice.evidence import SHIPPED, Measures, measures_of, read_evidence
from fedbench_boards.site.folders import PICTURES, BoardLine, BoardTable, ResultsOf, is_own, own_text
from fedbench_boards.site.text import slug

MOST_SHOWN = 8
"""The most rows of advice; the first ones are those of `fedbench advise`."""
_SKEWS: Mapping[str, Mapping[str, Any]] = {
    "none": {"partition": "iid"},
    "weak (Dirichlet 0.5)": {"partition": "dirichlet", "dirichlet_alpha": 0.5},
    "strong (Dirichlet 0.1)": {"partition": "dirichlet", "dirichlet_alpha": 0.1},
    "very strong (Dirichlet 0.02)": {"partition": "dirichlet", "dirichlet_alpha": 0.02},
    "two classes a client": {"partition": "shards"},
}
_TAILS, _CLIENTS, _SHARES = (1, 10, 100), (5, 20, 100, 1000), {"10 %": 0.1, "40 %": 0.4, "all": 1.0}
_CLASSES, _SAMPLES = 10, 1000
"""Classes, and samples of the largest one, of the federations to choose from."""
_DEFAULT = ("strong (Dirichlet 0.1)", 10, 20, "40 %")


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
    picks = {
        "Label skew": [*_SKEWS],
        "Largest class over smallest": [*map(str, _TAILS)],
        "Clients": [*map(str, _CLIENTS)],
        "Of them in a round": [*_SHARES],
    }
    forecaster = Forecaster(evidence, results.tables[0].baseline)
    answers = {}
    try:
        for skew, tail, clients in product(_SKEWS, _TAILS, _CLIENTS):
            scenario = Scenario(clients=clients, dirichlet_scheme="clientwise", min_client_size=1, **_SKEWS[skew])
            counts = _counts(scenario, tail)
            for share, part in _SHARES.items():
                answer = {"rows": [], "said": "So many clients can't be dealt so few samples."}
                if counts is not None:
                    answer = _answer(forecaster, measures_of(counts, max(part, 1 / clients)))
                answers["|".join((skew, str(tail), str(clients), share))] = answer
    except FedbenchError:  # too few settings for advice
        return None
    stacks = evidence.runs.drop_duplicates("label").set_index("label")["method"].map(stack_names)
    pages = {str(label): f"methods/{slug(stack[0])}.html" for label, stack in stacks.items()}
    return WhatToTry(results, picks, [*map(str, _DEFAULT)], answers, pages)


def _counts(scenario: Scenario, tail: int) -> IntArray | None:
    """Counts (clients, classes) of a federation with this ratio of largest to smallest class; None for too few."""
    sizes = [int(_SAMPLES * tail ** (-number / (_CLASSES - 1))) for number in range(_CLASSES)]
    labels, none = np.repeat(np.arange(_CLASSES), sizes), np.arange(0)
    partition, _ = partition_of(scenario)
    names = [*map(str, range(_CLASSES))]
    task = PartitionTask(Samples(labels), Samples(none), None, names, (), (), scenario, numpy_generator(0, "partition"))
    try:
        clients: Any = partition.clients(task)
    except FedbenchError:
        return None
    counts = np.stack([np.bincount(labels[own], minlength=_CLASSES) for own in clients])
    return counts if counts.sum(axis=1).all() else None


def _answer(forecaster: Forecaster, measures: Measures) -> dict[str, Any]:
    """The advice for a federation, as texts."""
    advice = forecaster.advise(measures)
    nearest, steps = next(iter(advice.nearest.items()))
    rows = [
        [one.row, f"{one.margin:+.1f}", interval_shown(one.margin, one.half_width), f"{one.megabytes:.3g}"]
        for one in advice.choices[: max(MOST_SHOWN, len(advice.to_try))]
    ]
    near = f"Nearest measured setting: {nearest}; {steps:.1f} steps away."
    return {"rows": rows, "said": " ".join([*caveats(advice), near])}


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
    tied = {table for table, entry in places if entry.rank_low == 1} - best
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
    told = sum((own.rank_high or inf) < (other.rank_low or 0) for _, own, other in pairs)
    said = f" Ahead of {who} by mean in {ahead} of {counted(len(pairs), 'comparison')}, by rank in {told}"
    if all(own.mean < other.mean for _, own, other in pairs):
        said = f" Behind {who} wherever both were tried, in {counted(len(pairs), 'comparison')}"
    return f"{said}; mean difference in points: {' to '.join(dict.fromkeys(ends[:1] + ends[-1:]))}."
