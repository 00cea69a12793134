"""A recorded run's model on the test split of another data set: other pictures of its classes, or other classes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedbench.core.errors import FedbenchError
from fedbench.core.method.answers import require_predictions
from fedbench.core.method.tasks import ModelSetup
from fedbench.core.spec import RunSpec
from fedbench.kinds.kinds import MetricTask
from fedbench.models.feature_cache import encode
from fedbench.models.inputs import FeatureInputs, UncachedFeatures
from fedbench.rounds.further import measured
from fedbench.rounds.loop import evaluation_task
from fedbench.runs.prepare import Settings, backbone_for, dataset_for, prepare
from fedbench.runs.unseen import renamed_model
from fedbench.tracking.recorded.models import recorded_model


@dataclass(frozen=True)
class Elsewhere:
    """What a model answers for the test split of another data set."""

    title: str
    """Of the run."""
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
