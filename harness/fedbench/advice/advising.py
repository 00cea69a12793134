"""Which methods to try on a federation: what led in the nearest measured settings, and how far that carries.

A row's score at a place is the mean over the nearest settings, weighted by a Gaussian of their distance whose width is
the usual distance between neighbours on the map. The interval of the first choice's margin comes from what the same
rule misses by when it is asked for measured settings it has not seen, each left out in turn: the jackknife's quantile
(as in Barber et al., Annals of Statistics 2021) of misses in units of their spread, times the spread here (as in Lei
et al., JASA 2018, section 5.2), so that it is wide where neighbours or seeds disagree. Neither's guarantee holds, since
neighbours on a grid are not exchangeable. With too few settings for the level there is no interval.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from fedbench.advice.evidence import GLOBAL, Evidence
from fedbench.advice.measures import Measures
from fedbench.core.errors import FedbenchError

NEAREST = 4
"""Settings that count."""
LEVEL = 0.9
"""Of the interval; nine settings left out are needed."""
LEAST_SPREAD = 0.5
"""In points; seeds that agree better do so by chance."""
MOST = 3
"""Rows of a shortlist."""


@dataclass(frozen=True)
class Constraints:
    """What the user can't do without."""

    needs: str = GLOBAL
    most_megabytes: float = math.inf
    has_labels: bool = True
    has_server_data: bool = False


@dataclass(frozen=True)
class Choice:
    """A row of the shortlist."""

    row: str
    label: str
    score: float
    """Expected, in %."""
    margin: float
    """Over the baseline, in points."""
    half_width: float
    """Of the margin's interval, which is the first choice's; NaN of others, infinite where it is not known."""
    megabytes: float
    runs: tuple[str, ...]
    """Run ids in the nearest settings."""


@dataclass(frozen=True)
class Advice:
    """A shortlist, best first, and what it rests on."""

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


def advise(evidence: Evidence, measures: Measures, baseline: str, constraints: Constraints = Constraints()) -> Advice:
    """The shortlist for a federation with these ``measures``; ``baseline`` is the label of the row compared with.

    FedbenchError where fewer than three settings are measured, or no row meets the constraints.
    """
    places = evidence.places
    if len(places) < 3:
        raise FedbenchError(f"the evidence has {len(places)} settings; advice needs three at least.")
    chosen = _shortlist(evidence, measures, baseline, constraints)
    spread = _spread(evidence, measures, chosen[0], baseline, constraints.needs)
    half = _misses(evidence, baseline, constraints) * spread
    distances = _distances(places, measures)
    return Advice(
        measures=measures,
        nearest=dict(list(distances.items())[:NEAREST]),
        usual=max(_to_nearest(places)),
        choices=tuple(replace(choice, half_width=math.nan if place else half) for place, choice in enumerate(chosen)),
        baseline=baseline,
    )


def _shortlist(evidence: Evidence, measures: Measures, baseline: str, constraints: Constraints) -> list[Choice]:
    weights = _weights(evidence.places, measures)
    runs = evidence.runs[evidence.runs["setting"].isin(weights)]
    score = constraints.needs
    base = _means(runs[runs["label"] == baseline], score)
    if base.empty:
        raise FedbenchError(f"the evidence has no row {baseline!r} with a score for what is needed ({score}).")
    choices = []
    for row, own in runs[_is_allowed(runs, constraints)].groupby("row", sort=False):
        means = _means(own, score)
        shared = [setting for setting in weights if setting in means and setting in base]
        if len(shared) < len(base):
            continue  # not measured everywhere around here
        shares = np.array([weights[setting] for setting in shared])
        shares /= shares.sum()
        sent = float(shares @ [own.loc[own["setting"] == setting, "megabytes"].mean() for setting in shared])
        if sent > constraints.most_megabytes:
            continue
        expected = float(shares @ means[shared])
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
        raise FedbenchError("no measured row meets these constraints; loosen one of them.")
    return sorted(choices, key=lambda choice: -choice.score)[:MOST]


def _is_allowed(runs: pd.DataFrame, constraints: Constraints) -> pd.Series:
    """Rows that are measured under what the user has: without labels only those that had none, or never train."""
    allowed = runs[constraints.needs].notna()
    if not constraints.has_labels:
        allowed &= (runs["labels"] == "hidden") | ~runs["trains"].astype(bool)
    if not constraints.has_server_data:
        allowed &= runs["server_data"] == ""
    return allowed


def _means(runs: pd.DataFrame, score: str) -> pd.Series:
    """Setting -> mean over seeds."""
    return runs.groupby("setting", sort=False)[score].mean().dropna()


def _distances(places: Mapping[str, Measures], measures: Measures) -> dict[str, float]:
    found = {setting: measures.steps_to(there) for setting, there in places.items()}
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _to_nearest(places: Mapping[str, Measures]) -> list[float]:
    """The distance of every setting to the nearest other one."""
    return [
        min(here.steps_to(there) for other, there in places.items() if other != setting)
        for setting, here in places.items()
    ]


def _weights(places: Mapping[str, Measures], measures: Measures) -> dict[str, float]:
    near = dict(list(_distances(places, measures).items())[:NEAREST])
    width = max(float(np.median(_to_nearest(places))), 1e-9)
    least = min(near.values())
    # relative to the nearest, so that far away the weights do not all vanish
    return {setting: math.exp(-(distance**2 - least**2) / (2 * width**2)) for setting, distance in near.items()}


def _misses(evidence: Evidence, baseline: str, constraints: Constraints) -> float:
    """The quantile of what the first choice's margin is missed by, in spreads, over settings left out in turn.

    Infinite for too few.
    """
    misses = []
    for setting, measures in evidence.places.items():
        rest = evidence.without(setting)
        try:
            first, *_ = _shortlist(rest, measures, baseline, constraints)
        except FedbenchError:
            continue
        true = true_margins(evidence, setting, baseline, constraints.needs, {first.row})
        spread = _spread(rest, measures, first, baseline, constraints.needs)
        if not math.isnan(true[first.row]) and math.isfinite(spread):
            misses.append(abs(true[first.row] - first.margin) / spread)
    place = math.ceil(LEVEL * (len(misses) + 1))
    return float(np.sort(misses)[place - 1]) if place <= len(misses) else math.inf


def _spread(evidence: Evidence, measures: Measures, choice: Choice, baseline: str, score: str) -> float:
    """How far the runs that a choice rests on lie from its margin: settings weighted as in it, seeds paired.

    Infinite where it and the baseline have no seed in common.
    """
    weights = _weights(evidence.places, measures)
    runs = evidence.runs[evidence.runs["setting"].isin(weights)]
    own, base = (
        runs[chosen].groupby(["setting", "seed"])[score].mean()
        for chosen in (runs["row"] == choice.row, runs["label"] == baseline)
    )
    margins = (own - base).dropna()
    setting = margins.index.get_level_values("setting")
    shares = setting.map(weights).to_numpy() / setting.value_counts()[setting].to_numpy()
    squares = (margins.to_numpy() - choice.margin) ** 2
    return max(LEAST_SPREAD, math.sqrt(float(np.average(squares, weights=shares)))) if len(margins) else math.inf


def true_margins(
    evidence: Evidence, setting: str, baseline: str, needs: str, rows: Collection[str]
) -> dict[str, float]:
    """Row -> what was measured of its margin over the baseline in a setting."""
    runs = evidence.runs[evidence.runs["setting"] == setting]
    base = runs.loc[runs["label"] == baseline, needs].mean()
    return {row: float(runs.loc[runs["row"] == row, needs].mean() - base) for row in rows}
