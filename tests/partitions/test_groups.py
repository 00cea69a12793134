"""The five rules for head / mid / tail against the group sizes that the papers' tables and codes imply."""

from __future__ import annotations

import numpy as np
import pytest

from fedbench.scenarios.groups import by_count, cumulative_exclusive, cumulative_inclusive, reporting_groups, thirds
from fedbench.scenarios.labels import exponential_counts

CIFAR10, FASHION, CIFAR100 = (5000, 10), (6000, 10), (500, 100)


def sizes(groups: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(len(classes) for classes in groups.values())


@pytest.mark.parametrize(
    ("data", "factor", "expected"),
    [
        (CIFAR10, 100, (2, 3, 5)), (CIFAR10, 50, (3, 3, 4)), (CIFAR10, 10, (4, 4, 2)),
        (FASHION, 100, (2, 3, 5)), (FASHION, 50, (3, 3, 4)), (FASHION, 10, (4, 4, 2)),
        (CIFAR100, 100, (29, 31, 40)), (CIFAR100, 50, (33, 34, 33)), (CIFAR100, 10, (48, 35, 17)),
    ],
)  # fmt: skip
def test_capt_puts_the_crossing_class_in_the_next_group(
    data: tuple[int, int], factor: float, expected: tuple[int, ...]
) -> None:
    assert sizes(cumulative_exclusive(exponential_counts(*data, factor))) == expected


@pytest.mark.parametrize(
    ("data", "factor", "expected"),
    [
        (CIFAR10, 100, (3, 3, 4)), (CIFAR10, 50, (4, 3, 3)), (CIFAR10, 10, (5, 4, 1)),
        (CIFAR100, 100, (30, 31, 39)), (CIFAR100, 50, (34, 34, 32)), (CIFAR100, 10, (49, 35, 16)),
    ],
)  # fmt: skip
def test_fedloge_puts_the_crossing_class_in_the_earlier_group(
    data: tuple[int, int], factor: float, expected: tuple[int, ...]
) -> None:
    assert sizes(cumulative_inclusive(exponential_counts(*data, factor))) == expected


def test_fedloges_cifar10_groups_by_class() -> None:
    groups = cumulative_inclusive(exponential_counts(*CIFAR10, 100))
    assert groups == {"head": (0, 1, 2), "mid": (3, 4, 5), "tail": (6, 7, 8, 9)}


@pytest.mark.parametrize(("factor", "expected"), [(100, (35, 35, 30)), (50, (41, 41, 18))])
def test_shots_on_cifar100(factor: float, expected: tuple[int, ...]) -> None:
    assert sizes(reporting_groups(exponential_counts(*CIFAR100, factor), "shots")) == expected


def test_an_empty_group_is_absent() -> None:
    assert set(reporting_groups(exponential_counts(*CIFAR100, 10), "shots")) == {"many", "medium"}


def test_shots_include_both_ends_of_medium() -> None:
    groups = by_count(np.array([101, 100, 20, 19]), few_below=20, many_above=100)
    assert groups == {"many": (0,), "medium": (1, 2), "few": (3,)}


def test_clip2fl_on_cifar10() -> None:
    groups = reporting_groups(exponential_counts(*CIFAR10, 100), "clip2fl")
    assert groups == {"many": (0, 1, 2), "medium": (3, 4, 5, 6), "few": (7, 8, 9)}
    ends = reporting_groups(np.array([1501, 1500, 200, 199]), "clip2fl")
    assert ends == {"many": (0,), "medium": (1, 2), "few": (3,)}


@pytest.mark.parametrize(("classes", "expected"), [(10, (3, 4, 3)), (20, (6, 8, 6)), (7, (2, 3, 2)), (3, (3,))])
def test_thirds_take_thirty_percent_at_each_end(classes: int, expected: tuple[int, ...]) -> None:
    assert sizes(thirds(np.arange(classes, 0, -1))) == expected


@pytest.mark.parametrize("rule", ["cumulative_exclusive", "cumulative_inclusive", "shots", "clip2fl", "thirds"])
def test_groups_follow_the_counts_whatever_the_class_order(rule: str) -> None:
    counts = exponential_counts(*CIFAR10, 100)
    order = np.random.default_rng(0).permutation(10)
    plain, moved = reporting_groups(counts, rule), reporting_groups(counts[order], rule)  # type: ignore[arg-type]
    assert {name: {int(order[c]) for c in classes} for name, classes in moved.items()} == {
        name: set(classes) for name, classes in plain.items()
    }
    assert sorted(c for classes in moved.values() for c in classes) == list(range(10))


def test_a_class_that_lands_on_a_threshold_belongs_to_the_earlier_group() -> None:
    """Shares 50, 75, 95, 100 %: nothing crosses before it is full, so both cumulative rules agree."""
    counts = np.array([50, 25, 20, 5])
    expected = {"head": (0, 1), "mid": (2,), "tail": (3,)}
    assert cumulative_exclusive(counts) == expected
    assert cumulative_inclusive(counts) == expected
