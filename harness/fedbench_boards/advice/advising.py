"""Advice on methods for a federation: a forecast of every row's margin over the baseline, and how far off it has been.

The forecast is a regression of margins on the measures of federations, fitted on all measured settings. Its errors are
those on data that it has not seen: each data set is left out in turn (each setting, where there is one data set only).
From them come two statements, with the quantile of split conformal prediction (Vovk et al., 2005):

- a row's interval: its forecast plus and minus the quantile at `RATE` of its errors;
- how many rows to try: the least number of first rows of a forecast among which, at that rate, one was within `NEAR` of
  the best row that was measured.

So it was on the map; of other data nothing is guaranteed, since the settings of a data set are no independent samples.
A row that was run on one of several data sets alone can't be checked so, and is not advised. A suite replays the
federation's counts with the rows to try.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import yaml
from numpy.typing import NDArray

from fedbench.core.errors import FedbenchError
from fedbench.core.files import usable_folder
from fedbench.core.wording import NONE
from fedbench.datasets import load_dataset
from fedbench.suites.suite import Row, Suite, load_suite
from fedbench_boards.advice.evidence import GLOBAL, Evidence, Measures

RATE = 0.9
"""The share of left-out settings for which both statements hold."""
NEAR = 1.0
"""Points below the best measured row within which a row is near it."""
NEAREST = 4
"""The number of nearest settings that are named, and whose costs count."""


@dataclass(frozen=True)
class Constraints:
    """The user's conditions on methods and their cost."""

    needs: str = GLOBAL
    most_megabytes: float = math.inf
    most_seconds: float = math.inf


@dataclass(frozen=True)
class Choice:
    """A row to try."""

    row: str
    margin: float
    """The forecast margin over the baseline, in points."""
    half_width: float
    """Half the width of its interval at `RATE`; infinite where too few settings were left out."""
    megabytes: float
    """Sent in a run, both ways, by as many clients as here."""
    seconds: float
    """Training time of a run in the nearest settings, of one CPU core."""


@dataclass(frozen=True)
class Advice:
    """Rows, the best forecast first, and how far to trust them."""

    measures: Measures
    nearest: Mapping[str, float]
    """Setting -> distance in steps, the nearest first."""
    usual: float
    """The largest distance of a measured setting to its own nearest one."""
    choices: tuple[Choice, ...]
    baseline: str
    enough: int | None
    """How many of the first rows to try; None where too few settings were left out to say."""
    is_new_data: bool
    """Whether errors are on data sets left out, not on settings of the same data."""
    unchecked: tuple[str, ...] = ()
    """Rows that were run on one data set only, and so are not among the choices."""

    @property
    def is_far(self) -> bool:
        """Whether even the nearest setting is further away than measured ones are from each other."""
        return min(self.nearest.values()) > self.usual

    @property
    def to_try(self) -> tuple[Choice, ...]:
        """The first `enough` rows; three where their number is not known."""
        return self.choices[: self.enough or 3]


@dataclass(frozen=True, eq=False)
class Forecaster:
    """The forecast of margins over ``baseline`` by ``evidence``, for all who need the same model."""

    evidence: Evidence
    baseline: str
    needs: str = GLOBAL

    @cached_property
    def margins(self) -> pd.DataFrame:
        """Measured margins, settings x rows, means over the seeds that row and baseline share; NaN where not run."""
        runs = self.evidence.runs
        usable = runs[runs["server_data"] == ""]  # others need data at the server
        scores = usable.pivot_table(index=["setting", "seed"], columns="label", values=self.needs, aggfunc="mean")
        if self.baseline not in scores:
            raise FedbenchError(
                f"the evidence has no row {self.baseline!r} with a score for what is needed ({self.needs})."
            )
        margins = scores.sub(scores[self.baseline], axis=0).groupby("setting").mean()
        margins = margins.dropna(subset=[self.baseline])
        if len(margins) < 3:
            raise FedbenchError(f"the evidence has {len(margins)} settings with {self.baseline!r}; advice needs three.")
        return margins.loc[[setting for setting in self.evidence.places if setting in margins.index]]

    @cached_property
    def _inputs(self) -> pd.DataFrame:
        places = self.evidence.places
        return pd.DataFrame([asdict(places[setting]) for setting in self.margins.index], self.margins.index)

    @cached_property
    def _groups(self) -> pd.Series:
        """What is left out together: a data set, or a setting where there is one data set."""
        data = self.evidence.runs.drop_duplicates("setting").set_index("setting")["dataset"].loc[self.margins.index]
        return data if data.nunique() > 1 else pd.Series(self.margins.index, self.margins.index)

    @cached_property
    def _forest(self) -> Forest:
        return Forest(self._inputs, self.margins)

    @cached_property
    def left_out(self) -> pd.DataFrame:
        """The forecasts of settings by all settings of other groups, like `margins`."""
        forecasts = []
        for group in self._groups.unique():
            out = self._groups == group
            forecasts.append(Forest(self._inputs[~out], self.margins[~out])(self._inputs[out]))
        return pd.concat(forecasts).loc[self.margins.index]

    def half_width(self, row: str) -> float:
        """The quantile of a row's errors at `RATE`; infinite for too few."""
        return quantile((self.left_out[row] - self.margins[row]).abs().dropna())

    def enough(self, rows: Collection[str]) -> int | None:
        """How many first rows of a forecast of ``rows`` to try; None for too few settings."""
        return rows_to_try(self.left_out[[row for row in self.left_out if row in rows]], self.margins)

    def advise(self, measures: Measures, constraints: Constraints = Constraints()) -> Advice:
        """The rows that meet the constraints, best first. FedbenchError where none does."""
        here = pd.DataFrame([asdict(measures)])
        both = self.left_out.notna() & self.margins[self.left_out.columns].notna()
        checked = both.columns[both.any()]
        forecasts = self._forest(here).iloc[0][checked]
        distances = {setting: measures.steps_to(there) for setting, there in self.evidence.places.items()}
        nearest = dict(sorted(distances.items(), key=lambda item: item[1])[:NEAREST])
        costs = self._costs(measures, list(nearest))
        cheap = costs[
            (costs["megabytes"] <= constraints.most_megabytes) & (costs["seconds"] <= constraints.most_seconds)
        ]
        allowed = forecasts[forecasts.index.isin(cheap.index)].sort_values(ascending=False, kind="stable")
        if allowed.empty:
            raise FedbenchError(
                "no row that could be checked meets these constraints; raise --max-mb or --max-seconds, or give "
                "evidence of more settings."
            )
        return Advice(
            measures=measures,
            nearest=nearest,
            usual=max(self.evidence.to_nearest),
            choices=tuple(
                Choice(row, allowed[row], self.half_width(row), costs["megabytes"][row], costs["seconds"][row])
                for row in map(str, allowed.index)
            ),
            baseline=self.baseline,
            enough=self.enough(list(allowed.index)),
            is_new_data=self._groups.name == "dataset",
            unchecked=tuple(map(str, self.margins.columns.difference(checked))),
        )

    def _costs(self, measures: Measures, nearest: list[str]) -> pd.DataFrame:
        """Row -> megabytes of a run, by what a client of a round sent on average; seconds in the nearest settings."""
        runs = self.evidence.runs
        shared = runs["megabytes"] / (10 ** runs["clients"] * runs["participation"])
        cohort = 10**measures.clients * measures.participation
        near = runs[runs["setting"].isin(nearest)].groupby("label")["seconds"].mean()
        seconds = near.reindex(runs["label"].unique()).fillna(runs.groupby("label")["seconds"].mean())
        return pd.DataFrame({"megabytes": shared.groupby(runs["label"]).mean() * cohort, "seconds": seconds})


def rows_to_try(forecasts: pd.DataFrame, margins: pd.DataFrame) -> int | None:
    """How many first rows of ``forecasts`` (settings, rows) hold one near the best by ``margins``, at `RATE` of the
    settings; None for too few.
    """
    places = []
    for setting, own in forecasts.iterrows():
        true = margins[forecasts.columns].T[str(setting)][own.notna()].dropna()
        order = own[true.index].sort_values(ascending=False, kind="stable").index
        near = true[order].to_numpy() >= true.max() - NEAR
        if near.any():  # else none of the rows is both measured and forecast there
            places.append(int(near.argmax()) + 1)
    number = quantile(pd.Series(places, dtype=float))
    return int(number) if math.isfinite(number) else None


def quantile(errors: pd.Series) -> float:
    """The smallest of n errors that at least `RATE` of n + 1 do not exceed; infinite where that takes more than n."""
    rank = math.ceil(RATE * (len(errors) + 1))
    return float(errors.sort_values().iloc[rank - 1]) if rank <= len(errors) else math.inf


class Forest:
    """Margins, (settings, rows), learned at ``inputs``, (settings, measures), and forecast elsewhere.

    Regression trees with random splits (Geurts et al., 2006), one forest for all rows that were run in the same
    settings. A row that was run in fewer than two is not forecast.
    """

    def __init__(self, inputs: pd.DataFrame, margins: pd.DataFrame) -> None:
        from sklearn.ensemble import ExtraTreesRegressor  # takes a second to import

        self._fitted: list[tuple[list[str], ExtraTreesRegressor]] = []
        known = margins.notna()
        for _, alike in known.T.groupby(list(known.index), sort=False):
            rows = list(alike.index)
            at = known[rows[0]]
            if at.sum() >= 2:
                trees = ExtraTreesRegressor(300, min_samples_leaf=2, random_state=0)
                targets = margins.loc[at, rows].to_numpy()
                self._fitted.append((rows, trees.fit(inputs[at], targets if len(rows) > 1 else targets[:, 0])))

    def __call__(self, places: pd.DataFrame) -> pd.DataFrame:
        """The forecast margins at ``places``, (n, measures): (n, rows)."""
        by_row: dict[str, NDArray[np.float64]] = {}
        for rows, trees in self._fitted:
            by_row |= dict(zip(rows, trees.predict(places).reshape(len(places), -1).T, strict=True))
        return pd.DataFrame(by_row, places.index)


def interval_shown(margin: float, half_width: float) -> str:
    """An interval in words, within what accuracies can be; a dash where it is unknown."""
    if not math.isfinite(half_width):
        return NONE
    return f"{max(margin - half_width, -100.0):+.1f} to {min(margin + half_width, 100.0):+.1f}"


def caveats(advice: Advice) -> Iterator[str]:
    """How many rows to try and why, and what the evidence does not decide here, a sentence each."""
    of = "data sets" if advice.is_new_data else "settings"
    if advice.enough is None:
        yield f"There are too few measured {of} to say how many rows to try, and how far forecasts are off."
    else:
        first = "the first row" if advice.enough == 1 else f"one of the first {advice.enough}"
        yield (
            f"In {RATE:.0%} of the measured settings, forecast by other {of}, {first} was within {NEAR:g} point of the "
            f"best of these {len(advice.choices)} rows."
        )
    best = advice.choices[0]
    if best.margin - best.half_width <= 0 and best.row != advice.baseline:
        yield f"That {best.row} beats {advice.baseline} here is not certain: its interval holds zero."
    if advice.unchecked:
        yield f"Not forecast, since run on one data set only: {', '.join(advice.unchecked)}."
    if advice.is_far:
        yield (
            f"Far from all that is measured: the nearest setting is {min(advice.nearest.values()):.1f} steps away, and "
            f"no two neighbours on the map are further apart than {advice.usual:.1f}. The intervals do not cover this: "
            "measure it by fedbench advise --run."
        )


_FROM_COUNTS = ("imbalance", "imbalance_factor", "partition", "dirichlet_alpha", "clients", "min_client_size")
"""Fields of the scenario that the counts replace."""
SUITE, COUNTS = "advised.yaml", "counts.csv"
_EMBEDDED_CLASSES = (10, 20)


def write_replay(
    runs: pd.DataFrame,
    rows: Collection[str],
    counts: pd.DataFrame,
    participation: float,
    dataset: str,
    backbone: str,
    folder: Path,
) -> Path:
    """Write the counts as a partition and a suite of ``rows``, the first the baseline; the suite's file.

    ``runs`` are the evidence, which names the suite that the rows' settings are of. Without a ``dataset`` classes of
    the embedded data stand for the user's, the most frequent for the most frequent; FedbenchError for too many.
    """
    suite = load_suite(str(runs["suite"].iloc[0]))
    chosen = [_row_called(suite, row) for row in dict.fromkeys(rows)]
    scenario = {"preset": suite.scenario} if isinstance(suite.scenario, str) else dict(suite.scenario)
    scenario = {name: value for name, value in scenario.items() if name not in _FROM_COUNTS}
    folder = usable_folder(folder, "--output")
    file = folder / COUNTS
    content: dict[str, Any] = {
        "name": "advised",
        "description": f"a federation's own counts, with rows of suite {suite.name}",
        "dataset": dataset or _data_for(counts),
        "backbone": backbone or suite.backbone,
        "scenario": scenario
        | {"imbalance": "none", "partition": f"table:{file.resolve()}", "participation": participation},
        "training": dict(suite.training),
        "seeds": list(suite.seeds),
        "baseline": chosen[0].label or chosen[0].method,
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


def _data_for(counts: pd.DataFrame) -> str:
    """The embedded data with as many classes, and enough samples of each for the largest class.

    With fewer classes than the data's, models would be tested on classes that no client holds.
    """
    count = counts.shape[1]
    if count not in _EMBEDDED_CLASSES:
        raise FedbenchError(
            f"the embedded data have {' or '.join(map(str, _EMBEDDED_CLASSES))} classes, these counts {count}; give "
            "data with your classes by --dataset."
        )
    # and a fifth of them more, and one, by which rates are chosen
    return f"embedded?classes={count}&train={count * (math.ceil(1.25 * counts.sum().max()) + 1)}"


def _renamed(counts: pd.DataFrame) -> pd.DataFrame:
    """The counts under the embedded data's class names, the largest class under the first."""
    order = counts.sum().sort_values(ascending=False, kind="stable").index
    smallest = f"embedded?classes={counts.shape[1]}&train=1&test=1"
    with TemporaryDirectory() as folder:
        names = load_dataset(smallest, data_dir=Path(folder), cache_dir=Path(folder)).classnames
    return counts[order].set_axis(list(names), axis=1)
