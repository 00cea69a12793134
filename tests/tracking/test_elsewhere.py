"""A recorded model on another data set: the same classes, others that it names, others that it can't."""

import pytest
import torch

from fedbench.core.errors import FedbenchError
from fedbench.models import inputs
from fedbench.runs.job import run_spec
from fedbench.runs.prepare import Settings
from fedbench.testing import tiny_dataset, tiny_spec
from fedbench.toolkit import fedavg
from fedbench.tracking.evaluation import evaluate_elsewhere
from fedbench.tracking.listener import Tracking
from fedbench.tracking.recording import Invocation
from fedbench.tracking.schema import store_uri
from tests.datasets.pictures import picture
from tests.runs.test_precision import IEEE, flags

METHODS = ("fedavg", "promptfl", "fedpgp+scaffold")
OF_SERVER = "promptfl+feddf"
"""Needs samples at the server: as many a class as the other data have of it."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("elsewhere")
    known = tiny_dataset().classnames
    for data, names in (("same", known), ("few", known), ("other", ("house", "flower", "fish"))):
        for position, name in enumerate(names):
            for split, count in (("train", 5 if data == "same" else 2), ("test", 3)):
                place = folder / data / "photo" / split / name
                place.mkdir(parents=True)
                for number in range(count):
                    picture(10 * position + number + (5 if data == "few" else 0), (32, 32)).save(
                        place / f"{number}.png"
                    )
    settings = Settings(folder, folder / "cache")
    uri = store_uri(str(folder / "store"))
    specs = {
        method: tiny_spec(method, rounds=1).model_copy(update={"dataset": f"imagefolder:{folder / 'same'}"})
        for method in (*METHODS, OF_SERVER)
    }
    specs = {
        method: spec.model_copy(
            update={
                "scenario": spec.scenario.model_copy(
                    update={"clients": 1, "server_samples": 4 if method == OF_SERVER else 0}
                )
            }
        )
        for method, spec in specs.items()
    }
    tracking = Tracking(uri, "tests", Invocation(command="fedbench run", runs=len(specs)))
    for spec in specs.values():
        run_spec(spec, settings, [tracking])
    return uri, settings, {method: spec.run_id for method, spec in specs.items()}, folder


def on(recorded, method, data):
    uri, settings, ids, folder = recorded
    return evaluate_elsewhere(uri, ids[method], f"imagefolder:{folder / data}", settings)


@pytest.mark.parametrize("method", METHODS)
def test_on_the_same_classes_every_model_predicts_as_ever(recorded, method):
    from fedbench.tracking.evaluation import recorded_model

    found = on(recorded, method, "same")
    uri, settings, ids, _ = recorded
    stored = recorded_model(uri, ids[method], settings).stored
    assert (found.samples, found.classes, found.is_renamed) == (12, 4, False)
    assert found.metrics["global_accuracy"] == stored.data.metrics["final/global_accuracy"]


def test_it_computes_in_the_runs_precision(recorded, monkeypatch):
    seen, plain = [], fedavg.largest_logit
    monkeypatch.setattr(fedavg, "largest_logit", lambda task: seen.append(flags()) or plain(task))
    on(recorded, "fedavg", "same")
    assert seen == [IEEE] and flags() != IEEE


def test_a_prompt_names_other_classes(recorded):
    from fedbench.tracking.evaluation import recorded_model

    found = on(recorded, "promptfl", "other")
    assert (found.samples, found.classes, found.is_renamed) == (9, 3, True)
    # by hand: the trained context before the other names
    uri, settings, ids, folder = recorded
    state = recorded_model(uri, ids["promptfl"], settings).state
    spec = tiny_spec("promptfl", rounds=1).model_copy(update={"dataset": f"imagefolder:{folder / 'other'}"})
    spec = spec.model_copy(update={"scenario": spec.scenario.model_copy(update={"clients": 1, "partition": "iid"})})
    from fedbench.runs.prepare import prepare

    run = prepare(spec, settings)
    logits = run.model.forward(state.weights, run.test.read(torch.arange(9)), False).logits
    right = (logits.argmax(1) == run.scored.test.labels).double().mean()
    assert found.metrics["global_accuracy"] == pytest.approx(100 * float(right))


def test_a_head_is_refused_with_what_to_do(recorded):
    text = "can't predict the classes of .*head.weight depends on the number of classes; choose a run whose model names"
    with pytest.raises(FedbenchError, match=text):
        on(recorded, "fedavg", "other")


def test_a_class_needs_no_samples_for_the_server_there_and_its_training_images_are_not_encoded(recorded, monkeypatch):
    encoded = []
    plain = inputs._compute
    monkeypatch.setattr(inputs, "_compute", lambda images, *rest: encoded.append(len(images)) or plain(images, *rest))
    found = on(recorded, OF_SERVER, "few")
    assert (found.samples, found.classes, found.is_renamed) == (12, 4, False)
    # a look at single images tells what methods require
    assert sum(count for count in encoded if count > 1) == 12
    encoded.clear()
    assert on(recorded, OF_SERVER, "few").metrics == found.metrics
    assert all(count == 1 for count in encoded), "what the test split gives is kept"
