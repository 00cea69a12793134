"""A recorded run's model, read back with its data, and evaluated again: are its numbers still the recorded ones?

Also on another data set, which may have other pictures of the same classes, or other classes. A run is found by an id:
fedbench's own (16 hex digits), MLflow's (32), or the beginning of either.
"""

from __future__ import annotations

import difflib
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

import pandas as pd

from fedbench.core.arithmetic import float32_products
from fedbench.core.errors import FedbenchError
from fedbench.core.method.answers import require_predictions
from fedbench.core.method.tasks import ModelSetup
from fedbench.core.records import FAULT_COUNTS
from fedbench.core.spec import RunSpec
from fedbench.kinds.kinds import MetricTask
from fedbench.models.inputs import FeatureInputs, UncachedFeatures, encode
from fedbench.plugins.provenance import Codes, versions
from fedbench.rounds.loop import evaluate, evaluation_task
from fedbench.rounds.measures import measured
from fedbench.rounds.run import Run as PreparedRun
from fedbench.rounds.state import RunState
from fedbench.runs.prepare import Settings, backbone_for, dataset_for, prepare, renamed_model
from fedbench.tracking.artifacts import read_predictions, read_spec, read_state
from fedbench.tracking.databases import shown
from fedbench.tracking.recording import metric_name
from fedbench.tracking.schema import FINAL, INVOCATION, KIND, RUN_ID, local_artifacts
from fedbench.tracking.store import filed, open_store, runs_of
from fedbench.tracking.tags import RunTags

# isort: split
# after fedbench.tracking.store, which turns MLflow's telemetry off before MLflow is first imported
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.exceptions import MlflowException

SHORTEST = 4
"""Hex digits of an id that must be given at least."""
_LISTED = 8


def reading_client(uri: str) -> MlflowClient:
    """A client of the store at ``uri``; FedbenchError where there is none."""
    client = open_store(uri, create=False)
    if client is None:
        raise FedbenchError(f"there is no store at {shown(uri)}; name yours with --store.")
    return client


def find_run(client: MlflowClient, given: str) -> Run:
    """The run that ``given`` means. Of several recordings of one run, the newest finished one, else the newest.

    Raises FedbenchError for an id that is none, that no run has (naming the nearest), or that several runs share.
    """
    wanted = given.strip().lower()
    if not re.fullmatch(f"[0-9a-f]{{{SHORTEST},32}}", wanted):
        raise FedbenchError(
            f"{given!r} is no run id: give {SHORTEST} to 32 hexadecimal digits, from the start of the id that fedbench "
            "or MLflow gave the run."
        )
    hits: dict[str, Run] = {}
    for condition in (f"attributes.run_id LIKE '{wanted}%'", f"tags.`{RUN_ID}` LIKE '{wanted}%'"):
        hits |= {run.info.run_id: run for _, run in filed(client, None, condition)}
    parents = [run for run in hits.values() if run.data.tags.get(KIND) == INVOCATION]
    runs = [run for run in hits.values() if run not in parents]
    if not runs and parents:
        below = f"tags.`mlflow.parentRunId` = '{parents[0].info.run_id}'"
        children = [run for _, run in runs_of(client, None, below)]
        raise FedbenchError(
            f"{given} is a whole command, {parents[0].info.run_name!r}; give one of its runs: {_listed(children)}."
        )
    if not runs:
        raise _unknown(client, wanted)
    if len({run.data.tags.get(RUN_ID) for run in runs}) > 1:
        raise FedbenchError(f"{given} is the beginning of several runs' ids; give more digits: {_listed(runs)}.")
    newest: Run = max(runs, key=lambda run: (run.info.status == "FINISHED", run.info.start_time))
    return newest


def described(run: Run) -> str:
    return f"{run.data.tags.get(RUN_ID, run.info.run_id)} ({run.info.run_name})"


def _listed(runs: Sequence[Run]) -> str:
    shown = [f"{described(run)}, MLflow {run.info.run_id}" for run in runs[:_LISTED]]
    return "; ".join(shown) + (f"; and {len(runs) - _LISTED} more" if len(runs) > _LISTED else "")


def _unknown(client: MlflowClient, wanted: str) -> FedbenchError:
    known: dict[str, Run] = {}
    for _, run in runs_of(client, None):
        known |= {run.data.tags.get(RUN_ID, ""): run, run.info.run_id: run}
    if not known:
        return FedbenchError(
            "the store has no runs; fill it with `fedbench run --suite longtail`, or name another store."
        )
    beginnings = {name[: len(wanted)]: run for name, run in known.items()}
    close = difflib.get_close_matches(wanted, beginnings, n=3, cutoff=0.6)
    nearest = "".join(f"; did you mean {' or '.join(described(beginnings[name]) for name in close)}?" if close else ".")
    return FedbenchError(
        f"no run's id begins with {wanted!r}{nearest} `fedbench ui` shows every run with its id; if the run is in "
        "another store, name that with --store."
    )


@dataclass(frozen=True, eq=False)
class RecordedModel:
    """A finished run, assembled anew, with its final state."""

    stored: Run
    """As MLflow has it."""
    run: PreparedRun
    state: RunState
    predictions: tuple[int, ...]
    """As recorded."""


def recorded_model(uri: str, given: str, settings: Settings) -> RecordedModel:
    """The model of the run that the id ``given`` means, with data and weights as they are here and now.

    Raises FedbenchError for an unknown run, one without a model, and data or weights that are not there.
    """
    client = reading_client(uri)
    stored = find_run(client, given)
    if stored.info.status != "FINISHED":
        raise FedbenchError(f"run {described(stored)} is {stored.info.status}; only a finished run has a model.")
    run_id = RunTags(stored.data.tags).run_id
    with tempfile.TemporaryDirectory() as temporary:
        folder = local_artifacts(uri, stored) or _download(client, stored, Path(temporary))
        run = prepare(read_spec(folder, run_id), settings)
        state = read_state(folder, run_id, run.spec.device)
        return RecordedModel(stored, run, state, read_predictions(folder, run_id))


def _download(client: MlflowClient, stored: Run, folder: Path) -> Path:
    try:
        return Path(client.download_artifacts(stored.info.run_id, "", str(folder)))
    except (MlflowException, OSError) as error:
        reason = " ".join(str(error).split())[:400]
        raise FedbenchError(f"the artifacts of run {described(stored)} cannot be read: {reason}") from error


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


@dataclass(frozen=True)
class Elsewhere:
    """What a model answers for the test split of another data set."""

    title: str
    """Title of the run."""
    metrics: dict[str, float]
    samples: int
    classes: int
    is_renamed: bool
    """Whether the classes are others than those that the run was trained on."""


def evaluate_elsewhere(uri: str, given: str, dataset: str, settings: Settings) -> Elsewhere:
    """The model of the run that the id ``given`` means, on the test split of ``dataset``.

    Where the class names are the run's own, in their order, it predicts as ever. Where they are others, it has to be a
    model that names its classes. Raises FedbenchError for one that can't, and as `recorded_model` does.
    """
    recorded = recorded_model(uri, given, settings)
    run, state = recorded.run, recorded.state
    spec = _on(run.spec, dataset)
    data = dataset_for(spec, settings)
    backbone = backbone_for(spec, data, settings)
    there = prepare(spec, settings, dataset=data, backbone=backbone, encode_all=False)
    test = there.test
    if isinstance(test, UncachedFeatures):
        rows = encode(test.images, test.encoder, settings.cache_dir, device=test.device)
        test = FeatureInputs(rows.to(test.device))
    is_renamed = there.scored.classnames != run.scored.classnames
    if is_renamed:
        setup = ModelSetup(backbone, run.scored.classnames, run.spec, settings.data_dir)
        why = renamed_model(setup, run.model, there.scored.classnames, settings.plugin_files)
        if isinstance(why, str):
            raise FedbenchError(
                f"{run.spec.title} can't predict the classes of {dataset!r}, which are not those it was trained on: "
                f"{why}; choose a run whose model names its classes (promptfl, clip-zs), or data with the same names."
            )
    task = evaluation_task(run, state, test)
    task = replace(task, model=there.model, num_classes=there.scored.num_classes, is_unseen=is_renamed)
    with float32_products(spec.training.precision):
        answer = there.assembly.hooks.evaluate(task=task)
    answer = require_predictions(task, answer, there.assembly.answers_first("evaluate"))
    if answer.labels is None:
        raise FedbenchError(f"{run.spec.title} has no global model that could predict the classes of {dataset!r}.")
    metrics = measured(there.metrics, MetricTask(answer, there.scored), is_last=False)
    return Elsewhere(run.spec.title, metrics, len(there.test), there.scored.num_classes, is_renamed)


def _on(spec: RunSpec, dataset: str) -> RunSpec:
    """``spec`` on another data set, whose training samples are left as they are."""
    plain = {
        "partition": "iid",
        "clients": 1,
        "imbalance": "none",
        "equal_sizes": False,
        "holdout_domain": None,
        "holdout_clients": 0.0,
        "unseen_classes": 0.0,
        "validation": 0.0,
        "shots": 0,
        # a method that needs the server's has some; clients have these as well, so that no class has too few
        "server_samples": min(spec.scenario.server_samples, 1),
        "server_source": "shared",
    }
    scenario = spec.scenario.model_copy(update=plain)
    return spec.model_copy(update={"dataset": dataset, "scenario": scenario})
