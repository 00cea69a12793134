"""Short descriptions of scenarios for captions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from fedbench.core.scenario import Scenario
from fedbench.kinds.kinds import AnyPartition
from fedbench.kinds.registry import is_harness, registered


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
    known = registered("partition")
    own = {
        one: cast(type[AnyPartition], plugin.load()).shown for one, plugin in known.items() if is_harness(plugin.source)
    }
    number = own.get(name, "")
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
    without_effect = shown | (set(own.values()) - {""}) | {"imbalance_factor"}
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
