"""Runs without a suite file: the suite that they make, and what they are filed under: what was asked for."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

from fedbench.core.scenario import Scenario
from fedbench.core.spec import BUDGET, RunSpec, Training
from fedbench.scenarios.presets import PRESETS
from fedbench.suites.suite import Row, Suite

ADHOC = "adhoc"
"""The suite of all runs without a suite file, and what the names of its groups begin with: ``adhoc/label-skew``."""


def single(scenario: str | None = None, dataset: str | None = None, backbone: str | None = None) -> Suite:
    """The suite of a run without a suite file: the methods come from the command line."""
    given: dict[str, Any] = {"dataset": dataset, "backbone": backbone, "scenario": scenario}
    return Suite(name=ADHOC, rows=(Row(method="fedavg"),), **{k: v for k, v in given.items() if v is not None})


def group_of(spec: RunSpec) -> str:
    """What a run without a suite file is filed under: ``adhoc/label-skew/embedded/dirichlet_alpha=0.1,rounds=5``.

    The scenario nearest to the run's, the data set, and in what the run differs from that scenario and the usual
    budget: what runs of one table share. Other methods, backbones, optimisers and seeds are of the same group.
    """
    head = _head(spec.scenario.partition)
    near = [name for name, preset in PRESETS.items() if _head(preset.partition) == head] or ["iid"]
    differing = {name: _differing(spec.scenario, PRESETS[name]) for name in near}
    scenario = min(near, key=lambda name: (len(differing[name]), _foreign(PRESETS[name], differing[name])))
    budget = {name: value for name, value in _differing(spec.training, Training()).items() if name in BUDGET}
    settings = ",".join(f"{name}={_text(value)}" for name, value in (differing[scenario] | budget).items())
    return "/".join(filter(None, [ADHOC, scenario, spec.dataset, settings]))


def asked_for(suite: str, specs: Iterable[RunSpec]) -> str:
    """By what name runs of the suite are read again: its own, or what the groups of runs without a suite file share."""
    if suite != ADHOC:
        return suite
    return "/".join(os.path.commonprefix([group_of(spec).split("/") for spec in specs])) or ADHOC


def may_hold(experiment: str, suite: str | None) -> bool:
    """Whether runs that are read as ``suite`` (None: all) may be among those filed under ``experiment``."""
    return suite is None or suite == experiment or (experiment == ADHOC and _is_group(suite))


def is_read_as(name: str, suite: str | None) -> bool:
    """Whether what is called ``name`` is read as ``suite``: it is so called, or is a group in it."""
    return suite in (None, name) or (suite == ADHOC or _is_group(suite)) and name.startswith(f"{suite}/")


def _is_group(suite: str | None) -> bool:
    return suite is not None and suite.startswith(f"{ADHOC}/")


def _differing(one: BaseModel, other: BaseModel) -> dict[str, Any]:
    return {name: value for name, value in one if value != getattr(other, name)}


def _head(partition: str) -> str:
    return partition.partition("?")[0].partition(":")[0]


def _foreign(preset: Scenario, differing: Iterable[str]) -> int:
    """How many of the fields the preset leaves at their defaults: other ``label_noise`` is nearer to noisy-labels."""
    return len(set(differing) - set(_differing(preset, Scenario())))


def _text(value: object) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
