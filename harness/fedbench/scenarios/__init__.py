"""Scenarios: class imbalance, partition, splits, hidden labels and participation turn a data set into a federation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedbench.core.scenario import Scenario
from fedbench.scenarios.presets import PRESETS, scenario_named, scenario_names

if TYPE_CHECKING:
    from fedbench.core.federation import Dataset, Federation

__all__ = ["PRESETS", "Scenario", "build_federation", "scenario_named", "scenario_names"]


def build_federation(dataset: Dataset, scenario: Scenario, seed: int) -> Federation:
    """The federation that ``scenario`` makes of ``dataset``; the seeds and the arguments alone decide it."""
    from fedbench.scenarios.build import build  # imports torch, which listing and validating scenarios can do without

    return build(dataset, scenario, seed)
