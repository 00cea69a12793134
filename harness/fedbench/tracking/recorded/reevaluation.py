"""A recorded run's model, read back and evaluated again: are its numbers still the recorded ones?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest

import pandas as pd

from fedbench.core.records import FAULT_COUNTS
from fedbench.plugins.provenance import versions
from fedbench.plugins.run_code import Codes
from fedbench.rounds.loop import evaluate
from fedbench.rounds.run import Run as PreparedRun
from fedbench.runs.prepare import Settings
from fedbench.tracking.recorded.models import recorded_model
from fedbench.tracking.schema import FINAL
from fedbench.tracking.tags import RunTags
from fedbench.tracking.writing.recording import metric_name

# isort: split
from mlflow.entities import Run

_OF_CURVES = ("last10_accuracy", "oracle_accuracy", "oracle_round")
_COSTS = ("train_loss", "bytes_up", "bytes_down", "train_seconds", "seconds")
_HISTORY = frozenset({*_OF_CURVES, *_COSTS, *FAULT_COUNTS})
_HISTORY_PREFIXES = ("selected_", "finetuned_")
"""Final metrics that come of the rounds, or of models that are not kept: the final model does not give them."""
_CALLED = {
    "run_id": "run id (of the same description, in another version of fedbench)",
    "code_hash": "code",
    "data_hash": "data",
    "weights_hash": "pretrained weights",
}


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What evaluating a run's model again gave."""

    run: Run
    """As MLflow has it."""
    metrics: pd.DataFrame
    """A line a metric: metric, recorded, now, difference (now - recorded); NaN where one side lacks it."""
    left_out: tuple[str, ...]
    """Recorded metrics that the final model alone does not give."""
    predictions: int
    """Test samples."""
    changed_predictions: int
    """Test samples for which another class is predicted now."""
    causes: tuple[str, ...]
    """What is known to differ from when the run was recorded, a phrase each."""

    @property
    def new_metrics(self) -> list[str]:
        """Metrics that the recording has not, since a later version of fedbench added them: nothing to compare with."""
        return self.metrics.loc[self.metrics["recorded"].isna(), "metric"].tolist()

    @property
    def changed_metrics(self) -> list[str]:
        """Recorded metrics that are another number now, or that fedbench no longer gives."""
        frame = self.metrics
        return frame.loc[frame["recorded"].notna() & (frame["recorded"] != frame["now"]), "metric"].tolist()

    @property
    def is_equal(self) -> bool:
        """Whether every recorded metric and every prediction is what it was, to the last bit."""
        return not self.changed_metrics and not self.changed_predictions


def evaluate_again(uri: str, given: str, settings: Settings) -> Evaluation:
    """Evaluate the model of the run that the id ``given`` means, with data and weights as they are here and now.

    Raises FedbenchError for an unknown run, one without a model, and data or weights that are not there.
    """
    recorded_run = recorded_model(uri, given, settings)
    stored, run = recorded_run.stored, recorded_run.run
    metrics, predictions = evaluate(run, recorded_run.state)
    recorded = _final_metrics(stored)
    of_the_model = {name: value for name, value in recorded.items() if not is_history(name)}
    after = () if predictions.labels is None else tuple(predictions.labels.tolist())
    return Evaluation(
        run=stored,
        metrics=beside(of_the_model, {metric_name(name): value for name, value in metrics.items()}),
        left_out=tuple(sorted(recorded.keys() - of_the_model.keys())),
        predictions=len(after),
        changed_predictions=sum(old != new for old, new in zip_longest(recorded_run.predictions, after)),
        causes=_causes(RunTags(stored.data.tags), run, settings),
    )


def is_history(name: str) -> bool:
    """Whether the final metric ``name`` comes of the rounds rather than of the final model."""
    return name in _HISTORY or name.startswith(_HISTORY_PREFIXES)


def beside(recorded: Mapping[str, float], now: Mapping[str, float]) -> pd.DataFrame:
    """Two sets of metrics by name, with columns metric, recorded, now, difference; now's order, then the rest."""
    names = [*now, *(name for name in recorded if name not in now)]
    before, after = (pd.Series([side.get(name) for name in names], dtype=float) for side in (recorded, now))
    frame = pd.DataFrame({"metric": names, "recorded": before, "now": after})
    return frame.assign(difference=after - before)


def _final_metrics(run: Run) -> dict[str, float]:
    """The final metrics by name, without their prefix; megabytes are left out, which are bytes once more."""
    finals = {key.removeprefix(FINAL): value for key, value in run.data.metrics.items() if key.startswith(FINAL)}
    return {name: value for name, value in finals.items() if name != "megabytes"}


def _causes(tags: RunTags, run: PreparedRun, settings: Settings) -> tuple[str, ...]:
    """What of the recording's surroundings is not as it was; an empty tuple where all that is known agrees."""
    now = {
        "run_id": run.spec.run_id,
        "code_hash": Codes(settings.plugin_files).of_run(run.spec).hash,
        "data_hash": run.info.data_hash,
        "weights_hash": run.info.weights_hash,
        **{f"version.{name}": version for name, version in versions().items()},
    }
    recorded = {name: tags.text(name) for name in now}
    return tuple(
        f"{_CALLED.get(name, name.removeprefix('version.'))} {_short(recorded[name])} then, {_short(now[name])} now"
        for name in now
        if recorded[name] != now[name]
    )


def _short(value: str) -> str:
    return value[:16] or "none"
