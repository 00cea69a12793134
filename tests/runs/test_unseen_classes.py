"""Unseen classes in a run: the trained tensors under new names, for models that have them, and nothing leaks before."""

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedbench.core.errors import FedbenchError
from fedbench.core.federation import Dataset, Split, TensorImages, Unseen
from fedbench.core.method.tasks import ModelSetup
from fedbench.core.spec import RunSpec
from fedbench.kinds.registry import find_method
from fedbench.plugins.assembly import assemble
from fedbench.rounds.loop import evaluate, rounds
from fedbench.rounds.metrics import unseen_metrics
from fedbench.rounds.run import Run
from fedbench.runs.job import run_spec
from fedbench.runs.prepare import Renamed, Settings, prepare, renamed_model
from fedbench.testing import digest, final_state, tiny_backbone, tiny_dataset, tiny_spec
from fedbench.tracking.evaluation import evaluate_again
from fedbench.tracking.listener import Tracking
from fedbench.tracking.schema import store_uri
from fedbench.tuning.objectives import Objective, UnknownObjective
from fedbench_boards.leaderboard.formats import to_csv, to_markdown
from fedbench_boards.leaderboard.page.data import page_of
from fedbench_boards.leaderboard.results import load_curves, load_results
from tests.leaderboard.frames import board_of, leaderboard, read_of

BASE, NEW = ("bird", "boat", "car", "tree"), ("fish", "house")
DATA = tiny_dataset(6)


def base_to_new(method: str, share: float = 0.34, **training: object) -> RunSpec:
    """``method`` on the tiny data, six classes of which ``share`` is unseen; rates that move prompts in two rounds."""
    spec = tiny_spec(method, backbone="clip:embedded", **{"rounds": 2, "lr": 0.2, **training})
    return spec.model_copy(update={"scenario": spec.scenario.model_copy(update={"unseen_classes": share})})


def run_of(spec: RunSpec, folder: Path, dataset: Dataset = DATA, plugin: Path | None = None) -> Run:
    settings = Settings(folder, folder / "cache", () if plugin is None else (plugin,))
    return prepare(spec, settings, dataset=dataset, backbone=tiny_backbone("clip:embedded"))


def unseen_of(dataset: Dataset, first: int) -> tuple[Tensor, Tensor]:
    """Raw image features of the test samples of the classes from ``first`` on, and their labels among these."""
    assert dataset.test is not None
    chosen = torch.nonzero(dataset.test.labels >= first).flatten()
    with torch.no_grad():
        features = tiny_backbone("clip:embedded").image_encoder()(dataset.test.images.read(chosen))
    return features, dataset.test.labels[chosen] - first


def percent(predicted: Tensor, labels: Tensor) -> float:
    return 100 * sum(p == y for p, y in zip(predicted.tolist(), labels.tolist(), strict=True)) / len(labels)


@pytest.mark.parametrize(("share", "names"), [(0.34, NEW), (0.5, ("tree", *NEW))])
def test_the_trained_prompt_before_new_names_is_what_is_scored(
    tmp_path: Path, share: float, names: tuple[str, ...]
) -> None:
    spec = base_to_new("promptfl", share)
    run = run_of(spec, tmp_path)
    state = final_state(run)
    metrics, predictions = evaluate(run, state)
    setup = ModelSetup(tiny_backbone("clip:embedded"), names, spec, tmp_path)
    model = assemble("promptfl", spec.params).hooks.build_model(setup=setup)
    features, labels = unseen_of(DATA, 6 - len(names))
    trained = percent(model.forward(state.weights, features, False).logits.argmax(1), labels)
    untrained = percent(model.forward(model.weights, features, False).logits.argmax(1), labels)
    assert metrics["new_accuracy"] == pytest.approx(trained)
    # the comparison can fail: training changes the answers
    assert trained != untrained
    assert evaluate(run, run.initial_state())[0]["new_accuracy"] == pytest.approx(untrained)
    assert predictions.labels is not None and len(predictions.labels) == int((DATA.test.labels < 6 - len(names)).sum())
    a, b = metrics["global_accuracy"], trained
    assert metrics["harmonic_accuracy"] == pytest.approx(1 / (0.5 / a + 0.5 / b))


def test_a_method_without_weights_is_zero_shot_among_the_new_names(tmp_path: Path) -> None:
    spec = base_to_new("clip-zs")
    run = run_of(spec, tmp_path)
    (_, record, _), *further = rounds(run, run.initial_state())
    assert not further
    features, labels = unseen_of(DATA, 4)
    clip = tiny_backbone("clip:embedded")
    logits = normalize(features, dim=1) @ clip.text_features(NEW, spec.templates).T
    assert record.metrics["new_accuracy"] == pytest.approx(percent(logits.argmax(1), labels))


@pytest.mark.parametrize(
    ("method", "params", "name", "share"),
    [
        ("fedavg", {}, "head.weight", 0.34),
        ("fedavg", {}, "head.weight", 0.5),
        ("promptfl", {"per_class": True}, "prompt.context", 0.34),
        ("promptfl", {"per_class": True}, "prompt.context", 0.5),
        ("capt", {}, "prompt.class", 0.5),
        ("clip-linear-centralized", {}, "head.weight", 0.5),
    ],
)
def test_weights_for_each_class_name_no_others_even_as_many(
    tmp_path: Path, method: str, params: dict[str, object], name: str, share: float
) -> None:
    spec = base_to_new(method, share, rounds=1)
    spec = spec.model_copy(update={"params": {method: {**spec.params.get(method, {}), **params}}})
    run = run_of(spec, tmp_path)
    assert run.unseen is None and run.info.not_on_unseen == f"{name} depends on the number of classes"
    metrics = evaluate(run, run.initial_state())[0]
    assert "global_accuracy" in metrics and not {"new_accuracy", "harmonic_accuracy"} & set(metrics)


@pytest.mark.parametrize("share", [0.34, 0.5])
def test_what_clients_have_beside_the_model_does_not_keep_it_from_new_names(tmp_path: Path, share: float) -> None:
    spec = base_to_new("fedrod+promptfl", share)
    run = run_of(spec, tmp_path)
    assert run.info.not_on_unseen == "" and run.unseen is not None
    state = final_state(run)
    features, labels = unseen_of(DATA, 4 if share < 0.5 else 3)
    logits = run.unseen.model.forward(state.weights, features, False).logits
    assert evaluate(run, state)[0]["new_accuracy"] == pytest.approx(percent(logits.argmax(1), labels))


def test_names_that_do_not_fit_beside_the_trained_context_are_a_reason_not_an_error() -> None:
    spec, backbone = tiny_spec("promptfl", backbone="clip:embedded"), tiny_backbone("clip:embedded")
    setup = ModelSetup(backbone, tiny_dataset().classnames, spec, Path("."))
    model = assemble(spec.method, spec.params).hooks.build_model(setup=setup)
    assert isinstance(renamed_model(setup, model, ("house",), ()), Renamed)
    reason = renamed_model(setup, model, ("house " * 16,), ())
    assert isinstance(reason, str) and "context of 16 tokens does not fit" in reason


def test_the_whole_of_clip_trained_with_prompts_as_classifier_can_name_them(tmp_path: Path) -> None:
    run = run_of(base_to_new("fedavg", 0.5, rounds=1).model_copy(update={"tune": "full"}), tmp_path)
    assert run.info.not_on_unseen == "" and "new_accuracy" in evaluate(run, run.initial_state())[0]


def test_the_metrics_by_hand() -> None:
    unseen = Unseen(Split(TensorImages(torch.zeros(5, 3, 1, 1)), torch.tensor([0, 0, 1, 1, 1])), ("a", "b"))
    right3 = torch.tensor([0, 1, 1, 1, 0])
    assert unseen_metrics(right3, unseen, 30.0) == {"new_accuracy": 60.0, "harmonic_accuracy": pytest.approx(40.0)}
    assert unseen_metrics(right3, unseen, None) == {"new_accuracy": 60.0}
    wrong = 1 - unseen.test.labels
    assert unseen_metrics(wrong, unseen, 0.0) == {"new_accuracy": 0.0, "harmonic_accuracy": 0.0}
    assert unseen_metrics(wrong, unseen, 80.0)["harmonic_accuracy"] == 0.0


PLUGIN = '''
"""A prompt that keeps the names on itself, and looks at what it is handed."""

from dataclasses import dataclass

import torch

from fedbench.toolkit.fedavg import cross_entropy, largest_logit
from fedbench.core.method.hooks import hookimpl
from fedbench.models.heads import clip_of, text_classifier
from fedbench.models.prompts.context import prompt_tower
from fedbench.core.types import Model, Predictions

SEEN = {{"built": [], "trained": set(), "samples": [], "evaluated": []}}


@dataclass(frozen=True, kw_only=True)
class P:
    """None."""


class {name}:
    """Looks."""

    name, citation, Params, recipe = "{name}", "nobody", P, {{}}

    def __init__(self, params):
        self.params = params

    @hookimpl
    def build_model(self, setup):
        """As PromptFL."""
        self.names = setup.classnames
        SEEN["built"].append(self.names)
        clip = clip_of(setup)
        tower = prompt_tower(clip, setup.classnames, 2, "end")
        forward = text_classifier(lambda tensors: tower.encode(tensors["v"]), clip.logit_scale)
        return Model(weights={{"v": torch.zeros(2, tower_width(clip))}}, forward=forward, encoder=clip.image_encoder())

    @hookimpl
    def local_loss(self, step):
        """Look."""
        SEEN["trained"].add((self.names, step.task.class_counts.numel()))
        SEEN["samples"].append(step.batch.inputs)
        assert int(step.batch.labels.max()) < len(self.names)
        return cross_entropy(step)

    @hookimpl
    def evaluate(self, task):
        """As asked."""
        SEEN["evaluated"].append((self.names, task.num_classes, task.is_unseen, task.clients))
        answer = largest_logit(task)
        return {answer} if task.is_unseen else answer


def tower_width(clip):
    return clip.module.token_embedding.weight.shape[1]
'''


def looking(folder: Path, name: str, answer: str = "answer") -> tuple[Run, dict[str, Any]]:
    """A run of the plugin, on one client after another so that its loss sees tensors, and what it has seen."""
    file = folder / f"{name}.py"
    file.write_text(PLUGIN.format(name=name, answer=answer))
    spec = base_to_new("promptfl", 0.5).model_copy(update={"method": name, "params": {}})
    settings = Settings(folder, folder / "cache", (file,), executor="sequential")
    run = prepare(spec, settings, dataset=DATA, backbone=tiny_backbone("clip:embedded"))
    return run, sys.modules[find_method(name, (file,)).__module__].SEEN


def test_training_meets_neither_new_names_nor_new_samples(tmp_path: Path) -> None:
    run, seen = looking(tmp_path, "looks")
    final_state(run)
    base, new = BASE[:3], ("tree", *NEW)
    assert seen["built"][0] == base and new in seen["built"]
    # the object that trains keeps the names it was built with, and has counts of these classes
    assert seen["trained"] == {(base, 3)}
    trained = torch.cat(seen["samples"])
    assert DATA.test is not None
    for split in (DATA.train, DATA.test):
        chosen = torch.nonzero(split.labels >= 3).flatten()
        with torch.no_grad():
            left_out = tiny_backbone("clip:embedded").image_encoder()(split.images.read(chosen))
        # the closest that any trained sample comes to one of the unseen classes is no rounding of it
        assert float(torch.cdist(trained, left_out).min()) > 1e-3
    # round 0 and every round; who answers for the new classes was built with their names, and no client is asked
    asked = seen["evaluated"]
    assert [(names, count) for names, count, unseen, _ in asked if unseen] == [(new, 3)] * 3
    assert [(names, count) for names, count, unseen, _ in asked if not unseen] == [(base, 3)] * 3
    assert all(not clients for _, _, unseen, clients in asked if unseen)


@pytest.mark.parametrize("method", ["promptfl", "creff"])
def test_the_trained_tensors_are_those_of_the_base_classes_alone(tmp_path: Path, method: str) -> None:
    def part(split: Split | None) -> Split:
        assert split is not None
        kept = torch.nonzero(split.labels < 4).flatten()
        assert split.domains is not None
        return Split(TensorImages(split.images.read(kept)), split.labels[kept], split.domains[kept])

    alone = replace(DATA, classnames=BASE, train=part(DATA.train), test=part(DATA.test))
    spec = base_to_new(method)
    plain = spec.model_copy(update={"scenario": spec.scenario.model_copy(update={"unseen_classes": 0.0})})
    split, whole = run_of(spec, tmp_path), run_of(plain, tmp_path, alone)
    ends = final_state(split), final_state(whole)
    assert digest(ends[0]) == digest(ends[1])
    metrics = [evaluate(run, state)[0] for run, state in zip((split, whole), ends, strict=True)]
    assert {
        k: v for k, v in metrics[0].items() if k not in ("new_accuracy", "harmonic_accuracy", "new_auroc")
    } == metrics[1]


@pytest.mark.parametrize(
    "answer", ["torch.full_like(answer.labels, 3)", "torch.full_like(answer.labels, -1)", "answer.labels[1:]"]
)
def test_answers_that_are_none_of_the_unseen_classes_are_refused(tmp_path: Path, answer: str) -> None:
    run, _ = looking(tmp_path, "strays", f"Predictions({answer})")
    with pytest.raises(FedbenchError, match=r"strays answers the hook evaluate for 3 unseen.*Predictions\(None"):
        evaluate(run, run.initial_state())


def test_a_method_may_decline(tmp_path: Path) -> None:
    run, _ = looking(tmp_path, "declines", "Predictions(None)")
    metrics = evaluate(run, run.initial_state())[0]
    assert "global_accuracy" in metrics and not {"new_accuracy", "harmonic_accuracy"} & set(metrics)


def test_tuning_scores_no_unseen_sample_and_says_so_of_the_objective(tmp_path: Path) -> None:
    spec = base_to_new("promptfl")
    scenario = spec.scenario.model_copy(update={"validation": 0.2})
    run = run_of(spec.model_copy(update={"scenario": scenario}), tmp_path)
    assert run.unseen is None and run.info.not_on_unseen == "" and run.scored.unseen is None
    metrics = evaluate(run, run.initial_state())[0]
    assert set(run.scored.classnames) == set(BASE) and "new_accuracy" not in metrics
    for objective in ("new", "harmonic_accuracy"):
        with pytest.raises(UnknownObjective, match=f"{objective}.*validation data"):
            Objective(objective).check(metrics)


Stored = tuple[str, Settings, dict[str, RunSpec]]
"""Where runs are recorded, how they were made, and what they are by method."""


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stored]:
    """Two rows of one table in a store, one of which cannot name the unseen classes."""
    folder = tmp_path_factory.mktemp("stored")
    uri, settings = store_uri(str(folder / "store")), Settings(folder, folder / "cache")
    specs = {method: base_to_new(method, 0.5) for method in ("promptfl", "fedavg")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedbench.runs.prepare.load_dataset", lambda *_, **__: DATA)
        tracking = Tracking(uri, "tests")
        for spec in specs.values():
            run_spec(spec, settings, [tracking])
        yield uri, settings, specs


def test_a_recorded_model_gives_its_numbers_back(stored: Stored) -> None:
    uri, settings, specs = stored
    found = evaluate_again(uri, specs["promptfl"].run_id, settings)
    again = found.metrics.set_index("metric")
    assert found.is_equal and {"new_accuracy", "harmonic_accuracy"} <= set(again.index)
    results = load_results(uri, "tests").set_index("method")
    assert again.loc["new_accuracy", "now"] == results.loc["promptfl", "final/new_accuracy"]


def test_tables_have_the_columns_and_say_who_lacks_them_and_why(stored: Stored) -> None:
    results = load_results(stored[0], "tests")
    board = leaderboard(results, ["new", "harmonic"])
    assert "unseen_classes=0.5" in board["caption"].iloc[0]
    # shown without being asked for, too
    assert all("new_accuracy" in shown and "harmonic_accuracy" in shown for shown in leaderboard(results)["shown"])
    text = to_markdown(board_of(board))
    assert re.search(r"\| accuracy +\| new +\| harmonic +\|", text)
    said = "not scored on unseen classes: fedavg, since head.weight depends on the number of classes"
    assert said in text
    head = to_csv(board_of(board)).splitlines()[0].split(",")
    assert {"new_accuracy_mean", "harmonic_accuracy_std", "not_on_unseen"} <= set(head)
    page = page_of(read_of(results, board_of(board), load_curves(stored[0], results)), {}, "")
    assert f"N{said[1:]}." in page.sections[0].notes
