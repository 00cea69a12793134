"""Unseen classes: the last ones are left out of everything but a test of their own, and the rest is as without them."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from fedbench.core.errors import FedbenchError
from fedbench.core.federation import Dataset, Federation, Split, TensorImages
from fedbench.scenarios import PRESETS, Scenario, build_federation
from fedbench.scenarios.labels import unseen_count

Make = Callable[..., Dataset]
TRAIN, TEST = (12, 9, 10, 8, 11), (4, 3, 5, 2, 6)
DOMAINS = ((9, 8, 10, 6, 7), (7, 9, 8, 10, 5), (8, 6, 7, 9, 11))


def numbers_of(split: Split) -> list[int]:
    """Which samples they are: an image holds its number in the data set."""
    pixels = split.images.read(torch.arange(len(split)))[:, :, 0, 0].int()
    return (256 * pixels[:, 0] + pixels[:, 1]).tolist()


def only(dataset: Dataset, classes: set[int]) -> Dataset:
    """The data set as if it had these classes alone, from 0 up, images copied: by hand, sample by sample."""

    def part(split: Split) -> Split:
        kept = torch.tensor([i for i, label in enumerate(split.labels.tolist()) if label in classes])
        domains = None if split.domains is None else split.domains[kept]
        return Split(TensorImages(split.images.read(kept)), split.labels[kept] - min(classes), domains)

    names = tuple(dataset.classnames[c] for c in sorted(classes))
    return replace(
        dataset, classnames=names, train=part(dataset.train), test=dataset.test and part(dataset.test), list_groups={}
    )


def facts(federation: Federation) -> dict[str, object]:
    """All that a federation is, but for the unseen classes."""
    splits = {"train": federation.train, "test": federation.test, "server": federation.server}
    splits["validation"] = federation.validation
    known = {name: split for name, split in splits.items() if split is not None}
    return {
        "clients": [client.indices.tolist() for client in federation.clients],
        "tested": [None if c.test_indices is None else c.test_indices.tolist() for c in federation.clients],
        "samples": {name: numbers_of(split) for name, split in known.items()},
        "labels": {name: split.labels.tolist() for name, split in known.items()},
        "domains": {name: split.domains is not None and split.domains.tolist() for name, split in known.items()},
        "names": (federation.classnames, federation.domain_names, federation.held_out_domain),
        "groups": dict(federation.groups),
    }


@pytest.mark.parametrize(
    ("classes", "share", "count"),
    [
        (10, 0.0, 0), (10, 0.5, 5), (10, 0.01, 1), (10, 0.26, 3), (10, 0.24, 2), (10, 0.8, 8), (3, 0.1, 1),
        # CoOp trains on ceil(K / 2): DTD's 47 classes are 24 and 23, Food-101's 51 and 50, the pets' 19 and 18
        (47, 0.5, 23), (101, 0.5, 50), (37, 0.5, 18), (39, 0.5, 19), (50, 0.29, 14), (50, 0.31, 15),
    ],
)  # fmt: skip
def test_the_share_is_rounded_with_halves_for_the_classes_that_are_trained_on(
    classes: int, share: float, count: int
) -> None:
    assert unseen_count(classes, share) == count


@pytest.mark.parametrize(("classes", "share", "left"), [(10, 0.9, 1), (10, 0.99, 0), (2, 0.1, 1)])
def test_two_classes_at_least_are_left_to_train_on(classes: int, share: float, left: int) -> None:
    with pytest.raises(FedbenchError, match=f"leaves {left} of {classes} classes to train on"):
        unseen_count(classes, share)


def test_the_split_by_hand(dataset: Make) -> None:
    data = dataset(TRAIN, TEST)
    federation = build_federation(data, Scenario(clients=2, unseen_classes=0.4), 0)
    assert federation.classnames == ("class0", "class1", "class2")
    assert federation.class_counts().tolist() == [12, 9, 10]
    assert torch.bincount(federation.test.labels).tolist() == [4, 3, 5]
    unseen = federation.unseen
    assert unseen is not None
    assert (unseen.classnames, unseen.num_classes) == (("class3", "class4"), 2)
    assert torch.bincount(unseen.test.labels).tolist() == [2, 6]
    # its samples are the test split's own of these classes, with their labels counted from 0
    assert data.test is not None
    expected = {n: label - 3 for n, label in zip(numbers_of(data.test), data.test.labels.tolist(), strict=True)}
    found = dict(zip(numbers_of(unseen.test), unseen.test.labels.tolist(), strict=True))
    assert found == {number: label for number, label in expected.items() if label >= 0}
    # neither the clients nor the splits they are scored on have one of them
    new = {
        n for split in (data.train, data.test) for n, c in zip(numbers_of(split), split.labels, strict=True) if c > 2
    }
    assert len(new) == 8 + 11 + 2 + 6
    assert not new & {*numbers_of(federation.train), *numbers_of(federation.test)}


SCENARIOS = {
    "iid": Scenario(clients=3),
    "dirichlet": Scenario(partition="dirichlet", clients=2, min_client_size=3),
    "long tail": Scenario(clients=2, imbalance="exponential", imbalance_factor=3, imbalance_order="shuffled"),
    "server": Scenario(clients=2, server_samples=2, imbalance="exponential", imbalance_factor=2),
    "tuning": Scenario(clients=2, validation=0.3),
    "shards": Scenario(partition="shards", clients=3, equal_sizes=True),
}
OF_DOMAINS = {
    "domains": Scenario(partition="domain"),
    "60/20/20": Scenario(partition="domain", domain_split="60/20/20", clients_per_domain=2),
    "held out": Scenario(partition="domain", holdout_domain="photo"),
    "held out in tuning": Scenario(partition="domain", holdout_domain="photo", validation=0.3),
    "iid over domains": Scenario(clients=3, server_samples=3),
}


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_everything_is_drawn_as_if_the_data_had_the_base_classes_alone(
    dataset: Make, scenario: Scenario, seed: int
) -> None:
    data = dataset(TRAIN, TEST)
    split = build_federation(data, scenario.model_copy(update={"unseen_classes": 0.4}), seed)
    alone = build_federation(only(data, {0, 1, 2}), scenario, seed)
    assert facts(split) == facts(alone)
    assert alone.unseen is None and (split.unseen is None) == bool(scenario.validation)


@pytest.mark.parametrize("own_test", [False, True])
@pytest.mark.parametrize("scenario", OF_DOMAINS.values(), ids=OF_DOMAINS)
def test_of_data_with_domains_too_and_the_unseen_are_tested_on_what_is_cut_for_testing(
    dataset: Make, scenario: Scenario, own_test: bool
) -> None:
    data = dataset(DOMAINS, ((4, 3, 5, 2, 6), (1, 2, 3, 4, 5), (5, 5, 4, 3, 2)) if own_test else None)
    split = build_federation(data, scenario.model_copy(update={"unseen_classes": 0.4}), 1)
    assert facts(split) == facts(build_federation(only(data, {0, 1, 2}), scenario, 1))
    if scenario.validation:
        assert split.unseen is None
        return
    new = build_federation(only(data, {3, 4}), scenario, 1)
    assert split.unseen is not None and split.unseen.test.domains is not None
    assert new.test.domains is not None
    assert numbers_of(split.unseen.test) == numbers_of(new.test)
    assert split.unseen.test.labels.tolist() == new.test.labels.tolist()
    assert split.unseen.test.domains.tolist() == new.test.domains.tolist()


def test_no_seed_of_a_run_tests_other_samples_of_unseen_classes(dataset: Make) -> None:
    data, scenario = dataset(DOMAINS), Scenario(partition="domain", unseen_classes=0.4)
    federations = [build_federation(data, scenario, seed) for seed in (0, 1)]
    found = [numbers_of(f.unseen.test) for f in federations if f.unseen is not None]
    assert len(found) == 2 and found[0] == found[1]
    # 80/20 of 6, 7 | 10, 5 | 9, 11 samples a domain
    assert len(found[0]) == (13 - 10) + (15 - 12) + (20 - 16)


def test_a_list_of_groups_keeps_the_base_classes_and_no_empty_group(dataset: Make) -> None:
    data = dataset(TRAIN, TEST, list_groups={"head": (1, 4), "mid": (0, 2), "tail": (3,)})
    scenario = Scenario(clients=2, imbalance="natural", unseen_classes=0.4)
    assert build_federation(data, scenario, 0).groups == {"head": (1,), "mid": (0, 2)}
    whole = build_federation(data, scenario.model_copy(update={"unseen_classes": 0.0}), 0)
    assert whole.groups == data.list_groups


def test_images_are_the_data_sets_by_index_so_that_features_are_kept_once(dataset: Make) -> None:
    test = ((4, 3, 5, 2, 6), (1, 2, 3, 4, 5), (5, 5, 4, 3, 2))
    data = dataset(DOMAINS, test)

    def root(split: Split) -> object:
        images = split.images
        while hasattr(images, "source"):
            images = images.source
        return images

    plain = build_federation(data, Scenario(clients=2, unseen_classes=0.4), 0)
    assert plain.unseen is not None and data.test is not None
    assert root(plain.train) is data.train.images
    assert root(plain.unseen.test) is root(plain.test) is data.test.images
    held_out = build_federation(data, Scenario(partition="domain", holdout_domain="art", unseen_classes=0.4), 0)
    assert held_out.unseen is not None
    assert root(held_out.unseen.test) is root(held_out.train) is root(held_out.test)


def test_unseen_classes_without_a_test_sample_are_refused(dataset: Make) -> None:
    data = dataset(TRAIN, (4, 3, 5, 0, 0))
    with pytest.raises(FedbenchError, match="no sample of the unseen classes class3, class4; set unseen_classes=0"):
        build_federation(data, Scenario(clients=2, unseen_classes=0.4), 0)


def test_the_preset_leaves_out_half_of_the_classes(dataset: Make) -> None:
    preset = PRESETS["base-to-new"]
    assert preset.model_copy(update={"unseen_classes": 0.0}) == PRESETS["label-skew"]
    data = dataset((60, 60, 60, 60, 60), TEST)
    federation = build_federation(data, preset.model_copy(update={"clients": 4}), 0)
    assert federation.num_classes == 3 and federation.unseen is not None and federation.unseen.num_classes == 2
