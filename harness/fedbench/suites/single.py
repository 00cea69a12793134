"""The suite of runs that are given on the command line alone."""

from __future__ import annotations

from typing import Any

from fedbench.suites.suite import Row, Suite


def single(scenario: str | None = None, dataset: str | None = None, backbone: str | None = None) -> Suite:
    """The suite of a run without a suite file: the methods come from the command line."""
    given: dict[str, Any] = {"dataset": dataset, "backbone": backbone, "scenario": scenario}
    return Suite(name="adhoc", rows=(Row(method="fedavg"),), **{k: v for k, v in given.items() if v is not None})
