"""Advice on methods for a federation: rows that led in the nearest measured settings, and how uncertain that is.

A row's score at a place is the mean over the nearest settings, weighted by a Gaussian of their distance. Its width is
the usual distance between neighbours on the map. The intervals are those of the first choice's margin and of its lead
over each other choice. They come from the errors of the same rule on measured settings that it has not seen, each left
out in turn: the quantile of errors in units of the spread there, times the spread here. They thus widen with the
disagreement of neighbours and seeds. They are scaled as in Lei et al. (JASA 2018, section 5.2), but by the jackknife,
which guarantees nothing, least of all for neighbours on a grid. With too few settings for the level there are no
intervals. A suite replays the federation's counts with a shortlist of rows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import yaml

from fedbench.core.errors import FedbenchError
from fedbench.core.files import usable_folder
from fedbench.core.wording import NONE
from fedbench.datasets import load_dataset
from fedbench.suites.suite import Row, Suite, load_suite
from fedbench_boards.advice.evidence import GLOBAL, Evidence, Measures

NEAREST = 4
"""The number of nearest settings that count."""
LEVEL = 0.9
"""Level of the intervals; nine settings left out are needed for it."""
LEAST_SPREAD = 0.5
"""The least spread in points, so that no error is divided by next to nothing."""
MOST = 3
"""The most rows of a shortlist, unless more are asked for."""


@dataclass(frozen=True)
class Constraints:
    """The user's conditions on methods and their cost."""

    needs: str = GLOBAL
    most_megabytes: float = math.inf


@dataclass(frozen=True)
class Choice:
    """A row of the shortlist."""

    row: str
    label: str
    score: float
    """The expected score, in %."""
    margin: float
    """The expected margin over the baseline, in points."""
    half_width: float
    """Half the width of an interval: that of the first choice's margin, and for other choices that of the first one's
    lead over them. Infinite if unknown."""
    megabytes: float
    runs: tuple[str, ...]
    """Ids of the row's runs in the nearest settings."""


@dataclass(frozen=True)
class Advice:
    """A shortlist, best first, and its evidence."""

    measures: Measures
    nearest: Mapping[str, float]
    """Setting -> distance in steps, the nearest first."""
    usual: float
    """The largest distance of a measured setting to its own nearest one."""
    choices: tuple[Choice, ...]
    baseline: str

    @property
    def is_far(self) -> bool:
        """Whether even the nearest setting is further away than measured ones are from each other."""
        return min(self.nearest.values()) > self.usual


def advise(
    evidence: Evidence, measures: Measures, baseline: str, constraints: Constraints = Constraints(), most: int = MOST
) -> Advice:
    """The shortlist for a federation with these ``measures``; ``baseline`` is the label of the row compared with.

    FedbenchError where fewer than three settings are measured, or no row meets the constraints.
    """
    places = evidence.places
    if len(places) < 3:
        raise FedbenchError(f"the evidence has {len(places)} settings; advice needs three at least.")
    backbones = evidence.runs.groupby("label")["backbone"].nunique()
    if (backbones > 1).any():
        raise FedbenchError(f"the evidence has {backbones.idxmax()!r} on several backbones; map one backbone alone.")
    chosen = _ranked(evidence, measures, baseline, constraints)[:most]
    half = [
        _half_width(evidence, measures, chosen[0].row, other, baseline, constraints)
        for other in (baseline, *(choice.label for choice in chosen[1:]))
    ]
    distances = _distances(places, measures)
    return Advice(
        measures=measures,
        nearest=dict(list(distances.items())[:NEAREST]),
        usual=max(evidence.to_nearest),
        choices=tuple(replace(choice, half_width=width) for choice, width in zip(chosen, half, strict=True)),
        baseline=baseline,
    )


def _ranked(evidence: Evidence, measures: Measures, baseline: str, constraints: Constraints) -> list[Choice]:
    weights = _weights(evidence, measures)
    runs = evidence.runs[evidence.runs["setting"].isin(weights)]
    score = constraints.needs
    base = _means(runs[runs["label"] == baseline], score)
    if base.empty:
        raise FedbenchError(f"the evidence has no row {baseline!r} with a score for what is needed ({score}).")
    choices = []
    # rows that need data at the server are left out
    allowed = runs[runs[score].notna() & (runs["server_data"] == "")]
    by_setting = allowed.groupby(["row", "setting"], sort=False)[[score, "megabytes"]].mean()
    for row, own in allowed.groupby("row", sort=False):
        means = by_setting.loc[row]
        shared = [setting for setting in weights if setting in means.index and setting in base]
        if len(shared) < len(base):
            continue  # not measured everywhere around here
        shares = np.array([weights[setting] for setting in shared])
        shares /= shares.sum()
        sent = float(shares @ means.loc[shared, "megabytes"])
        if sent > constraints.most_megabytes:
            continue
        expected = float(shares @ means.loc[shared, score])
        choices.append(
            Choice(
                row=str(row),
                label=str(own["label"].iloc[0]),
                score=expected,
                margin=expected - float(shares @ base[shared]),
                half_width=math.nan,
                megabytes=sent,
                runs=tuple(own["run_id"]),
            )
        )
    if not choices:
        raise FedbenchError("no measured row meets these constraints; raise --max-mb.")
    return sorted(choices, key=lambda choice: -choice.score)


def _means(runs: pd.DataFrame, score: str) -> pd.Series:
    """Mean score over seeds by setting."""
    return runs.groupby("setting", sort=False)[score].mean().dropna()


def _distances(places: Mapping[str, Measures], measures: Measures) -> dict[str, float]:
    distances = {setting: measures.steps_to(there) for setting, there in places.items()}
    return dict(sorted(distances.items(), key=lambda item: item[1]))


def _weights(evidence: Evidence, measures: Measures) -> dict[str, float]:
    near = dict(list(_distances(evidence.places, measures).items())[:NEAREST])
    width = max(float(np.median(evidence.to_nearest)), 1e-9)
    least = min(near.values())
    # relative to the nearest, so that far away the weights do not all vanish
    return {setting: math.exp(-(distance**2 - least**2) / (2 * width**2)) for setting, distance in near.items()}


@lru_cache(maxsize=1)
def _left_out(evidence: Evidence, baseline: str, constraints: Constraints) -> dict[str, tuple[Evidence, Choice]]:
    """Setting -> the evidence without it, and the first choice there by this evidence."""
    left_out = {}
    for setting, measures in evidence.places.items():
        rest = evidence.without(setting)
        try:
            left_out[setting] = rest, _ranked(rest, measures, baseline, constraints)[0]
        except FedbenchError:
            continue
    return left_out


@lru_cache(maxsize=256)
def _misses(evidence: Evidence, other: str, baseline: str, constraints: Constraints) -> list[float]:
    """Errors, in spreads, of the first row's margin over ``other`` in settings left out in which it is another row."""
    misses, score = [], constraints.needs
    for setting, (rest, first) in _left_out(evidence, baseline, constraints).items():
        if first.label == other:
            continue
        margin, spread = _margin(rest, evidence.places[setting], first.row, other, score)
        miss = abs(true_margins(evidence, setting, other, score, {first.row})[first.row] - margin) / spread
        if not math.isnan(miss):
            misses.append(miss)
    return sorted(misses)


def _half_width(
    evidence: Evidence, measures: Measures, row: str, other: str, baseline: str, constraints: Constraints
) -> float:
    """Half the width of the interval of a row's margin over ``other``; infinite for too few misses or common seeds."""
    misses = _misses(evidence, other, baseline, constraints)
    rank = math.ceil(LEVEL * (len(misses) + 1))
    _, spread = _margin(evidence, measures, row, other, constraints.needs)
    if rank > len(misses) or math.isnan(spread):
        return math.inf
    return float(misses[rank - 1]) * spread


def _margin(evidence: Evidence, measures: Measures, row: str, baseline: str, score: str) -> tuple[float, float]:
    """A row's expected margin and its spread: the root mean square deviation of single seeds' margins from it.

    More seeds do not narrow the spread. Seeds are paired, and settings are weighted as in scores. NaN without common
    seeds.
    """
    weights = _weights(evidence, measures)
    runs = evidence.runs[evidence.runs["setting"].isin(weights)]
    own, base = (
        runs[chosen].groupby(["setting", "seed"])[score].mean()
        for chosen in (runs["row"] == row, runs["label"] == baseline)
    )
    margins = (own - base).dropna()
    if margins.empty:
        return math.nan, math.nan
    setting = margins.index.get_level_values("setting")
    shares = setting.map(weights).to_numpy() / setting.value_counts()[setting].to_numpy()
    mean = float(np.average(margins, weights=shares))
    return mean, max(LEAST_SPREAD, math.sqrt(float(np.average((margins - mean) ** 2, weights=shares))))


def true_margins(
    evidence: Evidence, setting: str, baseline: str, needs: str, rows: Collection[str]
) -> dict[str, float]:
    """Row -> its measured margin over the baseline in a setting."""
    runs = evidence.runs[evidence.runs["setting"] == setting]
    base = runs.loc[runs["label"] == baseline, needs].mean()
    return {row: float(runs.loc[runs["row"] == row, needs].mean() - base) for row in rows}


def interval_shown(margin: float, half_width: float) -> str:
    """An interval in words, within what accuracies can be; a dash where it is unknown."""
    if not math.isfinite(half_width):
        return NONE
    return f"{max(margin - half_width, -100.0):+.1f} to {min(margin + half_width, 100.0):+.1f}"


def doubts(advice: Advice) -> Iterator[str]:
    """What the evidence does not decide here, a sentence each."""
    first, *others = advice.choices
    close = [other.label for other in others if first.score - other.score <= other.half_width]
    if close:
        yield f"{first.label} can't be told from {' and '.join(close)} by this evidence."
    if math.isfinite(first.half_width) and first.margin - first.half_width <= 0:
        yield f"That {first.label} beats {advice.baseline} here is not certain: the interval holds zero."
    if advice.is_far:
        yield (
            f"Far from all that is measured: the nearest setting is {min(advice.nearest.values()):.1f} steps away, and "
            f"no two neighbours on the map are further apart than {advice.usual:.1f}. The interval does not cover "
            "this: measure it by fedbench advise --run."
        )


_FROM_COUNTS = ("imbalance", "imbalance_factor", "partition", "dirichlet_alpha", "clients", "min_client_size")
"""Fields of the scenario that the counts replace."""
SUITE, COUNTS = "advised.yaml", "counts.csv"
_EMBEDDED_CLASSES = (10, 20)


def write_replay(
    runs: pd.DataFrame,
    rows: Collection[str],
    baseline: str,
    counts: pd.DataFrame,
    participation: float,
    dataset: str,
    folder: Path,
) -> Path:
    """Write the counts as a partition and a suite of ``rows`` and the ``baseline``; the suite's file.

    ``runs`` are the evidence, which names the suite that the rows' settings are of. The classes of another data set
    than the user's stand for theirs, the most frequent for the most frequent. FedbenchError where these are too many.
    """
    suite = load_suite(str(runs["suite"].iloc[0]))
    labels = [baseline, *(runs.loc[runs["row"] == row, "label"].iloc[0] for row in rows)]
    chosen = [_row_called(suite, label) for label in dict.fromkeys(labels)]
    scenario = {"preset": suite.scenario} if isinstance(suite.scenario, str) else dict(suite.scenario)
    scenario = {name: value for name, value in scenario.items() if name not in _FROM_COUNTS}
    folder = usable_folder(folder, "--output")
    data, file = dataset or _data_for(counts, suite.dataset), folder / COUNTS
    content: dict[str, Any] = {
        "name": "advised",
        "description": f"a federation's own counts, with the shortlist of suite {suite.name}",
        "dataset": data,
        "backbone": suite.backbone,
        "scenario": scenario
        | {"imbalance": "none", "partition": f"table:{file.resolve()}", "participation": participation},
        "training": dict(suite.training),
        "seeds": list(suite.seeds),
        "baseline": baseline,
        "rows": [_row(row) for row in chosen],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (counts if dataset else _renamed(counts)).to_csv(file, index_label="client")
    suite_file = folder / SUITE
    suite_file.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return suite_file


def _row_called(suite: Suite, label: str) -> Row:
    """The row of ``suite`` called ``label``. FedbenchError unless there is exactly one, as for a tuned row."""
    name = label.removesuffix(" (no labels)")
    matches = [row for row in suite.rows if name in (row.label or row.method, "+".join(row.stack))]
    if len(matches) != 1:
        raise FedbenchError(
            f"--run can't tell which row of suite {suite.name!r} is {label!r}: it has {len(matches)} of that name; run "
            "it by fedbench run, with --set partition=table:FILE."
        )
    return matches[0]


def _row(row: Row) -> dict[str, Any]:
    return {"method": row.method} | ({"label": row.label} if row.label else {}) | ({"set": row.set} if row.set else {})


def _data_for(counts: pd.DataFrame, dataset: str) -> str:
    """The embedded data with as many classes, and enough samples of each for the largest class.

    With fewer classes than the data's, models would be tested on classes that no client holds.
    """
    name, count = dataset.partition("?")[0], counts.shape[1]
    if name != "embedded":
        raise FedbenchError(f"the evidence is on {dataset!r}; name the data to take samples of by --dataset.")
    if count not in _EMBEDDED_CLASSES:
        raise FedbenchError(
            f"the embedded data have {' or '.join(map(str, _EMBEDDED_CLASSES))} classes, these counts {count}; give "
            "data with your classes by --dataset."
        )
    return f"{name}?classes={count}&train={count * int(counts.sum().max())}"


def _renamed(counts: pd.DataFrame) -> pd.DataFrame:
    """The counts under the embedded data's class names, the largest class under the first."""
    order = counts.sum().sort_values(ascending=False, kind="stable").index
    smallest = f"embedded?classes={counts.shape[1]}&train=1&test=1"
    with TemporaryDirectory() as folder:
        names = load_dataset(smallest, data_dir=Path(folder), cache_dir=Path(folder)).classnames
    return counts[order].set_axis(list(names), axis=1)
