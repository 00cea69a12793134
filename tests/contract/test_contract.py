"""The contract of `fedbench.testing`, over every registered method and a third party's."""

import pytest

from fedbench import testing
from fedbench.kinds.registry import find_method, method_names

THIRD_PARTY = "example-median"
METHODS = sorted({*method_names(), THIRD_PARTY})
CHECKS = [check for check in testing.CHECKS if check is not testing.check_resume]

pytestmark = pytest.mark.usefixtures("third_party")


EVERY_TIME = {"check_declaration", "check_hooks", "check_training"}
KINDS = {
    "fedavg",
    "promptfl",
    "clip2fl",
    "ditto",
    "fedadam",
    "fedpgp",
    "scaffold",
    "fedsam",
    "pseudo-labels",
    THIRD_PARTY,
}
"""Of every kind of method one or two: on these all of the contract is tried every time."""


@pytest.mark.parametrize(
    ("method", "check"),
    [
        pytest.param(
            method,
            check,
            id=f"{method}-{check.__name__}",
            marks=() if check.__name__ in EVERY_TIME or method in KINDS else pytest.mark.slow,
        )
        for method in METHODS
        for check in CHECKS
    ],
)
def test_method_keeps_the_contract(method, check):
    check(method)


KEEPING = ["fedconcat", "fedloge", "moon", "scaffold", THIRD_PARTY]
"""Of those that keep something from round to round, one of each kind."""


@pytest.mark.parametrize("methods", [KEEPING, pytest.param(METHODS, marks=pytest.mark.slow)], ids=["kinds", "all"])
def test_four_rounds_equal_two_rounds_saved_loaded_in_a_new_process_and_two_more(methods):
    testing.check_resumes(methods)


def test_third_party_method_is_found_by_name_and_listed():
    assert THIRD_PARTY in method_names()
    assert find_method(THIRD_PARTY).__module__ == "example_median"
