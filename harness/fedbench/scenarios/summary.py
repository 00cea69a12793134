"""A scenario's parameters in a few words, as captions have them."""

from __future__ import annotations

from collections.abc import Mapping

from fedbench.core.scenario import Scenario


def scenario_summary(scenario: Mapping[str, str]) -> str:
    """A scenario's parameters in a few words, as a caption says them; the number of clients is not among them."""
    fields = Scenario.model_fields
    value = {name: field.get_default() for name, field in fields.items()} | dict(scenario)
    partition = str(value["partition"])
    shown = {
        *("imbalance", "partition", "within_domain", "participation", "dropout", "holdout_domain", "labels", "clients")
    }
    # a partition's own number; the fields of the others are without effect
    own = {
        "dirichlet": "dirichlet_alpha",
        "creff_equal": "dirichlet_alpha",
        "shards": "shards_per_client",
        "classes_per_client": "classes_per_client",
        "domain": "clients_per_domain",
    }
    words = []
    if value["imbalance"] == "exponential":
        words.append(f"imbalance {value['imbalance_factor']}")
    elif value["imbalance"] != "none":
        words.append(f"imbalance {value['imbalance']}")
    words.append(f"{partition}({value[own[partition]]})" if partition in own else partition)
    if partition == "domain" and value["within_domain"] == "dirichlet":
        words.append(f"dirichlet({value['dirichlet_alpha']}) in each domain")
    if value["holdout_domain"] not in (None, "none"):
        words.append(f"without {value['holdout_domain']}")
    words.append(f"{100 * float(value['participation']):g} % participating")
    if value["labels"] != "visible":
        words.append("labels hidden")
    if float(value["dropout"]):
        words.append(f"{100 * float(value['dropout']):g} % dropping out")
    without_effect = shown | set(own.values()) | {"imbalance_factor"}
    for name, field in fields.items():
        if name not in without_effect and not _same(value[name], field.get_default()):
            words.append(f"{name}={value[name]}")
    return ", ".join(words)


def _same(given: object, default: object) -> bool:
    return str(given).lower() == str("none" if default is None else default).lower()
