"""Two recorded runs side by side: what differs in description and provenance, final metrics, and curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from fedbench.tracking.recorded.lookup import find_run, reading_client
from fedbench.tracking.schema import FINAL
from fedbench.tracking.tags import DEFAULTS, RunTags

# isort: split
from mlflow import MlflowClient
from mlflow.entities import Run

CURVE = "global_accuracy"
"""The metric whose history is compared."""
_FIRST = (
    "global_accuracy",
    "balanced_accuracy",
    "head_accuracy",
    "mid_accuracy",
    "tail_accuracy",
    "many_accuracy",
    "medium_accuracy",
    "few_accuracy",
    "domain_mean_accuracy",
    "mean_client_accuracy",
    "worst_client_accuracy",
)
"""Final metrics that come first, in this order; the others follow by name."""
_PROVENANCE = ("commit", "data_hash", "weights_hash")
_OF_METHOD = "method_code."
_NAMES = ("row", "setting", "scale", "suite")
"""What a suite calls a run: no part of its description, but shown with it."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """Two runs as MLflow has them, and what differs."""

    left: Run
    right: Run
    spec: pd.DataFrame
    """key, left, right: settings that differ, as text; empty where one run lacks the setting."""
    equal_settings: int
    provenance: pd.DataFrame
    """The same for commit, code, data, weights and versions."""
    equal_provenance: int
    metrics: pd.DataFrame
    """metric, left, right, difference (right - left) of all final metrics; NaN where a run lacks one."""
    curves: pd.DataFrame
    """round, left, right: global accuracy in percent at every round that both evaluated."""


def compare(uri: str, left: str, right: str) -> Comparison:
    """The two runs that the ids mean; FedbenchError for ids that no run or several have."""
    client = reading_client(uri)
    runs = find_run(client, left), find_run(client, right)
    spec, equal_settings = differences(*(settings_of(run) for run in runs))
    provenance, equal_provenance = differences(*_of_common_methods(*(provenance_of(run) for run in runs)))
    return Comparison(
        *runs,
        spec=spec,
        equal_settings=equal_settings,
        provenance=provenance,
        equal_provenance=equal_provenance,
        metrics=metrics_beside(*(final_metrics(run) for run in runs)),
        curves=curves_beside(*(curve(client, run) for run in runs)),
    )


def settings_of(run: Run) -> dict[str, str]:
    """The run's whole description by dotted key, fields younger than it by default, and what its suite calls it."""
    tags = RunTags(run.data.tags)
    return {**{name: tags.text(name) for name in _NAMES}, **DEFAULTS, **run.data.params}


def provenance_of(run: Run) -> dict[str, str]:
    """Commit, hashes and versions behind the run, the code of the harness and of each method apart."""
    tags = RunTags(run.data.tags)
    versions = {f"version.{name}": version for name, version in tags.versions.items()}
    methods = {f"{_OF_METHOD}{name}": code for name, code in tags.methods.items()}
    return {**{key: tags.text(key) for key in _PROVENANCE}, **versions, "harness_hash": tags.harness_hash, **methods}


def _of_common_methods(left: Mapping[str, str], right: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Without the code of methods that one run alone has: that the methods differ is shown by the settings."""
    lone = {key for key in left.keys() ^ right.keys() if key.startswith(_OF_METHOD)}
    one, other = ({key: value for key, value in side.items() if key not in lone} for side in (left, right))
    return one, other


def differences(left: Mapping[str, str], right: Mapping[str, str]) -> tuple[pd.DataFrame, int]:
    """The keys whose values differ (key, left, right), left's order first, and how many keys are equal."""
    keys = list(dict.fromkeys([*left, *right]))
    unequal = [key for key in keys if left.get(key) != right.get(key)]
    lines = [(key, left.get(key, ""), right.get(key, "")) for key in unequal]
    return pd.DataFrame(lines, columns=["key", "left", "right"]), len(keys) - len(unequal)


def final_metrics(run: Run) -> dict[str, float]:
    """The final metrics by name, without their prefix; none for a run that did not finish.

    Megabytes are left out, which are bytes once more.
    """
    found = {key.removeprefix(FINAL): value for key, value in run.data.metrics.items() if key.startswith(FINAL)}
    return {name: value for name, value in found.items() if name != "megabytes"}


def metrics_beside(left: Mapping[str, float], right: Mapping[str, float]) -> pd.DataFrame:
    """metric, left, right, difference (right - left): overall and group accuracies, others, costs, classes last."""

    def place(name: str) -> tuple[bool, bool, int, str]:
        rank = _FIRST.index(name) if name in _FIRST else len(_FIRST)
        return name.startswith("class_accuracy/"), "accuracy" not in name, rank, name

    return in_pairs(sorted({*left, *right}, key=place), left, right, ("left", "right"))


def in_pairs(
    names: Sequence[str], one: Mapping[str, float], other: Mapping[str, float], sides: tuple[str, str]
) -> pd.DataFrame:
    """A line a name: metric, the two ``sides``, difference (other - one); NaN where a side lacks the metric."""
    values = [pd.Series([of.get(name) for name in names], dtype=float) for of in (one, other)]
    frame = pd.DataFrame({"metric": list(names), sides[0]: values[0], sides[1]: values[1]})
    return frame.assign(difference=values[1] - values[0])


def curve(client: MlflowClient, run: Run) -> dict[int, float]:
    """Global accuracy in percent by evaluated round."""
    return {point.step: point.value for point in client.get_metric_history(run.info.run_id, CURVE)}


def curves_beside(left: Mapping[int, float], right: Mapping[int, float]) -> pd.DataFrame:
    """round, left, right at the rounds that both curves have."""
    rounds = sorted(left.keys() & right.keys())
    return pd.DataFrame({"round": rounds, "left": [left[r] for r in rounds], "right": [right[r] for r in rounds]})
