"""Final metrics of a run, as two places have them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fedbench.tracking.schema import FINAL

_TIMINGS = "seconds"
"""Part of the names of metrics that describe how fast a machine was."""


def finals(values: Mapping[Any, Any]) -> dict[str, float]:
    """The final metrics among ``values`` by their whole names, timings aside."""
    return {
        str(name): value for name, value in values.items() if str(name).startswith(FINAL) and _TIMINGS not in str(name)
    }


def differing(one: Mapping[str, float], other: Mapping[str, float]) -> Iterator[str]:
    """The metrics, in order, whose values differ, or that only one of them has; NaN equals NaN."""
    for name in sorted({*one, *other}):
        values = one.get(name), other.get(name)
        if values[0] != values[1] and not all(value is not None and value != value for value in values):
            yield name
