"""The partition that a scenario names."""

from __future__ import annotations

from typing import cast

from fedbench.core.scenario import Scenario
from fedbench.kinds.kinds import AnyPartition
from fedbench.kinds.registry import build


def partition_of(scenario: Scenario) -> tuple[AnyPartition, str]:
    """The partition of ``scenario`` with its parameters, and the text behind the colon.

    FedbenchError for an unknown name, and for options that the partition does not take.
    """
    partition, location = build("partition", scenario.partition)
    return cast(AnyPartition, partition), location


def partition_digest(scenario: Scenario) -> str:
    """A hash of the files that the partition depends on besides data and seed; "" if there are none."""
    partition, location = partition_of(scenario)
    return partition.digest(location)
