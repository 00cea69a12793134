"""Quantity skew, coarse labels, data that drift over rounds, and clients that never train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fedbench.core.errors import FedbenchError
from fedbench.core.federation import Dataset, Federation
from fedbench.core.method.base import NoParams
from fedbench.core.scenario import Scenario
from fedbench.kinds.kinds import ClientSamples, Partition, PartitionTask
from fedbench.scenarios import build as build_module
from fedbench.scenarios import build_federation
from fedbench.scenarios.partitions.existing import write_table
from fedbench.scenarios.partitions.hierarchy import CIFAR100

Make = Callable[..., Dataset]


def built(data: Dataset, partition: str, seed: int = 0, **more: object) -> Federation:
    return build_federation(data, Scenario(partition=partition, **more), seed)  # type: ignore[arg-type]


def sizes(federation: Federation) -> list[int]:
    return federation.shards.sizes.tolist()


def test_log_normal_sizes_without_variance_are_equal_and_else_follow_the_draw(dataset: Make) -> None:
    data = dataset([300, 300], [9, 9])
    assert sizes(built(data, "lognormal?sigma=0", clients=4)) == [150] * 4
    drawn = np.log(sizes(built(data, "lognormal?sigma=1", clients=50, min_client_size=1)))
    assert 0.6 < drawn.std() < 1.4
    # what a client holds is iid: a large one has both classes alike
    largest = built(data, "lognormal?sigma=1", clients=5)
    counts = largest.class_table.rows(0, 5)[int(largest.shards.sizes.argmax())]
    assert abs(int(counts[0]) - int(counts[1])) < 60
    with pytest.raises(FedbenchError, match="never gave each of 30 clients at least 10 of 600"):
        built(data, "lognormal?sigma=3", clients=30)


def test_power_law_sizes_by_hand(dataset: Make) -> None:
    # weights 1, 1/2, 1/3 over 11/6: of 66 samples 36, 18 and 12
    data = dataset([33, 33], [9, 9])
    assert sorted(sizes(built(data, "power_law?exponent=1", clients=3))) == [12, 18, 36]
    with pytest.raises(FedbenchError, match="gives the smallest of 3 clients 12 of 66 training samples"):
        built(data, "power_law?exponent=1", clients=3, min_client_size=13)


def test_pachinko_gives_all_samples_in_equal_parts_and_skews_coarse_labels(dataset: Make, tmp_path: Path) -> None:
    (tmp_path / "coarse.csv").write_text("class0,animal\nclass1,animal\nclass2,thing\nclass3,thing\n")
    data, file = dataset([60] * 4, [9] * 4), tmp_path / "coarse.csv"
    federation = built(data, f"pachinko?alpha=0.05&beta=100&coarse={file}", clients=6)
    assert sizes(federation) == [40] * 6
    assert sorted(federation.shards.indices.tolist()) == list(range(240))
    rows = federation.class_table.rows(0, 6)
    share = rows[:, :2].sum(1) / 40
    # nearly all of a client's samples are of one coarse label, and of its two classes about as many
    assert ((share < 0.2) | (share > 0.8)).sum() >= 4
    mixed = rows[share > 0.8][:, :2].double()
    assert len(mixed) and float((mixed.min(1).values / mixed.sum(1)).mean()) > 0.2
    # the last client gets what the others have left
    even = built(data, f"pachinko?alpha=1000&beta=1000&coarse={file}", clients=6).class_table.rows(0, 5)
    assert int((even - 10).abs().max()) <= 6
    with pytest.raises(FedbenchError, match="knows no coarse label of the class 'class0'"):
        built(data, "pachinko")


def test_the_superclasses_of_cifar_100() -> None:
    assert len(CIFAR100) == 100 and len(set(CIFAR100.values())) == 20
    assert all(list(CIFAR100.values()).count(coarse) == 5 for coarse in CIFAR100.values())
    assert CIFAR100["maple tree"] == "trees" and CIFAR100["ray"] == "fish"


def test_rounds_are_cut_into_equal_stretches(dataset: Make) -> None:
    federation = built(dataset([80, 80], [9, 9]), "label_drift?stretches=4", clients=3)
    assert len(federation.later) == 3
    everything = [federation.clients, *federation.later]
    # ⌊(t - 1) 4 / 10⌋
    expected = [0, 0, 0, 1, 1, 2, 2, 2, 3, 3]
    assert [everything.index(federation.in_round(t, 10).clients) for t in range(1, 11)] == expected
    assert federation.in_round(0, 10) is federation and federation.in_round(11, 10).clients is federation.later[-1]
    assert federation.in_round(1, 0) is federation
    still = built(dataset([80, 80], [9, 9]), "iid", clients=3)
    assert still.in_round(7, 10) is still


def test_label_drift_moves_from_one_draw_to_another_and_gives_each_sample_once(dataset: Make) -> None:
    data = dataset([400, 400], [9, 9])
    federation = built(data, "label_drift?stretches=5&alpha=0.3", clients=4)
    assert sorted(federation.held.tolist()) == list(range(800))
    counts = torch.stack([federation.in_round(t, 5).class_table.rows(0, 4) for t in range(1, 6)]).double()
    # every stretch has a fifth of each class, and the client's share moves in a straight line
    assert torch.equal(counts.sum(1), torch.full((5, 2), 80.0, dtype=torch.float64))
    line = counts[0] + torch.arange(5)[:, None, None] / 4 * (counts[4] - counts[0])
    assert float((counts - line).abs().max()) <= 1.01


def test_domain_drift_moves_every_client_on_to_the_next_domain(dataset: Make) -> None:
    data = dataset([[20, 20], [20, 20], [20, 20]], [[3, 3], [3, 3], [3, 3]])
    federation = built(data, "domain_drift?stretches=3", clients=3)
    domains = data.train.domains
    assert domains is not None
    for stretch in range(3):
        clients = federation.in_round(stretch + 1, 3).clients
        assert [set(domains[shard.indices].tolist()) for shard in clients] == [{(k + stretch) % 3} for k in range(3)]
    assert len(federation.held) == len(set(federation.held.tolist())) == 120
    # and is measured on the test samples of that domain alone
    tested = data.test.domains if data.test is not None else None
    assert tested is not None
    for number in range(1, 4):
        for k, shard in enumerate(federation.in_round(number, 3).clients):
            assert shard.test_indices is not None
            assert shard.test_indices.tolist() == torch.nonzero(tested == (k + number - 1) % 3).flatten().tolist()
    with pytest.raises(FedbenchError, match="needs a client for each of the 3 domains, and clients=2"):
        built(data, "domain_drift", clients=2)
    with pytest.raises(FedbenchError, match="needs data with two domains"):
        built(dataset([9, 9], [3, 3]), "domain_drift", clients=2)


def test_a_table_of_data_that_drift_gives_the_same_federation(dataset: Make, tmp_path: Path) -> None:
    data = dataset([80, 80], [9, 9])
    drawn = built(data, "label_drift?stretches=3", clients=3)
    write_table(drawn, tmp_path / "drift.csv")
    read = built(data, f"table:{tmp_path / 'drift.csv'}")
    for one, other in zip((drawn.shards, *drawn.later), (read.shards, *read.later), strict=True):
        assert torch.equal(one.indices, other.indices) and torch.equal(one.offsets, other.offsets)
    (tmp_path / "drift.csv").write_text("split,sample,client,stretch\ntrain,0,a,0\ntrain,1,a,1\ntest,1,b,1\n")
    with pytest.raises(FedbenchError, match="client 'b' has test samples, but no training sample"):
        built(data, f"table:{tmp_path / 'drift.csv'}")
    (tmp_path / "drift.csv").write_text("split,sample,client,stretch\ntrain,0,a,0\ntrain,1,a,2\n")
    with pytest.raises(FedbenchError, match="without a gap"):
        built(data, f"table:{tmp_path / 'drift.csv'}")


def test_clients_that_never_train_are_drawn_and_set_apart(dataset: Make) -> None:
    data = dataset([100, 100], [9, 9])
    whole, part = (built(data, "iid", clients=10, holdout_clients=share) for share in (0.0, 0.2))
    assert len(part.clients) == 8 and len(part.new_clients) == 2 and whole.new_clients == ()
    assert part.shards.ids.tolist() == list(range(8)) and [c.id for c in part.new_clients] == [8, 9]
    held = [set(client.indices.tolist()) for client in whole.clients]
    parts = [set(client.indices.tolist()) for client in (*part.clients, *part.new_clients)]
    assert sorted(map(sorted, held)) == sorted(map(sorted, parts))
    assert part.class_counts().sum() == 160 and part.of_new_clients.class_counts().sum() == 40
    other = built(data, "iid", seed=1, clients=10, holdout_clients=0.2)
    assert [c.indices.tolist() for c in other.new_clients] != [c.indices.tolist() for c in part.new_clients]
    assert len(built(data, "iid", clients=10, holdout_clients=0.01).new_clients) == 1
    with pytest.raises(FedbenchError, match="leaves none of 2 clients to train"):
        built(data, "iid", clients=2, holdout_clients=0.9)


def measured_on(federation: Federation) -> list[list[list[int] | None]]:
    """By stretch and client, its test samples."""
    stretches = (federation.clients, *federation.later)
    return [[None if own.test_indices is None else own.test_indices.tolist() for own in of] for of in stretches]


def test_a_table_says_what_clients_are_measured_on_in_every_stretch(dataset: Make, tmp_path: Path) -> None:
    data = dataset([[20, 20], [20, 20]], [[3, 3], [3, 3]])
    drawn = built(data, "domain_drift?stretches=3", clients=2)
    write_table(drawn, tmp_path / "drift.csv")
    read = built(data, f"table:{tmp_path / 'drift.csv'}")
    assert measured_on(read) == measured_on(drawn)
    assert measured_on(drawn)[0] == measured_on(drawn)[2] != measured_on(drawn)[1]
    # a table without them, as of label drift, leaves what clients are measured on as it is at first
    still = tmp_path / "still.csv"
    still.write_text("split,sample,client,stretch\ntrain,0,a,0\ntrain,1,b,0\ntest,1,a,0\ntest,2,b,0\ntrain,2,a,1\n")
    assert measured_on(built(data, f"table:{still}")) == [[[1], [2]]] * 2


class Lacking(Partition[NoParams]):
    """Two later stretches, with what clients are measured on in one."""

    name = "lacking"

    def clients(self, task: PartitionTask) -> ClientSamples:
        """One client."""
        first, second, third = (np.array([sample]) for sample in range(3))
        return ClientSamples([first], later=[[second], [third]], later_test=[[first]])


def test_a_partition_says_what_clients_are_measured_on_in_every_stretch_or_in_none(
    dataset: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_module, "partition_of", lambda scenario: (Lacking(NoParams()), ""))
    with pytest.raises(FedbenchError, match="gives test samples to 1 later stretches and training samples to 2"):
        built(dataset([9, 9], [3, 3]), "iid", clients=1)
