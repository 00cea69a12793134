"""Fixtures for tests of the harness."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest

from fedbench.plugins import assembly as assemble


@dataclass(frozen=True, kw_only=True)
class NoParams:
    """None."""


class Mine:
    """A method that answers no hook."""

    name = "mine"
    citation = "Nobody, A paper that does not exist, 2000"
    Params = NoParams
    recipe: Mapping[str, object] = {}

    def __init__(self, params: NoParams) -> None:
        self.params = params


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Registers the method "mine" with the attributes given, and gives its name; its backbone is clip:embedded."""

    def register(**attributes: object) -> str:
        method = type("Mine", (Mine,), attributes)
        original = assemble.find_method
        for module in (
            "fedbench.plugins.assembly",
            "fedbench.testing",
            "fedbench.suites.resolve",
            "fedbench.runs.prepare",
        ):
            found = lambda name, plugin_files=(): method if name == "mine" else original(name, plugin_files)  # noqa: E731
            monkeypatch.setattr(f"{module}.find_method", found)
        monkeypatch.setattr("fedbench.testing.contract_backbone", lambda name: "clip:embedded")
        return "mine"

    return register
