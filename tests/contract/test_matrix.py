"""Methods compose: pairs and triples run with all of the contract, or are refused in a sentence."""

import pytest

from fedbench.testing import check_executors
from tests.contract import matrix

AT_ONCE = ("promptfl+ditto", "fedglcl+fedper", "fedavgm+promptfl+ditto", "fedclip+fedrep")
"""Whose executors are compared: stacks of every kind that train a cohort at once, or can't."""


def test_every_pair_and_triple_of_today_is_recorded():
    assert sorted(matrix.recorded()) == sorted({*matrix.pairs(), *matrix.triples()}), (
        "run python -m tests.contract.matrix"
    )


def test_the_tables_in_the_readme_are_those_of_the_record():
    text = matrix.README.read_text(encoding="utf-8")
    shown = text.partition(matrix.BEGIN)[2].partition(matrix.END)[0].strip()
    assert shown == matrix.tables(matrix.recorded())


def some(stacks, every):
    return sorted(stacks)[::every]


@pytest.mark.parametrize("composed", [*some(matrix.pairs(), 41), *some(matrix.triples(), 29)])
def test_some_stacks_are_as_recorded(composed):
    assert matrix.verdict(composed) == matrix.recorded()[composed]


@pytest.mark.slow
def test_every_stack_is_as_recorded():
    verdicts, faults = matrix.found(sorted(matrix.recorded()))
    assert not faults
    assert verdicts == matrix.recorded()


@pytest.mark.parametrize("composed", AT_ONCE)
def test_both_executors_agree(composed):
    check_executors(composed)


def test_no_stack_of_known_parts_is_refused_for_want_of_a_reason():
    """A refusal names a method of the stack, and says what is in the way."""
    for composed, text in matrix.recorded().items():
        if text:
            assert text.endswith("."), (composed, text)
            assert len(text) > 40, (composed, text)
