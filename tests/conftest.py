"""Fixtures for all tests."""

import os
from pathlib import Path

import pytest


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``slow`` may take as long as they need."""
    for item in items:
        if item.get_closest_marker("slow") is not None:
            item.add_marker(pytest.mark.timeout(0))
