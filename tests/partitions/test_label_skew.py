"""Properties every partition of labels shares, and those that tell the schemes apart."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from fedbench.core.errors import FedbenchError
from fedbench.scenarios.partitions.label_skew import (
    classes_equal,
    classes_round_robin,
    creff_equal,
    dirichlet_capped,
    dirichlet_clientwise,
    dirichlet_uncapped,
    iid,
    recut,
    shards_deck,
    shards_sorted,
)

Scheme = Callable[[np.ndarray, int, np.random.Generator], list[np.ndarray]]
CLASSES = 10
SCHEMES: dict[str, Scheme] = {
    "iid": iid,
    "shards_sorted": lambda y, n, rng: shards_sorted(y, n, 3, rng),
    "shards_deck": lambda y, n, rng: shards_deck(y, n, 3, rng),
    "classes_round_robin": lambda y, n, rng: classes_round_robin(y, n, 3, rng),
    "classes_equal": lambda y, n, rng: classes_equal(y, n, 3, rng),
    "creff_equal": lambda y, n, rng: creff_equal(y, n, 0.5, rng),
}
for _weight in (0.2, 0.5, 100.0):
    SCHEMES[f"capped-{_weight}"] = lambda y, n, rng, a=_weight: dirichlet_capped(y, n, a, 2, rng)
    SCHEMES[f"uncapped-{_weight}"] = lambda y, n, rng, a=_weight: dirichlet_uncapped(y, n, a, 2, rng)
    SCHEMES[f"clientwise-{_weight}"] = lambda y, n, rng, a=_weight: dirichlet_clientwise(y, n, a, 2, rng)


def labels_of(counts: list[int]) -> np.ndarray:
    return np.random.default_rng(5).permutation(np.repeat(np.arange(len(counts)), counts))


BALANCED = labels_of([61] * CLASSES)
IMBALANCED = labels_of([300, 200, 150, 100, 80, 60, 50, 40, 35, 31])


def class_shares(labels: np.ndarray, parts: list[np.ndarray]) -> np.ndarray:
    counts = np.array([np.bincount(labels[part], minlength=CLASSES) for part in parts])
    return counts / counts.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("clients", [10, 20])
@pytest.mark.parametrize("labels", [BALANCED, IMBALANCED], ids=["balanced", "imbalanced"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_clients_are_disjoint_nonempty_and_cover_the_data(
    name: str, clients: int, labels: np.ndarray, seed: int
) -> None:
    parts = SCHEMES[name](labels, clients, np.random.default_rng(seed))
    dealt = np.concatenate(parts)
    assert len(parts) == clients
    assert min(len(part) for part in parts) > 0
    assert len(np.unique(dealt)) == len(dealt)
    dropped = len(labels) % (clients * 3) if name == "shards_sorted" else 0
    assert len(dealt) == len(labels) - dropped


@pytest.mark.parametrize("name", SCHEMES)
def test_global_generators_are_untouched(name: str) -> None:
    before, torch_before = np.random.get_state(legacy=False), torch.random.get_rng_state()
    SCHEMES[name](BALANCED, 10, np.random.default_rng(0))
    after = np.random.get_state(legacy=False)
    assert str(before) == str(after) and np.array_equal(before["state"]["key"], after["state"]["key"])  # type: ignore
    assert torch.equal(torch_before, torch.random.get_rng_state())


# not those where position matters by protocol: the last client takes leftovers, client i starts at class i mod C
@pytest.mark.parametrize("name", ["iid", "shards_sorted", "shards_deck", "classes_equal", "capped-0.5", "uncapped-0.5"])
def test_no_client_is_favoured_by_its_number(name: str) -> None:
    """Over many seeds every client holds as much of class 0 in the mean."""
    dealt = [SCHEMES[name](BALANCED, 10, np.random.default_rng([9, seed])) for seed in range(400)]
    held = np.array([[np.sum(BALANCED[part] == 0) for part in parts] for parts in dealt])
    error = held.std() / np.sqrt(len(held))
    # up to half a sample apart: pieces are floored and the last client takes the rest
    assert np.abs(held.mean(axis=0) - 6.1).max() < 4 * error + 0.5


def test_iid_sizes_differ_by_at_most_one() -> None:
    assert {len(part) for part in iid(BALANCED, 7, np.random.default_rng(0))} == {87, 88}


@pytest.mark.parametrize("scheme", [dirichlet_capped, dirichlet_uncapped, dirichlet_clientwise])
def test_large_concentration_is_near_uniform(scheme: Callable[..., list[np.ndarray]]) -> None:
    labels = labels_of([1000] * CLASSES)
    parts = scheme(labels, 10, 1e5, 1, np.random.default_rng(0))
    # by class the shares are cut, by client every sample is drawn: ±2 % on 1000, and what is left for the last client
    assert np.abs(class_shares(labels, parts) - 0.1).max() < (0.1 if scheme is dirichlet_clientwise else 0.01)
    assert all(abs(len(part) - 1000) < 20 for part in parts)


def test_small_concentration_by_class_gives_each_class_one_owner() -> None:
    labels = labels_of([200] * CLASSES)
    for scheme in (dirichlet_uncapped, dirichlet_capped):
        dealt = [scheme(labels, 4, 0.02, 1, np.random.default_rng(seed)) for seed in range(20)]
        owned = [max(np.sum(labels[part] == c) / 200 for part in parts) for parts in dealt for c in range(CLASSES)]
        assert np.mean(owned) > 0.9


def test_small_concentration_by_client_gives_near_one_class() -> None:
    labels = labels_of([600] * CLASSES)
    firsts = [dirichlet_clientwise(labels, 10, 0.02, 1, np.random.default_rng(seed))[0] for seed in range(40)]
    assert class_shares(labels, firsts).max(axis=1).mean() > 0.95


def test_full_clients_get_nothing_from_later_classes() -> None:
    labels = labels_of([100] * CLASSES)
    for seed in range(50):
        parts = dirichlet_capped(labels, 8, 0.3, 2, np.random.default_rng(seed))
        counts = np.array([np.bincount(labels[part], minlength=CLASSES) for part in parts])
        held_before = np.cumsum(counts, axis=1) - counts
        assert (counts[held_before >= len(labels) / 8] == 0).all()
        assert counts.sum(axis=1).max() < len(labels) / 8 + 100


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("scheme", [dirichlet_capped, dirichlet_uncapped, dirichlet_clientwise])
def test_tiny_concentration_never_gives_nan(scheme: Callable[..., list[np.ndarray]], seed: int) -> None:
    """All of π on full clients would be 0/0; twelve classes for three clients meet it in most draws."""
    labels = labels_of([40] * 12)
    with np.errstate(all="raise"):
        parts = scheme(labels, 3, 0.001, 1, np.random.default_rng(seed))
    assert sorted(np.concatenate(parts).tolist()) == list(range(480))


@pytest.mark.parametrize("minimum", [10, 25])
def test_dirichlet_redraws_until_every_client_has_the_minimum(minimum: int) -> None:
    for seed in range(30):
        parts = dirichlet_uncapped(BALANCED, 10, 0.5, minimum, np.random.default_rng(seed))
        assert min(len(part) for part in parts) >= minimum


def test_dirichlet_says_which_numbers_make_the_minimum_impossible() -> None:
    with pytest.raises(FedbenchError, match="100 clients with at least 10 samples each need 1000, but there are 610"):
        dirichlet_capped(BALANCED, 100, 0.5, 10, np.random.default_rng(0))
    with pytest.raises(FedbenchError, match=r"dirichlet_alpha=0.001 never gave each of 20 clients at least 10 of 610 .*"
                       "raise dirichlet_alpha, or lower clients or min_client_size"):  # fmt: skip
        dirichlet_uncapped(BALANCED, 20, 0.001, 10, np.random.default_rng(0))


def test_clientwise_sizes_are_equal_and_skew_follows_the_prior() -> None:
    parts = dirichlet_clientwise(IMBALANCED, 10, 1e5, 1, np.random.default_rng(0))
    assert {len(part) for part in parts} == {104, 105}
    prior = np.bincount(IMBALANCED) / len(IMBALANCED)
    dealt = [dirichlet_clientwise(IMBALANCED, 10, 1e5, 1, np.random.default_rng(seed))[0] for seed in range(200)]
    assert np.abs(class_shares(IMBALANCED, dealt).mean(axis=0) - prior).max() < 0.01


def test_clientwise_first_client_draws_from_the_dirichlet() -> None:
    """Var of a share is p(1-p)/(α+1) for Dir(α·p), here .09/2, plus .09·(1/2)/25 of the multinomial draw."""
    labels = labels_of([500] * CLASSES)
    firsts = [dirichlet_clientwise(labels, 200, 1.0, 1, np.random.default_rng(seed))[0] for seed in range(150)]
    variance = class_shares(labels, firsts).var(axis=0).mean()
    assert variance == pytest.approx(0.045 + 0.0018, rel=0.1)


@pytest.mark.parametrize("clients", [10, 20, 25, 7])
def test_creff_sizes_are_equal_and_labels_skewed(clients: int) -> None:
    parts = creff_equal(BALANCED, clients, 0.5, np.random.default_rng(0))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1 and sum(sizes) == len(BALANCED)
    assert class_shares(BALANCED, parts).max(axis=1).mean() > 0.25


def test_creff_on_long_tailed_cifar10_gives_the_published_protocols_shape() -> None:
    """Measured once for the official draw (RandomState(7)): sizes 620/621, 5.3 classes a client, class 9 on 8 of 20."""
    labels = np.repeat(np.arange(10), [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50])
    draws = [creff_equal(labels, 20, 0.5, np.random.default_rng(seed)) for seed in range(40)]
    assert {len(part) for parts in draws for part in parts} == {620, 621}
    held = np.array([np.mean([len(np.unique(labels[part])) for part in parts]) for parts in draws])
    last = np.array([sum(9 in labels[part] for part in parts) for parts in draws])
    assert np.quantile(held, 0.01) < 5.3 < np.quantile(held, 0.99)
    assert np.quantile(last, 0.01) < 8 < np.quantile(last, 0.99)


def test_recut_keeps_samples_and_order() -> None:
    parts = recut([np.array([4, 1, 2]), np.array([0]), np.array([3, 5, 6])])
    assert [part.tolist() for part in parts] == [[4, 1, 2], [0, 3], [5, 6]]


@pytest.mark.parametrize("shards_per_client", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_deck_gives_at_most_s_labels_and_equal_sizes(shards_per_client: int, seed: int) -> None:
    parts = shards_deck(BALANCED, 20, shards_per_client, np.random.default_rng(seed))
    assert max(len(np.unique(BALANCED[part])) for part in parts) <= shards_per_client
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= shards_per_client  # each shard may carry one sample of the remainder


@pytest.mark.parametrize(("classes", "per_class", "shards", "sizes"), [
    (10, 5000, 2, {500}), (10, 5000, 3, {498, 499, 500, 501}), (100, 500, 10, {500}),
])  # fmt: skip
def test_deck_matches_fedntds_cifar_shards(classes: int, per_class: int, shards: int, sizes: set[int]) -> None:
    labels = np.repeat(np.arange(classes), per_class)
    assert {len(part) for part in shards_deck(labels, 100, shards, np.random.default_rng(0))} <= sizes


def test_sorted_shards_may_straddle_classes() -> None:
    parts = [shards_sorted(IMBALANCED, 10, 2, np.random.default_rng(seed)) for seed in range(10)]
    assert {len(part) for dealt in parts for part in dealt} == {2 * (len(IMBALANCED) // 20)}
    assert max(len(np.unique(IMBALANCED[part])) for dealt in parts for part in dealt) > 2


@pytest.mark.parametrize(("clients", "per_client"), [(20, 2), (20, 5), (10, 1), (10, 10), (100, 3), (5, 8)])
@pytest.mark.parametrize("seed", range(5))
def test_equal_classes_gives_exactly_c_labels_and_uses_every_class_equally(
    clients: int, per_client: int, seed: int
) -> None:
    parts = classes_equal(BALANCED, clients, per_client, np.random.default_rng(seed))
    held = class_shares(BALANCED, parts) > 0
    assert (held.sum(axis=1) == per_client).all()
    assert (held.sum(axis=0) == clients * per_client // CLASSES).all()
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= per_client


def test_equal_classes_pairs_classes_at_random() -> None:
    """Ten clients with two of ten classes: over seeds, a client holds each of the 45 pairs about equally often."""
    pairs = np.zeros((CLASSES, CLASSES))
    for seed in range(300):
        for part in classes_equal(BALANCED, 10, 2, np.random.default_rng(seed)):
            first, second = np.unique(BALANCED[part])
            pairs[first, second] += 1
    seen = pairs[np.triu_indices(CLASSES, 1)]
    assert seen.sum() == 3000 and np.abs(seen / 3000 - 1 / 45).max() < 0.01


@pytest.mark.parametrize("clients", [10, 20, 6])
def test_round_robin_gives_client_i_class_i_and_exactly_k_labels(clients: int) -> None:
    for seed in range(5):
        parts = classes_round_robin(BALANCED, clients, 3, np.random.default_rng(seed))
        for client, part in enumerate(parts):
            held = np.unique(BALANCED[part])
            assert len(held) == 3 and client % CLASSES in held


@pytest.mark.parametrize(("deal", "message"), [
    (lambda rng: shards_deck(BALANCED, 7, 2, rng),
     "partition 'shards' needs clients x shards_per_client divisible by the 10 classes, but 7 x 2 = 14 is not"),
    (lambda rng: classes_equal(BALANCED, 7, 2, rng),
     "needs clients x classes_per_client divisible by the 10 classes, but 7 x 2 = 14 is not; change clients or"),
    (lambda rng: classes_equal(BALANCED, 10, 11, rng), "classes_per_client=11 is more than the 10 classes"),
    (lambda rng: classes_round_robin(BALANCED, 3, 3, rng),
     "classes_per_client=3 with 3 clients leaves some of the 10 classes without a client; raise clients"),
    (lambda rng: shards_sorted(BALANCED, 400, 2, rng), "cannot cut 610 training samples into 400 clients x 2 shards"),
])  # fmt: skip
def test_impossible_numbers_are_refused(deal: Callable[[np.random.Generator], object], message: str) -> None:
    with pytest.raises(FedbenchError, match=message):
        deal(np.random.default_rng(0))
