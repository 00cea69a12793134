"""What tuning measures on: samples cut from training data before thinning, with the test split out of reach."""

import numpy as np
import pytest
import torch

from fedbench.core.errors import FedbenchError
from fedbench.core.federation import Dataset, Federation, Split, TensorImages
from fedbench.scenarios import Scenario, build_federation

CLASSES = ("ant", "bee", "cat")


def numbered(labels: list[int], first: int, domains: list[int] | None = None) -> Split:
    """A split whose images hold their own number, so that a sample is known wherever it turns up."""
    numbers = torch.arange(first, first + len(labels))
    pixels = numbers.to(torch.uint8).reshape(-1, 1, 1, 1).expand(-1, 3, 1, 1).contiguous()
    return Split(TensorImages(pixels), torch.tensor(labels), None if domains is None else torch.tensor(domains))


def dataset(train: Split, test: Split | None, domains: tuple[str, ...] = ()) -> Dataset:
    return Dataset("toy", CLASSES, train, test, "0" * 64, domains)


def numbers_of(split: Split) -> set[int]:
    return set(split.images.read(torch.arange(len(split)))[:, 0, 0, 0].tolist())


def trained_on(federation: Federation) -> set[int]:
    indices = torch.cat([shard.indices for shard in federation.clients])
    return set(federation.train.images.read(indices)[:, 0, 0, 0].tolist())


# 40, 20 and 10 samples of the three classes; the test split's samples are numbers 200 and up
LABELS = [0] * 40 + [1] * 20 + [2] * 10
PLAIN = dataset(numbered(LABELS, 0), numbered([0, 1, 2] * 5, 200))


def test_the_scored_samples_are_training_samples_and_no_client_has_them() -> None:
    federation = build_federation(PLAIN, Scenario(clients=2, validation=0.2), seed=0)
    scored, trained = numbers_of(federation.test), trained_on(federation)
    assert scored | trained == set(range(70))
    assert not scored & trained
    assert np.bincount(federation.test.labels).tolist() == [8, 4, 2]


def test_it_is_cut_before_the_classes_are_thinned_so_it_keeps_its_balance() -> None:
    even = dataset(numbered([0, 1, 2] * 20, 0), numbered([0, 1, 2], 200))
    scenario = Scenario(clients=2, imbalance="exponential", imbalance_factor=4, validation=0.25)
    federation = build_federation(even, scenario, seed=0)
    assert np.bincount(federation.test.labels).tolist() == [5, 5, 5]
    assert federation.class_counts().tolist() == [15, 7, 3]  # 15 remain of 20: 15, floor(15 / 2), floor(15 / 4)


@pytest.mark.parametrize(
    ("count", "share", "aside"), [(2, 0.01, 1), (2, 0.99, 1), (1, 0.5, 0), (5, 0.5, 2), (7, 0.5, 4)]
)
def test_a_class_gives_its_rounded_share_but_at_least_one_sample_and_never_its_last(
    count: int, share: float, aside: int
) -> None:
    data = dataset(numbered([0] * 10 + [1] * count, 0), numbered([0, 1], 200))
    federation = build_federation(data, Scenario(clients=1, validation=share), seed=0)
    assert int((federation.test.labels == 1).sum()) == aside


def test_every_domain_gives_its_share_and_a_held_out_domain_none() -> None:
    domains = [0, 1, 2] * 20
    data = dataset(numbered([0, 0, 0, 1, 1, 1] * 10, 0, domains), None, ("art", "cartoon", "photo"))
    scenario = Scenario(partition="domain", holdout_domain="photo", validation=0.25)
    federation = build_federation(data, scenario, seed=0)
    assert federation.test.domains is not None
    # 80 % of 20 samples a domain train, 8 of each class on average; a quarter of each class and domain is set aside
    assert sorted(set(federation.test.domains.tolist())) == [0, 1]
    assert federation.held_out_domain is None
    untuned = build_federation(data, scenario.model_copy(update={"validation": 0.0}), seed=0)
    assert not numbers_of(federation.test) & numbers_of(untuned.test)
    assert numbers_of(federation.test) | trained_on(federation) == trained_on(untuned)
    first = federation.clients[0]
    assert first.test_indices is not None
    assert set(federation.test.domains[first.test_indices].tolist()) == {0}


def test_the_same_seed_sets_the_same_samples_aside_and_zero_changes_nothing() -> None:
    scenario = Scenario(clients=2, validation=0.2)
    again = [numbers_of(build_federation(PLAIN, scenario, seed).test) for seed in (0, 0, 1)]
    assert again[0] == again[1] != again[2]
    assert numbers_of(build_federation(PLAIN, Scenario(clients=2), 0).test) == set(range(200, 215))


def test_the_test_split_has_no_influence() -> None:
    poisoned = dataset(PLAIN.train, numbered([2] * 9, 220))
    kept = build_federation(PLAIN, Scenario(clients=3, validation=0.2), seed=3)
    other = build_federation(poisoned, Scenario(clients=3, validation=0.2), seed=3)
    assert numbers_of(kept.test) == numbers_of(other.test)
    assert [c.indices.tolist() for c in kept.clients] == [c.indices.tolist() for c in other.clients]


def test_classes_of_one_sample_each_cannot_be_tuned_on() -> None:
    single = dataset(numbered([0, 1, 2], 0), numbered([0], 200))
    with pytest.raises(FedbenchError, match="two training samples"):
        build_federation(single, Scenario(clients=1, validation=0.5), seed=0)


def test_what_is_tuned_on_one_seed_has_seen_no_test_sample_of_another() -> None:
    domains = [0, 1] * 60
    data = dataset(numbered([0, 0, 1, 1, 2, 2] * 20, 0, domains), None, ("art", "photo"))
    for scenario in (
        Scenario(clients=2),
        Scenario(partition="domain", domain_split="60/20/20", holdout_domain="photo"),
    ):
        tested = [numbers_of(build_federation(data, scenario, seed).test) for seed in range(4)]
        tuning = build_federation(data, scenario.model_copy(update={"validation": 0.2}), seed=9)
        assert not (numbers_of(tuning.test) | trained_on(tuning)) & set.union(*tested)


def test_groups_mean_the_same_classes_with_and_without_samples_set_aside() -> None:
    data = dataset(numbered([0] * 110 + [1] * 24 + [2] * 10, 0), numbered([0, 1, 2], 200))
    scenario = Scenario(clients=1, imbalance="natural", groups="shots")
    groups = {"many": (0,), "medium": (1,), "few": (2,)}
    assert build_federation(data, scenario, seed=0).groups == groups
    aside = build_federation(data, scenario.model_copy(update={"validation": 0.3}), seed=0)
    assert aside.groups == groups
    assert aside.class_counts().tolist() == [77, 17, 7]


def test_every_domain_of_a_class_gives_its_share() -> None:
    # class 0: 20 in the first domain, 5 in the second; class 1 the other way round
    domains = [0] * 20 + [1] * 5 + [0] * 5 + [1] * 20
    data = dataset(numbered([0] * 25 + [1] * 25, 0, domains), numbered([0, 1], 200, [0, 1]), ("art", "photo"))
    test = build_federation(data, Scenario(clients=1, validation=0.2), seed=0).test
    assert test.domains is not None
    cells = np.zeros((2, 2), dtype=int)
    np.add.at(cells, (test.labels.numpy(), test.domains.numpy()), 1)
    assert cells.tolist() == [[4, 1], [1, 4]]
