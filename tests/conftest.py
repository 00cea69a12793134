"""Fixtures for all tests."""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedbench.core.files import name_once
from fedbench.kinds import registry

LONGEST = ("api", "browser", "cli", "contract", "golden", "tuning")
"""Folders with files that take half a minute: handed out last, one of them would leave the other worker idle."""


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data that some tests read; they are skipped where there is none.

    ``FEDBENCH_SHARED`` names the folder that holds ``data``; by default it is ``shared`` beside the repository.
    """
    beside = Path(__file__).resolve().parents[2] / "shared"
    folder = Path(os.environ.get("FEDBENCH_SHARED", beside)) / "data"
    if not folder.is_dir():
        pytest.skip(f"no real data in {folder}; set FEDBENCH_SHARED to a folder with data/cifar10 and data/pacs128.tar")
    return folder


def pytest_addoption(parser: pytest.Parser) -> None:
    """A flag of its own, so that recorded numbers are never rewritten by accident."""
    parser.addoption("--update-golden", action="store_true", help="rewrite the recorded numbers of tests/golden")


def pytest_configure(config: pytest.Config) -> None:
    """Files are handed to workers in the order that `pytest_collection_modifyitems` gives them."""
    if hasattr(config.option, "loadscopereorder"):  # with pytest-xdist
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first. Tests marked ``slow`` may take as long as they need."""
    items.sort(key=lambda item: item.path.parent.name not in LONGEST)
    for item in items:
        if item.get_closest_marker("slow") is not None:
            item.add_marker(pytest.mark.timeout(0))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """MLflow's migrations of an empty database take a second or two: they run once, further stores are copies."""
    store = sys.modules.get("fedbench.tracking.store")
    if store is None or isinstance(store._create, Copies):
        return
    store._create = Copies(store._create)


class Copies:
    """Creates a database as ``create`` does, for the first time by it and then as a copy."""

    def __init__(self, create: Callable[[Path], None]) -> None:
        self.create = create
        self.template = b""

    def __call__(self, database: Path) -> None:
        if not self.template:
            self.create(database)
            self.template = database.read_bytes()
            return
        database.parent.mkdir(parents=True, exist_ok=True)
        unfinished = database.with_name(f"{database.name}.{os.getpid()}")
        unfinished.write_bytes(self.template)
        name_once(unfinished, database)
        unfinished.unlink(missing_ok=True)


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
        monkeypatch.setitem(registry._OWN, ("method", "mine"), method)
        monkeypatch.setattr("fedbench.testing.tiny.contract_backbone", lambda name: "clip:embedded")
        return "mine"

    return register
