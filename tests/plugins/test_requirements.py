"""What methods require of a run is refused in one sentence, by the harness, before anything is trained."""

from pathlib import Path

import pytest
import torch

from fedbench.core.errors import FedbenchError
from fedbench.core.method.base import REQUIREMENTS, Method, declares
from fedbench.core.types import LinearHead, Model, Outputs
from fedbench.kinds.registry import find_method
from fedbench.models.inputs import FeatureInputs
from fedbench.plugins.assembly import assemble
from fedbench.plugins.requirements import features_are_trained, refuse_backbone, refuse_model, refuse_settings
from fedbench.testing import tiny_run, tiny_spec

CPU = torch.device("cpu")
INPUTS = FeatureInputs(torch.ones(3, 2))
FROZEN = Model({"w": torch.zeros(2)}, lambda t, x, _: Outputs(x + t["w"], x))
TRAINED = Model({"w": torch.ones(2)}, lambda t, x, _: Outputs(x * t["w"], x * t["w"]), head=LinearHead())


def spec(scenario=None, **changes):
    plain = tiny_spec("fedavg", backbone="convnet")
    return plain.model_copy(
        update={"scenario": plain.scenario.model_copy(update=scenario or {}), **changes},
    )


@pytest.mark.parametrize(
    ("requirement", "refused", "fits", "message"),
    [
        ("labels", spec({"labels": "hidden"}), spec(), "mine needs labels, which this scenario hides"),
        ("server_data", spec(), spec({"server_samples": 2}), "mine needs unlabelled samples at the server"),
        (
            "server_labels",
            spec({"server_samples": 2, "server_labels": "hidden"}),
            spec({"server_samples": 2, "server_labels": "visible"}),
            "mine needs labelled samples.*scenario.server_labels=visible",
        ),
        (
            "sgd",
            spec(training=spec().training.model_copy(update={"optimizer": "adam"})),
            spec(),
            "mine needs clients whose update is a weighted sum of gradients, which adam's is not; set optimizer=sgd",
        ),
    ],
)
def test_settings_that_do_not_grant_it_are_refused(requirement, refused, fits, message):
    with pytest.raises(FedbenchError, match=message):
        refuse_settings({requirement: "mine"}, refused)
    refuse_settings({requirement: "mine"}, fits)
    refuse_settings({}, refused)


def test_another_backbone_than_clip_is_refused():
    with pytest.raises(FedbenchError, match="mine needs a CLIP backbone, not 'convnet'; use --set"):
        refuse_backbone({"clip": "mine"}, spec(backbone="convnet"))
    refuse_backbone({"clip": "mine"}, spec(backbone="clip:embedded"))


@pytest.mark.parametrize(
    ("requirement", "model", "private", "message"),
    [
        ("linear_head", FROZEN, (), "mine needs a linear classifier; this model has none"),
        ("trained_features", FROZEN, (), r"those of this model are frozen; choose a backbone.*\(fedglcl\+mine\)"),
        ("global_model", TRAINED, ("w",), "mine works on the model that clients send, and here every weight stays"),
        ("whole_model", TRAINED, ("w",), "'w' never leaves a client; run it without a method that keeps"),
    ],
)
def test_a_model_that_does_not_have_it_is_refused(requirement, model, private, message):
    with pytest.raises(FedbenchError, match=message):
        refuse_model({requirement: "mine"}, model, private, INPUTS, CPU)
    refuse_model({requirement: "mine"}, TRAINED, (), INPUTS, CPU)
    refuse_model({}, model, private, INPUTS, CPU)


def test_features_are_trained_where_they_depend_on_a_weight():
    assert features_are_trained(TRAINED, INPUTS, CPU) and not features_are_trained(FROZEN, INPUTS, CPU)


def test_the_run_is_refused_before_it_is_trained():
    with pytest.raises(FedbenchError, match="fedbe needs the clients' whole models.*never leaves a client"):
        tiny_run(tiny_spec("fedbe+fedloge", backbone="convnet"))


def test_values_that_do_not_need_it_require_less():
    assert assemble("moon", {}).requires.keys() == {"trained_features", "sent_steps", "global_model"}
    assert assemble("moon", {"moon": {"mu": 0.0}}).requires == {}
    both = assemble("rucr", {"rucr": {"loss_weight": 0.0, "rectify_rounds": 0}})
    assert both.requires == {"labels": "rucr"}


def test_a_class_of_its_own_declares_what_it_likes_and_has_the_defaults_of_the_rest():
    class Plain:
        requires = ("labels",)

    assert declares(Plain, "requires") == ("labels",)
    assert declares(Plain, "reads") == Method.reads == () and declares(Plain, "keeps_lost_training") is False


def test_every_requirement_is_that_of_a_method_of_the_package():
    import tomllib

    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    names = tomllib.loads(text)["project"]["entry-points"]["fedbench.methods"]
    assert {word for name in names for word in declares(find_method(name), "requires")} == set(REQUIREMENTS)
