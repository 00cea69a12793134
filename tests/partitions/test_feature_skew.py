"""One domain a client, splits by domain, and leave-one-domain-out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from fedbench.core.errors import FedbenchError
from fedbench.core.federation import Dataset, Split, TensorImages
from fedbench.scenarios import Scenario, build_federation, scenario_named
from fedbench.scenarios.partitions.feature_skew import Joined, cut_domain

THREE_DOMAINS = [[20, 30, 50], [10, 10, 13], [40, 41, 20]]
LODO = scenario_named("leave-one-domain-out")


def numbers(split: Split, indices: torch.Tensor | None = None) -> list[int]:
    """Which samples a split holds, read from their images."""
    where = torch.arange(len(split)) if indices is None else indices
    pixels = split.images.read(where).long()
    return sorted((pixels[:, 0, 0, 0] * 256 + pixels[:, 1, 0, 0]).tolist())


@pytest.mark.parametrize(
    ("n", "train", "test"),
    [(958, 766, 192), (1123, 898, 225), (157, 125, 32), (295, 236, 59), (2629, 2103, 526), (3283, 2626, 657),
     (3091, 2472, 619), (5000, 4000, 1000), (6084, 4867, 1217), (2767, 2213, 554)],
)  # fmt: skip
def test_80_20_sizes_are_those_of_the_distributed_lists(n: int, train: int, test: int) -> None:
    """Office-Caltech-10 (A, C, D, W) and DomainNet (C, I, P, Q, R, S) lists of FedBN."""
    parts = cut_domain(np.arange(n), "80/20", np.random.default_rng(0))
    assert [len(part) for part in parts] == [train, 0, test]


def test_60_20_20_floors_train_and_validation() -> None:
    parts = cut_domain(np.arange(2048), "60/20/20", np.random.default_rng(0))  # PACS art painting
    assert [len(part) for part in parts] == [1228, 409, 411]
    assert sorted(np.concatenate(parts).tolist()) == list(range(2048))


@pytest.mark.parametrize("clients_per_domain", [1, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_each_client_has_one_domain(dataset: Callable[..., Dataset], clients_per_domain: int, seed: int) -> None:
    scenario = Scenario(partition="domain", clients_per_domain=clients_per_domain)
    federation = build_federation(dataset(THREE_DOMAINS), scenario, seed)
    assert len(federation.clients) == 3 * clients_per_domain
    assert federation.train.domains is not None and federation.test.domains is not None
    for shard in federation.clients:
        domain = shard.id // clients_per_domain
        assert shard.test_indices is not None and shard.validation_indices is None
        assert set(federation.train.domains[shard.indices].tolist()) == {domain}
        assert set(federation.test.domains[shard.test_indices].tolist()) == {domain}
    dealt = torch.cat([shard.indices for shard in federation.clients])
    assert sorted(dealt.tolist()) == list(range(len(federation.train)))
    assert sorted(numbers(federation.train) + numbers(federation.test)) == list(range(234))
    assert [len(federation.train), len(federation.test)] == [80 + 26 + 80, 20 + 7 + 21]


@pytest.mark.parametrize("scheme", ["capped", "uncapped", "clientwise"])
def test_label_skew_within_domains_deals_each_of_them_by_its_own_draw(
    dataset: Callable[..., Dataset], scheme: str
) -> None:
    shared = {"partition": "domain", "clients_per_domain": 4, "within_domain": "dirichlet", "min_client_size": 2}
    data = dataset([[200, 200, 200]] * 2)
    skews = {}
    for alpha in (0.1, 1e5):
        scenario = Scenario(**shared, dirichlet_alpha=alpha, dirichlet_scheme=scheme)
        federation = build_federation(data, scenario, seed=0)
        assert len(federation.clients) == 8 and min(len(shard.indices) for shard in federation.clients) >= 2
        assert federation.train.domains is not None
        for shard in federation.clients:
            assert set(federation.train.domains[shard.indices].tolist()) == {shard.id // 4}
            assert shard.test_indices is not None
        dealt = torch.cat([shard.indices for shard in federation.clients])
        assert sorted(dealt.tolist()) == list(range(len(federation.train)))
        shares = federation.class_table.rows(0, 8).double()
        skews[alpha] = (shares / shares.sum(1, keepdim=True)).amax(1).mean().item()
        # the clients of one domain are not those of the other over again
        assert alpha > 1 or not torch.equal(shares[:4], shares[4:])
    assert skews[1e5] < 0.45 and skews[0.1] > 0.6


def test_without_a_domain_partition_label_skew_within_domains_changes_nothing(dataset: Callable[..., Dataset]) -> None:
    data, plain = dataset(THREE_DOMAINS), Scenario(partition="iid", clients=5)
    one = build_federation(data, plain, 0)
    other = build_federation(data, plain.model_copy(update={"within_domain": "dirichlet"}), 0)
    assert torch.equal(one.shards.indices, other.shards.indices)


@pytest.mark.parametrize("held_out", ["art", "cartoon", "photo"])
def test_held_out_domain_is_never_trained_on_and_all_tested(dataset: Callable[..., Dataset], held_out: str) -> None:
    data = dataset(THREE_DOMAINS)
    scenario = LODO.model_copy(update={"holdout_domain": held_out})
    federation = build_federation(data, scenario, seed=0)
    target = data.domain_names.index(held_out)
    assert federation.held_out_domain == target and len(federation.clients) == 2
    assert federation.validation is not None and federation.validation.domains is not None
    assert federation.train.domains is not None and federation.test.domains is not None
    assert target not in federation.train.domains.tolist() and target not in federation.validation.domains.tolist()
    totals = [100, 33, 101]
    assert int((federation.test.domains == target).sum()) == totals[target]
    for shard in federation.clients:
        domain = int(federation.train.domains[shard.indices[0]])
        n = totals[domain]
        assert shard.validation_indices is not None and shard.test_indices is not None
        assert len(shard.indices) == 3 * n // 5
        assert len(shard.validation_indices) == n // 5
        assert len(shard.test_indices) == n - 3 * n // 5 - n // 5
        assert set(federation.test.domains[shard.test_indices].tolist()) == {domain}
        assert set(federation.validation.domains[shard.validation_indices].tolist()) == {domain}
    everything = numbers(federation.train) + numbers(federation.validation) + numbers(federation.test)
    assert sorted(everything) == list(range(234))


def test_a_domain_is_cut_alike_whichever_domain_is_held_out(dataset: Callable[..., Dataset]) -> None:
    data = dataset(THREE_DOMAINS)
    trained = []
    for held_out in ("art", "photo"):
        federation = build_federation(data, LODO.model_copy(update={"holdout_domain": held_out}), seed=4)
        assert federation.train.domains is not None
        cartoon = torch.nonzero(federation.train.domains == 1).reshape(-1)
        trained.append(numbers(federation.train, cartoon))
    assert trained[0] == trained[1]


def test_own_test_split_is_kept_and_shared_by_domain(dataset: Callable[..., Dataset]) -> None:
    data = dataset(THREE_DOMAINS, test=[[3, 3, 3], [2, 2, 2], [1, 1, 1]])
    federation = build_federation(data, Scenario(partition="domain"), seed=0)
    assert federation.train is data.train and federation.test is data.test
    assert [len(s.test_indices) for s in federation.clients if s.test_indices is not None] == [9, 6, 3]


def test_own_test_split_with_validation_gives_up_a_quarter_of_train(dataset: Callable[..., Dataset]) -> None:
    data = dataset(THREE_DOMAINS, test=[[3, 3, 3], [2, 2, 2], [1, 1, 1]])
    federation = build_federation(data, Scenario(partition="domain", domain_split="60/20/20"), seed=0)
    assert federation.validation is not None and federation.test is data.test
    assert [len(s.indices) for s in federation.clients] == [75, 25, 76]
    assert sorted(numbers(federation.train) + numbers(federation.validation)) == list(range(234))


def test_holding_out_pools_train_and_test(dataset: Callable[..., Dataset]) -> None:
    data = dataset(THREE_DOMAINS, test=[[3, 3, 3], [2, 2, 2], [1, 1, 1]])
    federation = build_federation(data, LODO.model_copy(update={"holdout_domain": "cartoon"}), seed=0)
    assert federation.test.domains is not None and federation.validation is not None
    assert int((federation.test.domains == 1).sum()) == 33 + 6
    everything = numbers(federation.train) + numbers(federation.validation) + numbers(federation.test)
    assert sorted(everything) == list(range(234 + 18))


def test_holding_out_composes_with_label_skew(dataset: Callable[..., Dataset]) -> None:
    scenario = Scenario(partition="dirichlet", clients=5, holdout_domain="photo")
    federation = build_federation(dataset(THREE_DOMAINS), scenario, seed=0)
    assert federation.train.domains is not None
    assert set(federation.train.domains.tolist()) == {0, 1}
    assert all(shard.test_indices is None for shard in federation.clients)


def test_long_tail_leaves_the_domains_test_samples_alone(dataset: Callable[..., Dataset]) -> None:
    data = dataset([[100] * 4, [100] * 4])
    plain = build_federation(data, Scenario(partition="domain"), seed=0)
    scenario = Scenario(partition="domain", imbalance="exponential", imbalance_factor=10)
    tailed = build_federation(data, scenario, seed=0)
    assert numbers(tailed.test) == numbers(plain.test)
    counts = tailed.class_counts()
    assert (counts.diff() < 0).all() and counts[0] == 10 * counts[3] + counts[0] % 10


def test_joined_images_read_in_the_asked_order() -> None:
    first = TensorImages(torch.arange(12, dtype=torch.uint8).reshape(4, 3, 1, 1))
    second = TensorImages(torch.arange(100, 109, dtype=torch.uint8).reshape(3, 3, 1, 1))
    joined = Joined(first, second)
    assert len(joined) == 7
    for asked in ([5, 0, 3, 6, 4], [0, 2], [4, 6]):
        expected = torch.cat([first.pixels, second.pixels])[asked]
        assert torch.equal(joined.read(torch.tensor(asked)), expected)
    assert joined.content_hash() != Joined(second, first).content_hash()


def test_preset_asks_for_the_domain_to_hold_out(dataset: Callable[..., Dataset]) -> None:
    with pytest.raises(FedbenchError, match="Known: art, cartoon, photo. Set holdout_domain to one of toy's"):
        build_federation(dataset(THREE_DOMAINS), LODO, seed=0)


@pytest.mark.parametrize(
    ("counts", "changes", "message"),
    [
        (THREE_DOMAINS, {"holdout_domain": "carton"}, "unknown domain 'carton'; did you mean 'cartoon'"),
        ([[9, 9]], {"holdout_domain": "art"}, "holding out the only domain of 'toy' leaves nothing to train on"),
        (THREE_DOMAINS, {"equal_sizes": True}, "equal_sizes .* would mix domains"),
        ([[90, 90], [1, 0]], {}, "leaves client 1 of 2 without a sample"),
    ],
)
def test_impossible_domains_are_refused(
    dataset: Callable[..., Dataset], counts: list[list[int]], changes: dict[str, object], message: str
) -> None:
    scenario = Scenario(partition="domain").model_copy(update=changes)
    with pytest.raises(FedbenchError, match=message):
        build_federation(dataset(counts), scenario, seed=0)
