"""May a measured number stand beside a printed one? In what a run differs from what a paper says of its number.

Compared are the columns that files of published numbers have: data, backbone, partition, imbalance, clients,
participation and rounds, each where the paper says it (`not_printed` are the others), and what no paper has unless it
says so: clients that fail or are cut to equal sizes, a domain that is left out, hidden labels, training data to score
on. Not among them, so not compared: local epochs or steps, batch size, learning rate, which layers are trained, and how
shares are drawn (schemes of Dirichlet, shards and classes, smallest client, seed, split of domains). What cannot be
decided counts as different.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict

from fedbench.core.scenario import LABEL_FLIP
from fedbench.datasets.catalogue import alike, images_of, name_and_options
from fedbench.models.names import split_checkpoint


@dataclass(frozen=True, order=True)
class Difference:
    """One thing in which a run is not what a paper ran: ``rounds (200, here 20)``."""

    aspect: str
    printed: str
    here: str

    def __str__(self) -> str:
        return f"{self.aspect} ({self.printed}, here {self.here})"


class Paper(BaseModel):
    """Facts about all of a paper's numbers; they are stored beside their file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    paper: str
    """The paper's name of its method."""
    groups: str = "unknown"
    """The scenario's rule for the groups of classes that the paper prints."""
    held_out: frozenset[str] = frozenset()
    """Printed metrics of federations with one domain that is only tested."""
    letters: dict[str, str] = {}
    """Our domain -> the paper's letter for it, if that is not the domain's first letter."""

    def letter_of(self, domain: str) -> str:
        """The paper's letter for our ``domain``."""
        return self.letters.get(domain, domain[:1].upper())


@dataclass(frozen=True)
class _Data:
    """Our names of a paper's data set."""

    names: frozenset[str]
    tail: str = "none"
    """The scenario's imbalance: "exponential" if thinned by us to a long tail, "natural" for a list of files with its
    own."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of the name that the paper's run had."""


@dataclass(frozen=True)
class _Backbone:
    """Our names of a paper's backbone, pretrained as ``checkpoint`` says."""

    names: frozenset[str]
    checkpoint: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options that change the network: it is the paper's with these values only."""


def _names(name: str) -> frozenset[str]:
    return frozenset(alike(name))


# ProstateMRI has no loader
_DATA = {
    "CIFAR-10": _Data(_names("cifar10")),
    "CIFAR-10-LT": _Data(_names("cifar10"), tail="exponential"),
    "CIFAR-100": _Data(_names("cifar100")),
    "CIFAR-100-LT": _Data(_names("cifar100"), tail="exponential"),
    "Fashion-MNIST": _Data(_names("fashion-mnist")),
    "Fashion-MNIST-LT": _Data(_names("fashion-mnist"), tail="exponential"),
    "ImageNet-LT": _Data(_names("listfile:ImageNet-LT"), tail="natural"),
    "CINIC-10": _Data(_names("imagefolder:CINIC-10")),
    "Tiny-ImageNet": _Data(_names("imagefolder:tiny-imagenet-200")),
    "PACS": _Data(_names("imagefolder:PACS")),
    "VLCS": _Data(_names("imagefolder:VLCS")),
    "Office-Home": _Data(_names("imagefolder:OfficeHome")),
    "DomainNet": _Data(_names("imagefolder:DomainNet"), options={"size": "256", "classes": "domainnet-10"}),
    "Office-Caltech-10": _Data(_names("imagefolder:office_caltech_10"), options={"size": "256"}),
}
_KNOWN = frozenset({"embedded"}).union(*(data.names for data in _DATA.values()))

_BACKBONES = {
    "ResNet-8": _Backbone(frozenset({"resnet8"}), options={"width": "4"}),
    "ResNet-50": _Backbone(frozenset({"resnet50"})),
    "AlexNet": _Backbone(frozenset({"alexnet"})),
    "VGG-11": _Backbone(frozenset({"vgg11"})),
    "CLIP ViT-B/16": _Backbone(frozenset({"clip:ViT-B-16", "clip:ViT-B-16-quickgelu"}), "openai"),
    "CLIP ViT-B/32": _Backbone(frozenset({"clip:ViT-B-32", "clip:ViT-B-32-quickgelu"}), "openai"),
    "CLIP RN50": _Backbone(frozenset({"clip:RN50", "clip:RN50-quickgelu"}), "openai"),
}
_STARTED = "ImageNet-pretrained backbone"
"""The variant of facts whose CNN starts from weights of ImageNet; other CNNs start at random."""
_SAME_BACKBONE_OPTIONS = frozenset({"projector", "projector_layers", "dense", "bn", "stem", "resize"})
"""Heads and stems that papers describe apart from the backbone's name, and what is done with images of other sizes."""

_PARTITIONS = {
    "dirichlet": (frozenset({"dirichlet", "creff_equal"}), "dirichlet_alpha"),
    "shards": (frozenset({"shards"}), "shards_per_client"),
    "classes_per_client": (frozenset({"classes_per_client"}), "classes_per_client"),
    "domain": (frozenset({"domain"}), ""),
    "iid": (frozenset({"iid"}), ""),
}
"""The paper's partition -> our partitions, and our field with its value."""

_GROUPED = frozenset(f"{group}_accuracy" for group in ("head", "mid", "tail", "many", "medium", "few"))

_FAULTS = {
    "dropout": "dropping out",
    "late_dropout": "lost updates",
    "stragglers": "stragglers",
    "corrupt": "damaged updates",
}
"""The scenario's probabilities of faults, and their names in words."""

_OTHER_ROUNDS = {"last10": "mean of the last ten rounds", "oracle": "best round on the test split"}
"""Prefixes of our metrics that are not of the last round."""

_MAY_LACK = ("backbone", "partition", "clients", "participation", "rounds")


def differences(fact: Mapping[str, str], run: Mapping[str, Any], paper: Paper, metric: str = "") -> list[Difference]:
    """Differences between ``run``, a line of results, and the printed ``fact``; they may be compared if there are none.

    ``metric`` is ours. For data with domains papers print the mean over domains, which differs from the accuracy over
    all samples; groups of classes are cut by the rule of the ``paper``.
    """
    scenario = {name: str(value) for name, value in json.loads(run["scenario_settings"]).items()}
    labels = str(json.loads(run["row_settings"])["labels"])
    differing = [*_data(fact["dataset"], str(run["dataset"])), *_backbone(fact, str(run["backbone"]))]
    differing += _imbalance(fact, scenario)
    differing += _partition(fact, scenario)
    differing += _number("clients", fact["clients"], str(run["num_clients"]))
    differing += _number("participation", fact["participation"], scenario["participation"])
    differing += _number("rounds", fact["rounds"], str(run["rounds"]))
    differing += _metric(fact, metric)
    differing += _clients(fact, scenario, labels)
    differing += _held_out(fact, scenario["holdout_domain"], paper)
    if metric in _GROUPED and scenario["groups"] != paper.groups:
        differing.append(Difference("groups of classes", paper.groups, scenario["groups"]))
    if run["tuned"]:
        differing.append(Difference("hyper-parameters", "the paper's", "tuned"))
    return differing


def is_same_data(fact: Mapping[str, str], run: Mapping[str, Any]) -> bool:
    """Whether ``run`` read the data set that the ``fact`` is of."""
    return not list(_data(fact["dataset"], str(run["dataset"])))


def not_printed(fact: Mapping[str, str], run: Mapping[str, Any]) -> list[str]:
    """Conditions of the ``fact`` that the paper does not state, so that ``run`` can't be compared in them.

    Papers don't state how they treat images of a size that the network is not made for.
    """
    _, options = name_and_options(str(run["backbone"]))
    is_resized = "resize" in options and not any(_backbone(fact, str(run["backbone"])))
    return [name for name in _MAY_LACK if not fact[name]] + (["size of the images"] if is_resized else [])


def _metric(fact: Mapping[str, str], metric: str) -> Iterator[Difference]:
    if fact["group"] == "avg" and metric == "global_accuracy":
        yield Difference("metric", "mean over domains", "over all samples")
    beginning = metric.partition("_")[0]
    if beginning in _OTHER_ROUNDS and beginning not in fact["metric"]:
        yield Difference("metric", "of the last round", _OTHER_ROUNDS[beginning])


def _clients(fact: Mapping[str, str], scenario: Mapping[str, str], labels: str) -> Iterator[Difference]:
    """Differences in the clients' data and behaviour, and in the data scored on."""
    if scenario["partition"] == "domain" and scenario["within_domain"] != "iid":
        yield Difference("samples of a domain", "partitioned iid", scenario["within_domain"])
    held_out = float(scenario.get("holdout_clients", 0))
    if held_out:
        yield Difference("clients that train", "all", f"{100 * (1 - held_out):g} %")
    if scenario["equal_sizes"] == "true":
        yield Difference("client sizes", "as partitioned", "cut to equal ones")
    for name, aspect in _FAULTS.items():
        if float(scenario[name]):
            yield Difference(aspect, "none", scenario[name])
    if labels == "hidden" and fact["scenario"] != "unsupervised":
        yield Difference("labels", "visible", "hidden")
    # a run says these where they are not at their defaults
    if noise := float(scenario.get("label_noise", 0)):
        yield Difference("labels", "right", f"{100 * noise:g} % {scenario.get('noise_kind', 'symmetric')} noise")
    if hostile := float(scenario.get("attackers", 0)):
        yield Difference("attackers", "none", f"{100 * hostile:g} %, {scenario.get('attack', LABEL_FLIP)}")
    for name, aspect in (("labelled_clients", "clients with labels"), ("labelled_samples", "samples with labels")):
        if (share := float(scenario.get(name, 1))) < 1:
            yield Difference(aspect, "all", f"{100 * share:g} %")
    if shots := int(scenario.get("shots", 0)):
        of = "of each client" if scenario.get("shots_of") == "client" else "in all"
        yield Difference("samples of the clients", "all", f"{shots} of a class {of}")
    if int(scenario["server_samples"]) and scenario["server_source"] == "aside":
        yield Difference("samples of the clients", "all", f"{scenario['server_samples']} a class at the server")
    if float(scenario["unseen_classes"]):
        yield Difference("classes", "all", f"without {100 * float(scenario['unseen_classes']):g} %, which are unseen")
    if float(scenario["validation"]):
        yield Difference("scored on", "test", f"{100 * float(scenario['validation']):g} % of the training data")


def _held_out(fact: Mapping[str, str], ours: str, paper: Paper) -> Iterator[Difference]:
    """Differences in the domain that is only tested. Files give it by its letter, as the target or as the group."""
    if fact["metric"] not in paper.held_out:
        if ours != "none":
            yield Difference("held-out domain", "none", ours)
        return
    target = fact["variant"].removeprefix("target=") if fact["variant"].startswith("target=") else fact["group"]
    if ours == "none" or (target != "avg" and paper.letter_of(ours) != target):
        yield Difference("held-out domain", "one of them" if target == "avg" else target, ours)


def _data(printed: str, ours: str) -> Iterator[Difference]:
    name, changed = images_of(ours)
    data = _DATA.get(printed)
    if data is not None and name in data.names and changed == dict(data.options):
        return
    decided = data is not None and name in _KNOWN
    yield Difference("data", printed, ours if decided else f"{ours}, unknown")


def _backbone(fact: Mapping[str, str], ours: str) -> Iterator[Difference]:
    printed = fact["backbone"]
    if not printed:
        return
    name, options = name_and_options(ours)
    family, colon, rest = name.partition(":")
    arch, _, checkpoint = split_checkpoint(rest)
    name = f"{family}{colon}{arch}"
    backbone = _BACKBONES.get(printed)
    if backbone is None:
        yield Difference("backbone", printed, f"{ours}, unknown")
        return
    weights, start = options.pop("weights", ""), "imagenet" if fact["variant"] == _STARTED else ""
    changed = {key: value for key, value in options.items() if key not in _SAME_BACKBONE_OPTIONS}
    alike = name in backbone.names
    is_same = alike and checkpoint == backbone.checkpoint and changed.items() <= backbone.options.items()
    if is_same and weights == start:
        return
    # a file's content is not in its name: openai.safetensors may hold anything, the tag openai may not
    undecided = alike and ("/" in checkpoint or "." in checkpoint or weights not in ("", "imagenet"))
    wanted = f"{printed}, weights of ImageNet" if start else printed
    yield Difference("backbone", wanted, f"{ours}, unknown" if undecided else ours)


def _imbalance(fact: Mapping[str, str], scenario: Mapping[str, str]) -> Iterator[Difference]:
    data, ours = _DATA.get(fact["dataset"]), scenario["imbalance"]
    here = f"{float(scenario['imbalance_factor']):g}" if ours == "exponential" else ours
    if fact["imbalance_factor"]:
        yield from _number("imbalance", fact["imbalance_factor"], here)
    elif data is not None and data.tail != ours:
        yield Difference("imbalance", data.tail, here)
    if ours == "exponential" and scenario["imbalance_order"] != "label":
        yield Difference("order of the classes", "label", scenario["imbalance_order"])


def _partition(fact: Mapping[str, str], scenario: Mapping[str, str]) -> Iterator[Difference]:
    printed, value = fact["partition"], fact["partition_value"]
    if not printed:
        return
    ours = scenario["partition"]
    names, _ = _PARTITIONS.get(printed, (frozenset[str](), ""))
    _, field_of_ours = next((known for known in _PARTITIONS.values() if ours in known[0]), (None, ""))
    ours_value = scenario.get(field_of_ours, "")
    if ours in names and (not value or _equal(value, ours_value)):
        return
    yield Difference("partition", f"{printed} {value}".strip(), f"{ours} {ours_value}".strip())


def _number(aspect: str, printed: str, ours: str) -> Iterator[Difference]:
    if printed and not _equal(printed, ours):
        yield Difference(aspect, printed, ours or "unknown")


def _equal(first: str, other: str) -> bool:
    try:
        return float(first) == float(other)
    except ValueError:
        return False
