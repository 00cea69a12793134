"""Axes of a suite: a setting of the grid for every combination of their values."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

from fedbench.core.errors import FedbenchError
from fedbench.suites.files import Lines, line_of

GRID = "grid"
"""The scale that axes make."""
MOST = 1000
"""Settings of one grid."""
Axes = dict[str, dict[str, dict[str, Any]]]
"""Axis -> name of a value -> the settings that it stands for, as in --set."""


def read_axes(given: Any) -> Axes:
    """``{dirichlet_alpha: [0.1, 1]}``, or ``{skew: {strong: {dirichlet_alpha: 0.1}, none: {partition: iid}}}``.

    FedbenchError for an axis without two different values, and for too many settings.
    """
    if not isinstance(given, Mapping) or not given:
        raise FedbenchError("axes are a mapping from a setting to its values, such as {dirichlet_alpha: [0.1, 1]}.")
    axes = {str(axis): _values(str(axis), values) for axis, values in given.items()}
    count = 1
    for values in axes.values():
        count *= len(values)
    if count > MOST:
        raise FedbenchError(f"the axes {', '.join(axes)} make {count} settings; at most {MOST} are run.")
    return axes


def _values(axis: str, values: Any) -> dict[str, dict[str, Any]]:
    if isinstance(values, Mapping) and all(isinstance(sets, Mapping) and sets for sets in values.values()):
        found = {_text(name): dict(sets) for name, sets in values.items()}
    elif isinstance(values, list) and not any(isinstance(value, (list, Mapping)) for value in values):
        found = {_text(value): {axis: value} for value in values}
    else:
        raise FedbenchError(
            f"axis {axis!r} has neither a list of values nor a mapping from names to settings, such as [0.1, 1] or "
            "{strong: {dirichlet_alpha: 0.1}, none: {partition: iid}}."
        )
    if len(found) < max(2, len(values)):
        raise FedbenchError(f"axis {axis!r} needs two values at least, all different.")
    return found


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def place_name(at: Mapping[str, str]) -> str:
    """What the setting is called at these values of the axes: ``dirichlet_alpha=0.1, imbalance_factor=10``."""
    return ", ".join(f"{axis.rpartition('.')[2]}={value}" for axis, value in at.items())


def places(axes: Axes) -> dict[str, dict[str, str]]:
    """Name of a setting -> its value of every axis; the last axis changes fastest."""
    choices = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    return {place_name(at): at for at in choices}


def gridded(content: Mapping[str, Any], where: str, lines: Lines) -> dict[str, Any]:
    """A suite's ``content`` whose axes, where it has some, are a scale of settings as well.

    ``where`` is the file's name in errors, ``lines`` the lines of its parts.
    """
    if "axes" not in content:
        return dict(content)
    place = f"{where}, line {line_of(lines, ('axes',))}, axes"
    if "scales" in content:
        raise FedbenchError(f"{place}: a suite has axes or scales, not both; what all settings share is the suite's.")
    try:
        axes = read_axes(content["axes"])
    except FedbenchError as error:
        raise FedbenchError(f"{place}: {error}") from None
    settings: list[dict[str, Any]] = []
    for name, at in places(axes).items():
        sets: dict[str, Any] = {}
        for axis, value in at.items():
            twice = sets.keys() & axes[axis][value].keys()
            if twice:
                raise FedbenchError(f"{place}: two axes set {min(twice)}; leave it to one.")
            sets |= axes[axis][value]
        alike = next((other["name"] for other in settings if other["set"] == sets), None)
        if alike is not None:
            raise FedbenchError(f"{place}: {name!r} and {alike!r} are the same setting.")
        settings.append({"name": name, "set": sets})
    return {**content, "axes": axes, "scales": {GRID: {"settings": settings}}}
