"""A run's description as flat text: what the tracking store keeps of it, and what a field that it lacks stands for."""

from __future__ import annotations

import json
from typing import Any

from fedbench.core.spec import RunSpec


def flat_params(spec: RunSpec) -> dict[str, str]:
    """The whole spec as text: ``scenario.*``, ``training.*``, ``METHOD.*``, the rest by name. None is ``none``."""
    content = spec.model_dump(mode="json")
    sections = {"": content, "scenario.": content.pop("scenario"), "training.": content.pop("training")}
    sections |= {f"{method}.": values for method, values in content.pop("params").items()}
    return {f"{head}{name}": _text(value) for head, values in sections.items() for name, value in values.items()}


def _text(value: Any) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


DEFAULTS = flat_params(RunSpec())
"""Every field's default as runs record it: a field that is younger than a run had no other effect then."""
