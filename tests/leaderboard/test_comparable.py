"""What may be compared with a printed number: each condition alone makes a difference, and the paper's own none."""

import json

import pytest

from fedbench.core.scenario import Scenario
from fedbench.core.spec import RunSpec
from fedbench.suites.expand import expand
from fedbench.suites.resolve import Overrides
from fedbench.suites.suite import load_suite
from fedbench.tracking.tags import flat_params
from fedbench_boards.leaderboard.comparable import differences, not_printed
from fedbench_boards.leaderboard.published import load_paper, load_published, matching, published_folder

FOLDER = published_folder(None)
FACT = {
    "dataset": "CIFAR-10-LT", "backbone": "ResNet-8", "partition": "dirichlet", "partition_value": "0.5",
    "imbalance_factor": "100", "clients": "20", "participation": "0.4", "rounds": "200", "group": "",
    "scenario": "long_tail+label_skew", "metric": "accuracy", "variant": "",
}  # fmt: skip
OURS = Scenario(imbalance="exponential", partition="creff_equal", participation=0.4)
RUN = {"dataset": "cifar10", "backbone": "resnet8", "num_clients": 20, "rounds": "200", "tuned": ""}


def recorded(scenario):
    """A scenario as a line of results has it: apart from whether labels are hidden."""
    params = flat_params(RunSpec(scenario=scenario))
    own = {key.removeprefix("scenario."): value for key, value in params.items() if key.startswith("scenario.")}
    labels = own.pop("labels")
    return {"scenario_settings": json.dumps(own), "row_settings": json.dumps({"labels": labels})}


def told(fact=None, scenario=None, metric="global_accuracy", paper="mine", **run):
    line = {**RUN, **run, **recorded(OURS.model_copy(update=scenario or {}))}
    return [
        str(difference) for difference in differences({**FACT, **(fact or {})}, line, load_paper(paper, FOLDER), metric)
    ]


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
        ({}, {"imbalance_factor": 50.0}, {}, "imbalance (100, here 50)"),
        ({}, {"imbalance": "none"}, {}, "imbalance (100, here none)"),
        ({"imbalance_factor": ""}, {"imbalance": "none"}, {}, "imbalance (exponential, here none)"),
        ({"dataset": "CIFAR-10", "imbalance_factor": ""}, {}, {}, "imbalance (none, here 100)"),
        ({}, {"dirichlet_alpha": 0.1}, {}, "partition (dirichlet 0.5, here creff_equal 0.1)"),
        ({}, {"partition": "shards"}, {}, "partition (dirichlet 0.5, here shards 2)"),
        ({}, {"partition": "iid"}, {}, "partition (dirichlet 0.5, here iid)"),
        ({}, {}, {"num_clients": 10}, "clients (20, here 10)"),
        ({}, {"participation": 1.0}, {}, "participation (0.4, here 1.0)"),
        ({}, {}, {"rounds": "20"}, "rounds (200, here 20)"),
        ({"group": "avg"}, {}, {}, "metric (mean over domains, here over all samples)"),
        ({}, {}, {"tuned": "study"}, "hyper-parameters (the paper's, here tuned)"),
    ],
)  # fmt: skip
def test_every_condition_alone_makes_a_difference(fact, scenario, run, said):
    assert told(fact, scenario, **run) == [said]


# every field of a scenario: a change of it alone, and the difference it makes; None where it makes none, since papers
# don't say it in a column, or fedbench's field is one that the others' choice leaves without effect
FIELDS = {
    "imbalance": ({"imbalance": "natural"}, "imbalance (100, here natural)"),
    "imbalance_factor": ({"imbalance_factor": 50.0}, "imbalance (100, here 50)"),
    "imbalance_order": ({"imbalance_order": "shuffled"}, "order of the classes (label, here shuffled)"),
    "shots": ({"shots": 16}, "samples of the clients (all, here 16 of a class in all)"),
    "shots_of": ({"shots_of": "client"}, None),  # without effect where there are no shots
    "partition": ({"partition": "iid"}, "partition (dirichlet 0.5, here iid)"),
    "clients": ({"clients": 7}, None),  # the data decide how many there are: num_clients is compared
    "dirichlet_alpha": ({"dirichlet_alpha": 0.1}, "partition (dirichlet 0.5, here creff_equal 0.1)"),
    "dirichlet_scheme": ({"partition": "dirichlet", "dirichlet_scheme": "uncapped"}, None),
    "min_client_size": ({"min_client_size": 1}, None),
    "shards_per_client": ({"shards_per_client": 5}, None),
    "shard_scheme": ({"shard_scheme": "sorted"}, None),
    "classes_per_client": ({"classes_per_client": 5}, None),
    "class_scheme": ({"class_scheme": "round_robin"}, None),
    "equal_sizes": ({"equal_sizes": True}, "client sizes (as partitioned, here cut to equal ones)"),
    "clients_per_domain": ({"clients_per_domain": 3}, None),
    "within_domain": ({"within_domain": "dirichlet"}, None),  # of the partition by domain, see below
    "holdout_domain": ({"holdout_domain": "sketch"}, "held-out domain (none, here sketch)"),
    "domain_split": ({"domain_split": "60/20/20"}, None),
    "labels": ({"labels": "hidden"}, "labels (visible, here hidden)"),
    "holdout_clients": ({"holdout_clients": 0.2}, "clients that train (all, here 80 %)"),
    "labelled_clients": ({"labelled_clients": 0.5}, "clients with labels (all, here 50 %)"),
    "labelled_samples": ({"labelled_samples": 0.1}, "samples with labels (all, here 10 %)"),
    "label_noise": ({"label_noise": 0.4}, "labels (right, here 40 % symmetric noise)"),
    "noise_kind": ({"noise_kind": "pairwise"}, None),  # without effect where none is wrong, as the two below
    "noisy_clients": ({"noisy_clients": 0.5}, None),
    "noise_rates": ({"noise_rates": "drawn"}, None),
    "participation": ({"participation": 1.0}, "participation (0.4, here 1.0)"),
    "dropout": ({"dropout": 0.25}, "dropping out (none, here 0.25)"),
    "late_dropout": ({"late_dropout": 0.25}, "lost updates (none, here 0.25)"),
    "stragglers": ({"stragglers": 0.9}, "stragglers (none, here 0.9)"),
    "straggler_work": ({"straggler_work": 0.5}, None),  # without effect where nobody is one
    "corrupt": ({"corrupt": 0.25}, "damaged updates (none, here 0.25)"),
    "attackers": ({"attackers": 0.2}, "attackers (none, here 20 %, label_flip)"),
    "attack": ({"attack": "alie"}, None),  # without effect where nobody attacks, as the one below
    "attack_scale": ({"attack_scale": 2.0}, None),
    "validation": ({"validation": 0.2}, "scored on (test, here 20 % of the training data)"),
    "unseen_classes": ({"unseen_classes": 0.5}, "classes (all, here without 50 %, which are unseen)"),
    "server_samples": ({"server_samples": 9}, "samples of the clients (all, here 9 a class at the server)"),
    "server_source": ({"server_samples": 9, "server_source": "shared"}, None),
    "server_labels": ({"server_labels": "visible"}, None),
    "groups": ({"groups": "thirds"}, None),  # of the groups' own accuracies, see below
    "partition_seed": ({"partition_seed": 3}, None),
}


def test_of_every_field_of_a_scenario_it_is_decided_whether_it_makes_a_difference():
    assert set(FIELDS) == set(Scenario.model_fields)


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_of_the_scenario_makes_the_difference_that_was_decided(name):
    change, said = FIELDS[name]
    assert told({}, change) == ([] if said is None else [said])


@pytest.mark.parametrize("partition", ["shards", "classes_per_client"])
def test_the_value_of_the_partition_in_use_makes_a_difference(partition):
    fact, field = (
        {"partition": partition, "partition_value": "2"},
        f"{partition.removesuffix('_per_client')}_per_client",
    )
    assert told(fact, {"partition": partition}) == []
    assert told(fact, {"partition": partition, field: 5}) == [f"partition ({partition} 2, here {partition} 5)"]


def test_label_skew_within_domains_makes_a_difference():
    fact = {"partition": "domain", "partition_value": ""}
    assert told(fact, {"partition": "domain"}) == []
    said = told(fact, {"partition": "domain", "within_domain": "dirichlet"})
    assert said == ["samples of a domain (partitioned iid, here dirichlet)"]


def test_groups_of_classes_are_compared_by_the_papers_rule():
    assert told(scenario={"groups": "cumulative_exclusive"}, metric="tail_accuracy", paper="capt") == []
    assert told(scenario={"groups": "shots"}, metric="few_accuracy", paper="clip2fl") == []
    said = ["groups of classes (cumulative_exclusive, here thirds)"]
    assert told(scenario={"groups": "thirds"}, metric="tail_accuracy", paper="capt") == said
    assert told(metric="tail_accuracy", paper="mine") == ["groups of classes (unknown, here cumulative_exclusive)"]


@pytest.mark.parametrize(
    ("fact", "holdout", "said"),
    [
        ({"metric": "accuracy_generalization", "group": "A"}, "art_painting", []),
        ({"metric": "accuracy_generalization", "group": "A"}, "painting", []),
        ({"metric": "accuracy_generalization", "group": "A"}, "photo", ["held-out domain (A, here photo)"]),
        ({"metric": "accuracy_personalization", "group": "avg", "variant": "target=S"}, "sketch", []),
        ({"metric": "accuracy_personalization", "group": "S", "variant": "target=P"}, "sketch",
         ["held-out domain (P, here sketch)"]),
        ({"metric": "accuracy_comprehensive", "group": "avg"}, "sketch", []),
        ({"metric": "accuracy_comprehensive", "group": "avg"}, None, ["held-out domain (one of them, here none)"]),
    ],
)  # fmt: skip
def test_the_domain_that_is_only_tested_is_the_papers(fact, holdout, said):
    assert told(fact, {"holdout_domain": holdout}, "selected_unseen_domain_accuracy", "fedclip") == said


def test_other_rounds_than_the_last_are_compared_with_their_like():
    assert told(metric="last10_accuracy") == ["metric (of the last round, here mean of the last ten rounds)"]
    assert told(metric="oracle_accuracy") == ["metric (of the last round, here best round on the test split)"]
    assert told({"metric": "accuracy_last10"}, metric="last10_accuracy") == []


def test_hidden_labels_are_those_of_numbers_without_labels():
    assert told({"scenario": "unsupervised"}, {"labels": "hidden"}) == []


def test_lists_of_files_bring_their_own_tail():
    fact = {"dataset": "ImageNet-LT", "imbalance_factor": ""}
    assert told(fact, {"imbalance": "natural"}, dataset="listfile:ImageNet-LT") == []
    assert told(fact, {"imbalance": "none"}, dataset="listfile:ImageNet-LT") == ["imbalance (natural, here none)"]


def test_what_the_paper_does_not_say_is_not_compared():
    silent = dict.fromkeys(("backbone", "partition", "partition_value", "clients", "participation", "rounds"), "")
    assert told(silent, {"partition": "iid", "participation": 1.0}, rounds="1", num_clients=3, backbone="x") == []
    assert told({"partition_value": ""}, {"dirichlet_alpha": 0.1}) == []
    lacking = ["backbone", "partition", "clients", "participation", "rounds"]
    assert not_printed({**FACT, **silent}, {"backbone": "x"}) == lacking
    assert not_printed(FACT, {"backbone": "resnet8"}) == []
    # AlexNet on images of 28 pixels: they are resized, the paper doesn't say how
    alexnet, resized = {"backbone": "AlexNet"}, {"backbone": "alexnet?resize=64"}
    assert told(alexnet, {}, **resized) == []
    assert not_printed({**FACT, **alexnet}, resized) == ["size of the images"]
    assert not_printed(FACT, {"backbone": "alexnet?resize=64"}) == []


def test_a_cnn_starts_from_imagenet_where_the_papers_does_and_only_there():
    scratch, started = {"backbone": "AlexNet"}, {"backbone": "AlexNet", "variant": "ImageNet-pretrained backbone"}
    assert told(started, backbone="alexnet?dense=1&weights=imagenet") == []
    assert told(started, backbone="alexnet") == ["backbone (AlexNet, weights of ImageNet, here alexnet)"]
    assert told(scratch, backbone="alexnet?weights=imagenet") == ["backbone (AlexNet, here alexnet?weights=imagenet)"]
    for fact in (scratch, started):
        assert told(fact, backbone="alexnet?weights=w.pth")[0].endswith("here alexnet?weights=w.pth, unknown)")


def test_a_mean_over_domains_is_compared_with_the_mean_over_domains():
    assert told({"group": "avg"}, metric="domain_mean_accuracy") == []


@pytest.mark.parametrize(
    ("backbone", "said"),
    [
        ("clip:ViT-B-16@openai", []),
        ("clip:ViT-B-16-quickgelu@openai", []),
        ("clip:ViT-B-16@laion2b_s34b_b88k", ["here clip:ViT-B-16@laion2b_s34b_b88k)"]),
        ("clip:ViT-B-16:openai", []),
        ("clip:ViT-B-16@w/ViT-B-16.safetensors", ["here clip:ViT-B-16@w/ViT-B-16.safetensors, unknown)"]),
        ("clip:ViT-B-16:/w/openai.safetensors", ["here clip:ViT-B-16:/w/openai.safetensors, unknown)"]),
        ("clip:ViT-B-32:/w/openai.safetensors", ["here clip:ViT-B-32:/w/openai.safetensors)"]),
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
        ("imagefolder:DomainNet?size=256&classes=domainnet-10", "DomainNet", True),
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
    facts, paper = load_published(suite.published, FOLDER), load_paper(suite.published, FOLDER)
    checked = 0
    for spec in expand(suite, Overrides(scale=scale, seeds=(0,))):
        run = {
            "dataset": spec.dataset,
            "backbone": spec.backbone,
            "num_clients": spec.scenario.clients,
            "rounds": str(spec.training.rounds),
            "tuned": "",
            **recorded(spec.scenario),
        }
        for key in spec.published:
            for fact in matching(facts, key).to_dict("records"):
                found = differences(fact, run, paper, "global_accuracy")
                assert (not found) is comparable, f"{spec.title}, {key}: {', '.join(map(str, found))}"
                checked += 1
    assert checked >= 15
