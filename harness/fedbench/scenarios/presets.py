"""Scenarios by name, the settings of the papers, which a suite may change field by field; and scenarios in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from fedbench.core.errors import unknown_name
from fedbench.core.scenario import Scenario
from fedbench.kinds.kinds import AnyPartition
from fedbench.kinds.registry import is_harness, registered

UNSET_DOMAIN = "unset"
"""The held-out domain of a preset that can't know the data set's domains; building it asks for a real one."""

_PRESETS: dict[str, tuple[str, Scenario]] = {
    "natural": (
        "the clients that the data name (hospitals, writers, phones), all take part; set participation for many",
        Scenario(partition="natural"),
    ),
    "iid": ("samples partitioned evenly at random, 20 clients, all take part", Scenario(partition="iid")),
    "label-skew": (
        "Dirichlet(0.5) by class, capped as in NIID-Bench, 20 clients, 40 % a round",
        Scenario(partition="dirichlet", participation=0.4),
    ),
    "shards": (
        "two one-class shards a client, 100 clients, 10 % a round (FST-CBDG, FedNTD)",
        Scenario(partition="shards", clients=100, shards_per_client=2, shard_scheme="deck", participation=0.1),
    ),
    "classes-per-client": (
        "two classes a client, every class used equally, 20 clients, 50 % a round (FedGLCL)",
        Scenario(partition="classes_per_client", classes_per_client=2, class_scheme="equal", participation=0.5),
    ),
    "feature-skew": (
        "one client a domain, 80/20 train/test in each, all take part (FedGLCL)",
        Scenario(partition="domain"),
    ),
    "leave-one-domain-out": (
        "one client a domain, one domain only tested, 60/20/20 elsewhere (FedCLIP); set holdout_domain",
        Scenario(partition="domain", domain_split="60/20/20", holdout_domain=UNSET_DOMAIN),
    ),
    "base-to-new": (
        "the last half of the classes unseen (CoOp's base-to-new split), the others partitioned as in label-skew",
        Scenario(unseen_classes=0.5, partition="dirichlet", participation=0.4),
    ),
    "longtail": (
        "exponential tail IF 100, uncapped Dirichlet(0.5), 20 clients, 40 % a round, CAPT's head/mid/tail",
        Scenario(imbalance="exponential", partition="dirichlet", dirichlet_scheme="uncapped", participation=0.4),
    ),
    "creff-longtail": (
        "exponential tail IF 100, CReFF's equal-size Dirichlet(0.5), 20 clients, 40 % a round (CLIP2FL's tables)",
        Scenario(imbalance="exponential", partition="creff_equal", participation=0.4, groups="shots"),
    ),
    "unsupervised": (
        "two one-class shards a client with hidden labels, 100 clients, 10 % a round",
        Scenario(partition="shards", clients=100, shards_per_client=2, participation=0.1, labels="hidden"),
    ),
    "quantity-skew": (
        "client sizes log-normal (σ = 1), samples iid, 20 clients, 40 % a round",
        Scenario(partition="lognormal?sigma=1", participation=0.4),
    ),
    "label-drift": (
        "every client's classes move from one Dirichlet(0.5) draw to another in four stretches of the run, 20 clients",
        Scenario(partition="label_drift?stretches=4", participation=0.4),
    ),
    "new-clients": (
        "as label-skew; a fifth of the clients never train, and the model is scored on them",
        Scenario(partition="dirichlet", participation=0.4, holdout_clients=0.2),
    ),
    "few-shot": (
        "16 samples of every class in all (CoOp's protocol), Dirichlet(0.5) over 10 clients, all take part",
        Scenario(shots=16, partition="dirichlet", clients=10, min_client_size=2),
    ),
    "few-shot-clients": (
        "two classes a client, 16 samples of each, every class used equally, 20 clients, 50 % a round",
        Scenario(shots=16, shots_of="client", partition="classes_per_client", participation=0.5),
    ),
    "few-labels": (
        "as label-skew, with labels of a tenth of every client's samples; methods that give labels learn from the rest",
        Scenario(partition="dirichlet", participation=0.4, labelled_samples=0.1),
    ),
    "few-labelled-clients": (
        "as label-skew, with labels at a fifth of the clients; methods that give labels learn from the others as well",
        Scenario(partition="dirichlet", participation=0.4, labelled_clients=0.2),
    ),
    "server-labels": (
        "as label-skew with hidden labels; the server has ten labelled samples a class",
        Scenario(partition="dirichlet", participation=0.4, labels="hidden", server_samples=10, server_labels="visible"),
    ),
    "noisy-labels": (
        "as label-skew, with 40 % of the labels replaced by any other class (symmetric noise)",
        Scenario(partition="dirichlet", participation=0.4, label_noise=0.4),
    ),
}

PRESETS: dict[str, Scenario] = {name: scenario for name, (_, scenario) in _PRESETS.items()}


def scenario_names() -> dict[str, str]:
    """Every preset's name with one line on what it is."""
    return {name: line for name, (line, _) in _PRESETS.items()}


def scenario_named(name: str) -> Scenario:
    """The preset called ``name``; an unknown name is answered with the nearest ones."""
    if name not in PRESETS:
        raise unknown_name("scenario", name, PRESETS, hint="List them with `fedbench list scenarios`.")
    return PRESETS[name]


def scenario_summary(scenario: Mapping[str, str]) -> str:
    """A scenario's parameters in a few words, without the number of clients."""
    fields = Scenario.model_fields
    value = {name: field.get_default() for name, field in fields.items()} | dict(scenario)
    partition = str(value["partition"])
    name = partition.partition("?")[0].partition(":")[0]
    shown = {
        *_OF_LABELS,
        *("imbalance", "partition", "within_domain", "participation", "dropout", "holdout_domain", "labels", "clients"),
    }
    # a partition's own number; the fields of the others are without effect
    partitions = registered("partition")
    shown_by = {
        partition_name: cast(type[AnyPartition], plugin.load()).shown
        for partition_name, plugin in partitions.items()
        if is_harness(plugin.source)
    }
    number = shown_by.get(name, "")
    words = []
    if value["imbalance"] == "exponential":
        words.append(f"imbalance {value['imbalance_factor']}")
    elif value["imbalance"] != "none":
        words.append(f"imbalance {value['imbalance']}")
    words.append(f"{partition}({value[number]})" if number else partition)
    if name == "domain" and value["within_domain"] == "dirichlet":
        words.append(f"dirichlet({value['dirichlet_alpha']}) in each domain")
    if value["holdout_domain"] not in (None, "none"):
        words.append(f"without {value['holdout_domain']}")
    words.append(f"{100 * float(value['participation']):g} % participating")
    if value["labels"] != "visible":
        words.append("labels hidden")
    elif of_labels := label_words(Scenario(**{name: value[name] for name in _OF_LABELS})):
        words.append(of_labels)
    if float(value["dropout"]):
        words.append(f"{100 * float(value['dropout']):g} % dropping out")
    without_effect = shown | (set(shown_by.values()) - {""}) | {"imbalance_factor"}
    for name, field in fields.items():
        if name not in without_effect and not _same(value[name], field.get_default()):
            words.append(f"{name}={value[name]}")
    return ", ".join(words)


def label_words(scenario: Scenario) -> str:
    """The labels that clients lack and the label noise, in a few words; "" if all labels are there and right."""
    words = []
    if scenario.labelled_clients < 1:
        words.append(f"labels at {100 * scenario.labelled_clients:g} % of the clients")
    if scenario.labelled_samples < 1:
        words.append(f"labels of {100 * scenario.labelled_samples:g} % of a client's samples")
    if scenario.label_noise:
        most = "up to " if scenario.noise_rates == "drawn" else ""
        who = "" if scenario.noisy_clients == 1 else f" at {100 * scenario.noisy_clients:g} % of the clients"
        words.append(f"{most}{100 * scenario.label_noise:g} % {scenario.noise_kind} label noise{who}")
    return ", ".join(words)


_OF_LABELS = (*("labelled_clients", "labelled_samples", "label_noise", "noise_kind", "noisy_clients", "noise_rates"),)


def _same(given: object, default: object) -> bool:
    return str(given).lower() == str("none" if default is None else default).lower()
