"""Sweeps: which rows and runs a setting with several values makes."""

import pytest

from fedbench.core.errors import FedbenchError
from fedbench.suites.expand import expand
from fedbench.suites.resolve import Overrides
from fedbench.suites.suite import parse_suite

SUITE = """
name: mine
scenario: iid
rows:
  - method: fedavg
  - {method: fedprox, set: {fedprox.mu: MU}}
"""


def runs(mu="0.5", **overrides):
    specs = expand(parse_suite(SUITE.replace("MU", mu), "mine.yaml"), Overrides(**overrides))
    return [(spec.label or spec.method, spec.params.get("fedprox", {}).get("mu"), spec.training.lr) for spec in specs]


def test_values_on_the_command_line_are_rows_of_the_methods_that_read_them():
    rate = runs()[0][2]
    found = runs(sets=(("fedprox.mu", "0.1, 0.01"),))
    # fedavg has no mu: one run, under its own name
    assert found == [("fedavg", None, rate), ("fedprox, mu=0.1", 0.1, rate), ("fedprox, mu=0.01", 0.01, rate)]
    assert runs(sets=(("fedprox.mu", "0.1"),))[1] == ("fedprox", 0.1, rate)


def test_two_sweeps_are_every_pair():
    found = runs(sets=(("fedprox.mu", "0.1,0.01"), ("lr", "0.2,0.3")))
    assert found == [
        ("fedavg, lr=0.2", None, 0.2),
        ("fedavg, lr=0.3", None, 0.3),
        ("fedprox, mu=0.1, lr=0.2", 0.1, 0.2),
        ("fedprox, mu=0.1, lr=0.3", 0.1, 0.3),
        ("fedprox, mu=0.01, lr=0.2", 0.01, 0.2),
        ("fedprox, mu=0.01, lr=0.3", 0.01, 0.3),
    ]


def test_a_list_in_a_suite_is_a_sweep_and_templates_are_not():
    assert [run[:2] for run in runs("[0.1, 1.0]")][1:] == [("fedprox, mu=0.1", 0.1), ("fedprox, mu=1.0", 1.0)]
    text = SUITE.replace("fedprox.mu: MU", 'templates: ["a {}", "the {}"]')
    (_, spec) = expand(parse_suite(text, "mine.yaml"), Overrides())
    assert spec.templates == ("a {}", "the {}") and spec.label == ""


def test_what_is_no_sweep_is_refused():
    with pytest.raises(FedbenchError, match=r"mine.yaml, line 6, rows.1.set: fedprox.mu=1,1: .* must differ"):
        runs("[1, 1]")
    with pytest.raises(FedbenchError, match=r"fedprox.mu=: a sweep's values must differ, and there must be some"):
        runs("[]")
    many = ",".join(str(number) for number in range(1, 1002))
    with pytest.raises(FedbenchError, match="over rounds have 1001 combinations; at most 1000"):
        runs(sets=(("rounds", many),))
