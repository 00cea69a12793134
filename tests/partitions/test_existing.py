"""Federations that exist: the data's own clients, and partitions read from tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedbench.api import ClientSamples, NoParams, Partition, PartitionTask
from fedbench.core.errors import FedbenchError
from fedbench.core.federation import Dataset, Federation
from fedbench.core.scenario import Scenario
from fedbench.kinds.registry import own_plugins
from fedbench.scenarios import build_federation
from fedbench.scenarios.partitions.existing import write_table

Make = Callable[..., Dataset]


def named(data: Dataset, train: list[int], test: list[int] | None, names: tuple[str, ...]) -> Dataset:
    """``data`` whose samples come from the clients of those numbers, in their order."""
    of_test = None if test is None or data.test is None else replace(data.test, clients=torch.tensor(test))
    return replace(
        data,
        train=replace(data.train, clients=torch.tensor(train)),
        test=data.test if of_test is None else of_test,
        client_names=names,
    )


def held(federation: Federation) -> list[tuple[list[int], list[int] | None]]:
    return [
        (shard.indices.tolist(), None if shard.test_indices is None else shard.test_indices.tolist())
        for shard in federation.clients
    ]


def test_natural_clients_are_those_of_the_data_with_their_own_test_samples(dataset: Make) -> None:
    data = named(dataset([2, 4], [2, 2]), [1, 0, 1, 2, 0, 1], [0, 1, 1, 2], ("Basel", "Bern", "Chur"))
    federation = build_federation(data, Scenario(partition="natural"), 0)
    assert held(federation) == [([1, 4], [0]), ([0, 2, 5], [1, 2]), ([3], [3])]
    assert federation.client_names == ("Basel", "Bern", "Chur")
    without_small = build_federation(data, Scenario(partition="natural?min_samples=2"), 0)
    assert held(without_small) == [([1, 4], [0]), ([0, 2, 5], [1, 2])]
    assert without_small.client_names == ("Basel", "Bern")


def test_natural_clients_share_a_test_split_that_names_none(dataset: Make) -> None:
    data = named(dataset([2, 2], [2, 2]), [1, 0, 1, 0], None, ("a", "b"))
    assert held(build_federation(data, Scenario(partition="natural"), 0)) == [([1, 3], None), ([0, 2], None)]


def test_data_of_clients_without_a_test_split_are_cut_client_by_client(dataset: Make) -> None:
    data = named(dataset([20, 20]), [0] * 10 + [1] * 30, None, ("a", "b"))
    federation = build_federation(data, Scenario(partition="natural"), 0)
    assert [(len(train), len(test or ())) for train, test in held(federation)] == [(8, 2), (24, 6)]
    assert federation.test.clients is not None and federation.test.clients.tolist() == [0] * 2 + [1] * 6
    again = build_federation(data, Scenario(partition="natural"), 1)
    # what is tested does not depend on the seed
    assert torch.equal(federation.test.labels, again.test.labels)


def test_natural_is_refused_where_nobody_is_named_or_left(dataset: Make) -> None:
    with pytest.raises(FedbenchError, match="name the client of every sample"):
        build_federation(dataset([4, 4], [2, 2]), Scenario(partition="natural"), 0)
    data = named(dataset([2, 2], [2, 2]), [1, 0, 1, 0], None, ("a", "b"))
    with pytest.raises(FedbenchError, match="none of the 2 clients has 3 training samples, the largest has 2"):
        build_federation(data, Scenario(partition="natural?min_samples=3"), 0)


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(partition="dirichlet", clients=5, min_client_size=2, imbalance="exponential", imbalance_factor=5),
        Scenario(partition="domain", clients_per_domain=2, domain_split="60/20/20"),
        Scenario(partition="iid", clients=3, validation=0.2, server_samples=2),
        Scenario(partition="dirichlet", clients=3, min_client_size=2, shots=10),
        Scenario(partition="classes_per_client", clients=3, shots=5, shots_of="client"),
    ],
    ids=lambda scenario: scenario.partition + ("-few" if scenario.shots else ""),
)
def test_a_table_of_the_drawn_samples_gives_the_same_federation(
    dataset: Make, scenario: Scenario, tmp_path: Path
) -> None:
    data = dataset([[30, 30], [30, 30]])
    drawn = build_federation(data, scenario, 3)
    write_table(drawn, tmp_path / "drawn.csv")
    partition = f"table:{tmp_path / 'drawn.csv'}"
    read = build_federation(data, scenario.model_copy(update={"partition": partition}), 3)
    assert held(read) == held(drawn)
    assert [shard.validation_indices is None for shard in read.clients] == [
        shard.validation_indices is None for shard in drawn.clients
    ]
    assert torch.equal(read.train.labels, drawn.train.labels) and read.client_names == ()
    write_table(read, tmp_path / "read.csv")
    assert (tmp_path / "read.csv").read_bytes() == (tmp_path / "drawn.csv").read_bytes()


def test_a_table_of_the_drawn_shots_is_none_of_all_samples(dataset: Make, tmp_path: Path) -> None:
    drawn = build_federation(dataset([9, 9], [2, 2]), Scenario(clients=2), 0)
    write_table(drawn, tmp_path / "all.csv")
    few = Scenario(partition=f"table:{tmp_path / 'all.csv'}", shots=3)
    with pytest.raises(
        FedbenchError, match="gives out 6; the table must be of the same data, long tail, shots, splits"
    ):
        build_federation(dataset([9, 9], [2, 2]), few, 0)


def test_a_table_of_counts_gives_every_client_as_many_of_each_class(dataset: Make, tmp_path: Path) -> None:
    file = tmp_path / "counts.csv"
    file.write_text("client,class1,class0\nward 3,2,1\nward 7,0,4\n")
    data = dataset([5, 5], [2, 2])
    federation = build_federation(data, Scenario(partition=f"table:{file}"), 0)
    assert federation.class_table.rows(0, 2).tolist() == [[1, 2], [4, 0]]
    assert federation.client_names == ("ward 3", "ward 7")
    other = build_federation(data, Scenario(partition=f"table:{file}"), 1)
    assert held(other) != held(federation)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("client,class9\na,1\n", "unknown class in partition table .* 'class9'"),
        ("client,class0\na,9\n", "9 samples of 'class0', but the data have 5"),
        ("client,class0\na,-1\n", "whole numbers from 0 on"),
        ("client,class0\na,1\na,2\n", "a client of its own"),
        ("split,sample,client\ntrain,10,a\n", "no train sample 10, the scenario gives out 10"),
        ("split,sample,client\ntrain,1,a\ntrain,1,b\n", "gives the training sample 1 to several clients"),
        ("split,sample,client\ntrain,1,a\ntest,1,b\n", "client 'b' has test samples, but no training sample"),
        ("split,sample,client\ntrane,1,a\n", "unknown split"),
        ("split,sample,client\ntrain,x,a\n", "whole number of a sample"),
        ("split,sample,client\ntrain,0,a,1\ntrain,1,b,1\n", "more cells than its first line names"),
        ("split,sample,client,stretch\ntrain,0,a,0\ntrain,1,a,9000000000000000000\n", "from 0 on, without a gap"),
        ("split,sample,client,stretch\ntrain,0,a,1\ntrain,1,a,2\n", "from 0 on, without a gap"),
        ("a,b\n1,2\n", "it needs split, sample and client"),
        ("", "is no CSV file"),
    ],
)
def test_a_wrong_table_is_named(dataset: Make, tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "wrong.csv"
    file.write_text(text)
    with pytest.raises(FedbenchError, match=message):
        build_federation(dataset([5, 5], [2, 2]), Scenario(partition=f"table:{file}"), 0)


def test_clients_of_a_table_may_be_called_as_missing_values_are(dataset: Make, tmp_path: Path) -> None:
    file = tmp_path / "who.csv"
    file.write_text("split,sample,client\ntrain,0,NA\ntrain,1,null\ntrain,2,nan\n")
    data = dataset([5, 5], [2, 2])
    federation = build_federation(data, Scenario(partition=f"table:{file}"), 0)
    assert federation.client_names == ("NA", "null", "nan")
    file.write_text("split,sample,client\ntrain,0,NA\ntrain,1,\n")
    with pytest.raises(FedbenchError, match="every row needs a client"):
        build_federation(data, Scenario(partition=f"table:{file}"), 0)


def test_a_client_with_a_single_sample_trains_on_it_where_there_is_no_test_split(dataset: Make) -> None:
    data = replace(named(dataset([5, 5], [2, 2]), [0] * 9 + [1], None, ("many", "one")), test=None)
    federation = build_federation(data, Scenario(partition="natural"), 0)
    assert federation.client_names == ("many", "one")
    assert [(len(train), len(test or ())) for train, test in held(federation)] == [(7, 2), (1, 0)]
    alone = replace(named(data, list(range(10)), None, tuple("abcdefghij")), test=None)
    with pytest.raises(FedbenchError, match="no client has two samples"):
        build_federation(alone, Scenario(partition="natural"), 0)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "no list of arrays .* but a NoneType"),
        ([np.array([0]), np.array([[1]])], "no list of arrays"),
        (
            ClientSamples([np.array([0]), np.array([1])], names=["a"]),
            "1 names, 1 of them different, to 2 clients",
        ),
        (ClientSamples([np.array([0]), np.array([1])], names=["a", "a"]), "2 names, 1 of them different, to 2 clients"),
        (ClientSamples([np.array([0])], test=[None]), "no list of arrays"),  # type: ignore[list-item]
        (ClientSamples([np.array([0])], test=[np.array([1, 0, 1])]), "gives a client the test sample 1 twice"),
        (KeyError("ward"), r"partition 'mine' fails: KeyError: 'ward' \(test_existing.py, line \d+\)"),
    ],
    ids=["none", "column", "too-few-names", "one-name-twice", "no-test-array", "test-twice", "raises"],
)
def test_a_wrong_answer_of_a_partition_is_one_sentence(dataset: Make, answer: object, message: str) -> None:
    class Mine(Partition[NoParams]):
        """Mine."""

        name = "mine"

        def clients(self, task: PartitionTask) -> ClientSamples:
            if isinstance(answer, Exception):
                raise answer
            return answer  # type: ignore[return-value]

    with own_plugins({("partition", "mine"): Mine}), pytest.raises(FedbenchError, match=message):
        build_federation(dataset([5, 5], [2, 2]), Scenario(partition="mine"), 0)


def test_names_of_partitions_are_checked(dataset: Make) -> None:
    data = dataset([5, 5], [2, 2])
    for partition, message in (
        ("dirchlet", "unknown partition 'dirchlet'; did you mean 'dirichlet'"),
        ("iid:5", "nothing can follow the colon"),
        ("table", "is incomplete: type table:FILE"),
        ("table:nowhere.csv", "does not exist"),
        ("natural?least=3", "unknown option of partition 'natural' 'least'"),
        ("natural?min_samples=0", "between 1 and"),
    ):
        with pytest.raises(FedbenchError, match=message):
            build_federation(data, Scenario(partition=partition), 0)


def test_indices_stay_ascending_and_shared_ones_are_kept_once(dataset: Make) -> None:
    federation = build_federation(
        dataset([[30, 30], [30, 30]]), Scenario(partition="domain", clients_per_domain=3, domain_split="60/20/20"), 0
    )
    assert len(federation.shards.measured) == 2
    assert all(np.all(np.diff(shard.indices.numpy()) > 0) for shard in federation.clients)
