"""Scenario values, presets, and what holds for every federation that is built from one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from fedbench.core.errors import FedbenchError
from fedbench.core.federation import Dataset, Federation
from fedbench.scenarios import PRESETS, Scenario, build_federation, scenario_named, scenario_names


def digest(federation: Federation) -> str:
    parts = [str(shard.indices.tolist()) for shard in federation.clients]
    return hashlib.sha256("|".join(parts).encode() + federation.train.labels.numpy().tobytes()).hexdigest()


def preset(name: str) -> Scenario:
    scenario = scenario_named(name)
    return scenario.model_copy(update={"holdout_domain": "photo"}) if scenario.holdout_domain else scenario


@pytest.fixture
def two_domains(dataset: Callable[..., Dataset]) -> Dataset:
    return dataset([[150] * 10, [0] * 10, [150] * 10], test=[[5] * 10, [0] * 10, [5] * 10])


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "natural"])  # these data name no clients
def test_presets_build_and_the_seed_alone_decides(two_domains: Dataset, name: str) -> None:
    before, torch_before = np.random.get_state()[1].copy(), torch.random.get_rng_state()  # type: ignore[index]
    first, again, other = (build_federation(two_domains, preset(name), seed) for seed in (0, 0, 1))
    assert digest(first) == digest(again)
    # with one client a domain there is nothing left to draw: the test split is the same for every seed
    assert (digest(first) == digest(other)) == (name in ("feature-skew", "leave-one-domain-out"))
    assert np.array_equal(before, np.random.get_state()[1])  # type: ignore[index]
    assert torch.equal(torch_before, torch.random.get_rng_state())
    dealt = torch.cat([first.held, *(shard.indices for shard in first.new_clients)])
    left = 640 if name == "few-shot-clients" else len(first.train)  # 20 clients, 2 classes, 16 shots
    assert len(dealt.unique()) == len(dealt) == left
    assert all(len(shard.indices) and shard.indices.dtype == torch.int64 for shard in first.clients)
    assert [shard.id for shard in first.clients] == list(range(len(first.clients)))
    assert first.labels_visible == (preset(name).labels == "visible")
    assert bool(first.groups) == ("longtail" in name)


def test_presets_have_a_line_each_and_near_misses_are_answered() -> None:
    lines = scenario_names()
    assert lines.keys() == PRESETS.keys()
    assert all(line and "\n" not in line for line in lines.values())
    with pytest.raises(FedbenchError, match="unknown scenario 'longtial'; did you mean 'longtail'"):
        scenario_named("longtial")


def test_partition_seed_freezes_the_partition(two_domains: Dataset) -> None:
    frozen = Scenario(partition="dirichlet", imbalance="exponential", partition_seed=7)
    assert digest(build_federation(two_domains, frozen, 0)) == digest(build_federation(two_domains, frozen, 1))
    as_run = Scenario(partition="dirichlet", imbalance="exponential")
    assert digest(build_federation(two_domains, as_run, 7)) == digest(build_federation(two_domains, frozen, 0))


@pytest.mark.parametrize("partition", ["iid", "dirichlet", "shards", "classes_per_client", "creff_equal"])
def test_label_skew_shares_the_global_test_set(two_domains: Dataset, partition: str) -> None:
    federation = build_federation(two_domains, Scenario(partition=partition), 0)
    assert federation.test is two_domains.test and federation.train is two_domains.train
    assert all(shard.test_indices is None and shard.validation_indices is None for shard in federation.clients)


def test_data_without_test_are_cut_by_domain_under_label_skew(dataset: Callable[..., Dataset]) -> None:
    federation = build_federation(dataset([[50] * 4, [50] * 4]), Scenario(clients=4), 0)
    assert [len(federation.train), len(federation.test)] == [320, 80]


def test_natural_tail_takes_the_lists_own_groups(dataset: Callable[..., Dataset]) -> None:
    own = {"many": (1,), "few": (0, 2)}
    data = dataset([120, 30, 10], test=[5] * 3, list_groups=own)
    scenario = Scenario(imbalance="natural", groups="shots", clients=2)
    assert build_federation(data, scenario, 0).groups == own
    without = dataset([120, 30, 10], test=[5] * 3)
    assert build_federation(without, scenario, 0).groups == {"many": (0,), "medium": (1,), "few": (2,)}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("participation", 0.0, "greater than 0"), ("participation", 1.1, "less than or equal to 1"),
        ("dropout", 1.0, "less than 1"), ("imbalance_factor", 0.5, "greater than or equal to 1"),
        ("dirichlet_alpha", 0.0, "greater than or equal to 0.001"), ("clients", 0, "greater than or equal to 1"),
        ("partition", "", "at least 1 character"), ("alpha", 0.5, "Extra inputs"),
    ],
)  # fmt: skip
def test_wrong_values_are_answered_with_the_allowed_ones(field: str, value: object, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Scenario(**{field: value})  # type: ignore[arg-type]


def test_every_field_is_described_and_frozen() -> None:
    assert all(field.description for field in Scenario.model_fields.values())
    with pytest.raises(ValidationError, match="frozen"):
        Scenario().clients = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partition": "domain"}, "partition 'domain' needs data with domains, but data set 'toy' has none; choose"),
        ({"holdout_domain": "art"}, "holdout_domain='art' needs data with domains, but data set 'toy' has none"),
        ({"clients": 50}, "partition 'iid' leaves client 40 and 9 others of 50 without a sample; 40 training samples"),
        ({"partition": "shards", "clients": 3, "shards_per_client": 3}, "3 x 3 = 9 is not; change clients or"),
    ],
)
def test_impossible_federations_are_refused(
    dataset: Callable[..., Dataset], changes: dict[str, object], message: str
) -> None:
    with pytest.raises(FedbenchError, match=message):
        build_federation(dataset([10] * 4, test=[2] * 4), Scenario().model_copy(update=changes), seed=0)


def test_data_without_test_and_domains_are_refused(dataset: Callable[..., Dataset]) -> None:
    with pytest.raises(FedbenchError, match="data set 'toy' has neither a test split nor domains or clients to cut"):
        build_federation(dataset([10] * 4), Scenario(clients=2), seed=0)
