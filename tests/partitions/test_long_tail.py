"""Exponential class counts against the totals and profiles that CLIP2FL's and CAPT's protocols publish."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fedbench.core.errors import FedbenchError
from fedbench.core.federation import Dataset
from fedbench.scenarios import Scenario, build_federation
from fedbench.scenarios.labels import exponential_counts, thin


@pytest.mark.parametrize(
    ("largest", "classes", "factor", "total"),
    [
        (5000, 10, 100, 12_406), (5000, 10, 50, 13_996), (5000, 10, 10, 20_431),
        (500, 100, 100, 10_847), (500, 100, 50, 12_608), (500, 100, 10, 19_573),
        (6000, 10, 100, 14_886), (6000, 10, 50, 16_796), (6000, 10, 10, 24_516),
    ],
)  # fmt: skip
def test_totals_are_the_published_ones(largest: int, classes: int, factor: float, total: int) -> None:
    counts = exponential_counts(largest, classes, factor)
    assert counts.sum() == total
    assert counts[0] == largest and counts[-1] == largest / factor
    assert (np.diff(counts) <= 0).all()


@pytest.mark.parametrize(
    ("factor", "counts"),
    [
        (100, [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]),
        (50, [5000, 3237, 2096, 1357, 878, 568, 368, 238, 154, 100]),
        (10, [5000, 3871, 2997, 2320, 1796, 1391, 1077, 834, 645, 500]),
    ],
)
def test_cifar10_counts_are_the_published_ones(factor: float, counts: list[int]) -> None:
    assert exponential_counts(5000, 10, factor).tolist() == counts


def test_counts_that_are_whole_numbers_lose_nothing_to_float_error() -> None:
    """The rule in whole numbers: the largest m with m^(C-1) IF^c <= n^(C-1), over profiles where floats fall short."""
    short = 0
    for largest in range(100, 2001, 100):
        for classes in (2, 3, 6, 11):
            for factor in (2, 5, 10, 16, 32, 50, 100):
                counts = exponential_counts(largest, classes, factor).tolist()
                steps = classes - 1
                for rank, count in enumerate(counts):
                    assert count**steps * factor**rank <= largest**steps < (count + 1) ** steps * factor**rank
                    short += int(largest * (1 / factor) ** (rank / steps)) < count
    assert short > 0  # the plain formula does fall short somewhere, so the test can see it


def test_two_classes_and_one_class_are_fine() -> None:
    assert exponential_counts(10, 1, 100).tolist() == [10]
    assert exponential_counts(100, 2, 20).tolist() == [100, 5]


def test_thinning_keeps_a_random_subset_in_the_given_order() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(4), [30, 20, 25, 40]))
    kept = thin(labels, np.array([2, 0, 3, 1]), 8, np.random.default_rng(1))
    assert np.bincount(labels[kept]).tolist() == [10, 2, 20, 5]  # from 20, the smallest class: 20, 10, 5, 2 by rank
    assert len(np.unique(kept)) == len(kept)
    other = thin(labels, np.array([2, 0, 3, 1]), 8, np.random.default_rng(2))
    assert kept.tolist() != other.tolist()


def test_factor_one_keeps_a_balanced_set_whole() -> None:
    labels = np.repeat(np.arange(5), 12)
    assert thin(labels, np.arange(5), 1, np.random.default_rng(0)).tolist() == list(range(60))


def test_federation_is_thinned_and_its_test_set_is_not(dataset: Callable[..., Dataset]) -> None:
    data = dataset([200] * 10, test=[20] * 10)
    scenario = Scenario(imbalance="exponential", imbalance_factor=100, clients=4)
    federation = build_federation(data, scenario, seed=0)
    assert federation.class_counts().tolist() == exponential_counts(200, 10, 100).tolist()
    assert federation.test is data.test


def test_shuffled_order_moves_the_head_with_the_seed(dataset: Callable[..., Dataset]) -> None:
    data = dataset([200] * 10, test=[20] * 10)
    scenario = Scenario(imbalance="exponential", imbalance_order="shuffled", clients=4)
    counts = [build_federation(data, scenario, seed).class_counts().tolist() for seed in range(4)]
    assert all(sorted(c, reverse=True) == exponential_counts(200, 10, 100).tolist() for c in counts)
    assert len({c.index(200) for c in counts}) > 1


def test_impossible_tails_are_refused() -> None:
    labels = np.repeat(np.arange(3), [50, 60, 70])
    with pytest.raises(FedbenchError, match="imbalance_factor=100 leaves the smallest class without .* at most 50"):
        thin(labels, np.arange(3), 100, np.random.default_rng(0))
    with pytest.raises(FedbenchError, match="class 3 has no training sample"):
        thin(labels, np.arange(4), 10, np.random.default_rng(0))
