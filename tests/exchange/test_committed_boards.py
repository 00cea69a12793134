"""The result folders of this repository are in order. What their runs give again, `fedbench verify` tells."""

from pathlib import Path

import pytest

from fedbench_boards.exchange.checks import check_folder
from fedbench_boards.exchange.folder import MANIFEST

BOARDS = Path(__file__).parents[2] / "leaderboards"
FOLDERS = sorted(file.parent.name for file in BOARDS.glob(f"*/{MANIFEST}"))
OF_ANOTHER = {
    "longtail-tuned": "longtail",
    "label-skew-tuned": "label-skew",
    "feature-skew-tuned": "feature-skew",
    "unsupervised-cifar10": "unsupervised",
}
"""Folders that are not called like their suite: tuned, or on other data."""


def test_there_are_such_folders() -> None:
    assert FOLDERS


@pytest.mark.slow  # a board of 1,000 runs is computed again in 15 seconds
@pytest.mark.parametrize("name", FOLDERS)
def test_a_committed_board_is_in_order(name: str) -> None:
    checked = check_folder(BOARDS / name)
    assert checked.suite.name == OF_ANOTHER.get(name, name)
    assert all(commit and not commit.endswith("+dirty") for commit in checked.folder.results["commit"])
