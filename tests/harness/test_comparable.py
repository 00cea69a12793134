"""What may be compared with a printed number: each condition alone makes a difference, and the paper's own none."""

import json
from pathlib import Path

import pytest

from fedbench.comparable import differences
from fedbench.expand import expand
from fedbench.published import load_published, matching
from fedbench.resolve import Overrides
from fedbench.suite import load_suite
from fedbench.tracking import flat_params

FOLDER = Path(__file__).parents[2] / "leaderboards" / "published"
FACT = {
    "dataset": "CIFAR-10-LT", "backbone": "ResNet-8", "partition": "dirichlet", "partition_value": "0.5",
    "imbalance_factor": "100", "clients": "20", "participation": "0.4", "rounds": "200", "group": "",
}  # fmt: skip
SCENARIO = {
    "imbalance": "exponential", "imbalance_factor": "100.0", "partition": "creff_equal", "dirichlet_alpha": "0.5",
    "participation": "0.4", "shards_per_client": "2",
}  # fmt: skip
RUN = {"dataset": "cifar10", "backbone": "resnet8", "num_clients": 20, "rounds": "200", "tuned": ""}


def told(fact=None, scenario=None, metric="global_accuracy", **run):
    line = {**RUN, **run, "scenario_settings": json.dumps({**SCENARIO, **(scenario or {})})}
    return [str(difference) for difference in differences({**FACT, **(fact or {})}, line, metric)]


@pytest.mark.parametrize("dataset", ["cifar10", "cifar10?download=true", "hf:uoft-cs/cifar10"])
@pytest.mark.parametrize("backbone", ["resnet8", "resnet8?width=4", "resnet8?projector=512"])
def test_the_papers_own_conditions_do_not_differ(dataset, backbone):
    assert told(dataset=dataset, backbone=backbone) == []


@pytest.mark.parametrize(
    ("fact", "scenario", "run", "said"),
    [
        ({}, {}, {"dataset": "embedded"}, "data (CIFAR-10-LT, here embedded)"),
        ({}, {}, {"dataset": "cifar100"}, "data (CIFAR-10-LT, here cifar100)"),
        ({}, {}, {"dataset": "hf:uoft-cs/cifar10?train=a"}, "data (CIFAR-10-LT, here hf:uoft-cs/cifar10?train=a)"),
        ({}, {}, {"dataset": "hf:mine/cifar10"}, "data (CIFAR-10-LT, here hf:mine/cifar10, unknown)"),
        ({"dataset": "ProstateMRI", "imbalance_factor": ""}, {"imbalance": "none"}, {},
         "data (ProstateMRI, here cifar10, unknown)"),
        ({}, {}, {"backbone": "convnet"}, "backbone (ResNet-8, here convnet)"),
        ({}, {}, {"backbone": "resnet8?width=1"}, "backbone (ResNet-8, here resnet8?width=1)"),
        ({"backbone": "U-Net"}, {}, {}, "backbone (U-Net, here resnet8, unknown)"),
        ({"backbone": "AlexNet"}, {}, {"backbone": "alexnet?resize=64"},
         "backbone (AlexNet, here alexnet?resize=64, unknown)"),
        ({}, {"imbalance_factor": "50.0"}, {}, "imbalance (100, here 50)"),
        ({}, {"imbalance": "none"}, {}, "imbalance (100, here none)"),
        ({"imbalance_factor": ""}, {"imbalance": "none"}, {}, "imbalance (exponential, here none)"),
        ({"dataset": "CIFAR-10", "imbalance_factor": ""}, {}, {}, "imbalance (none, here 100)"),
        ({}, {"dirichlet_alpha": "0.1"}, {}, "partition (dirichlet 0.5, here creff_equal 0.1)"),
        ({}, {"partition": "shards"}, {}, "partition (dirichlet 0.5, here shards 2)"),
        ({}, {"partition": "iid"}, {}, "partition (dirichlet 0.5, here iid)"),
        ({}, {}, {"num_clients": 10}, "clients (20, here 10)"),
        ({}, {"participation": "1.0"}, {}, "participation (0.4, here 1.0)"),
        ({}, {}, {"rounds": "20"}, "rounds (200, here 20)"),
        ({"group": "avg"}, {}, {}, "metric (mean over domains, here over all samples)"),
        ({}, {}, {"tuned": "study"}, "hyper-parameters (the paper's, here tuned)"),
    ],
)  # fmt: skip
def test_every_condition_alone_makes_a_difference(fact, scenario, run, said):
    assert told(fact, scenario, **run) == [said]


def test_what_the_paper_does_not_say_is_not_compared():
    silent = dict.fromkeys(("backbone", "partition", "partition_value", "clients", "participation", "rounds"), "")
    assert told(silent, {"partition": "iid", "participation": "1.0"}, rounds="1", num_clients=3, backbone="x") == []
    assert told({"partition_value": ""}, {"dirichlet_alpha": "0.1"}) == []


def test_a_mean_over_domains_is_compared_with_the_mean_over_domains():
    assert told({"group": "avg"}, metric="domain_mean_accuracy") == []


@pytest.mark.parametrize(
    ("backbone", "said"),
    [
        ("clip:ViT-B-16@openai", []),
        ("clip:ViT-B-16-quickgelu@openai", []),
        ("clip:ViT-B-16@laion2b_s34b_b88k", ["here clip:ViT-B-16@laion2b_s34b_b88k)"]),
        ("clip:ViT-B-16@w/ViT-B-16.safetensors", ["here clip:ViT-B-16@w/ViT-B-16.safetensors, unknown)"]),
        ("clip:ViT-B-32@openai", ["here clip:ViT-B-32@openai)"]),
        ("clip:ViT-B-16-plus-240@openai", ["here clip:ViT-B-16-plus-240@openai)"]),
        ("clip:embedded", ["here clip:embedded)"]),
    ],
)  # fmt: skip
def test_a_clip_is_the_papers_with_its_weights_only(backbone, said):
    found = told({"backbone": "CLIP ViT-B/16"}, backbone=backbone)
    assert found == [f"backbone (CLIP ViT-B/16, {end}" for end in said]


@pytest.mark.parametrize(
    ("dataset", "printed", "same"),
    [
        ("imagefolder:PACS", "PACS", True),
        ("imagefolder:data/PACS.tar", "PACS", True),
        ("imagefolder:pacs128.tar", "PACS", False),
        ("imagefolder:PACS?size=32", "PACS", False),
        ("imagefolder:office_caltech_10?size=256", "Office-Caltech-10", True),
        ("imagefolder:office_caltech_10", "Office-Caltech-10", False),
        ("imagefolder:DomainNet?size=256", "DomainNet", False),
    ],
)
def test_folders_go_by_their_own_name_and_image_size(dataset, printed, same):
    fact = {"dataset": printed, "imbalance_factor": ""}
    assert (told(fact, {"imbalance": "none"}, dataset=dataset) == []) is same


@pytest.mark.parametrize(("scale", "comparable"), [("paper", True), ("embedded", False)])
@pytest.mark.parametrize("name", ["clip2fl", "capt", "fst-cbdg"])
def test_a_replay_at_paper_scale_is_comparable_and_an_embedded_one_never_is(name, scale, comparable):
    suite = load_suite(name)
    facts = load_published(suite.published, FOLDER)
    checked = 0
    for spec in expand(suite, Overrides(scale=scale, seeds=(0,))):
        params = flat_params(spec)
        scenario = {k.removeprefix("scenario."): v for k, v in params.items() if k.startswith("scenario.")}
        run = {
            "dataset": spec.dataset,
            "backbone": spec.backbone,
            "num_clients": spec.scenario.clients,
            "rounds": params["training.rounds"],
            "tuned": "",
            "scenario_settings": json.dumps(scenario),
        }
        for key in spec.published:
            for fact in matching(facts, key).to_dict("records"):
                found = differences(fact, run, "global_accuracy")
                assert (not found) is comparable, f"{spec.title}, {key}: {', '.join(map(str, found))}"
                checked += 1
    assert checked >= 15
