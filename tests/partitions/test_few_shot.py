"""Few-shot scenarios: k samples of every class, of the federation or of each client."""

import numpy as np
import pytest

from fedbench.core.scenario import Scenario
from fedbench.core.spec import RunSpec
from fedbench.scenarios import build_federation
from fedbench.scenarios.labels import few_shots
from fedbench.testing import tiny_dataset


def held(federation):
    """Labels by client."""
    return [federation.train.labels[client.indices] for client in federation.clients]


def test_every_class_has_its_shots_or_all_it_has():
    labels = np.array([0] * 5 + [1] * 2 + [2] * 4)
    [kept] = few_shots([np.arange(11)], labels, Scenario(shots=3), 0)
    assert np.bincount(labels[kept]).tolist() == [3, 2, 3]
    assert (np.diff(kept) > 0).all()


def test_fewer_shots_are_among_more_and_the_seed_decides():
    labels = np.repeat(np.arange(4), 30)
    sets = [set(few_shots([np.arange(120)], labels, Scenario(shots=k), 0)[0].tolist()) for k in (1, 2, 4, 8, 16)]
    assert all(fewer < more for fewer, more in zip(sets, sets[1:], strict=False))
    assert sets[2] != set(few_shots([np.arange(120)], labels, Scenario(shots=4), 1)[0].tolist())


@pytest.mark.parametrize("imbalance", ["none", "exponential"])
def test_shots_of_the_federation_are_drawn_before_the_partition(imbalance):
    scenario = Scenario(shots=4, clients=3, imbalance=imbalance, imbalance_factor=10)
    federation = build_federation(tiny_dataset(), scenario, 0)
    counts = np.bincount(np.concatenate(held(federation)), minlength=4).tolist()
    # the tail has 2 at IF 10: 22 x 10^-1
    assert counts == ([4, 4, 4, 4] if imbalance == "none" else [4, 4, 4, 2])
    assert len(federation.test) == 30, "the test split stays"


def test_shots_of_clients_are_of_each_class_that_a_client_holds():
    plain = Scenario(partition="dirichlet", dirichlet_alpha=1.0, clients=4, min_client_size=4)
    few = plain.model_copy(update={"shots": 3, "shots_of": "client"})
    before, after = (build_federation(tiny_dataset(), scenario, 0) for scenario in (plain, few))
    for whole, left in zip(before.clients, after.clients, strict=True):
        assert set(left.indices.tolist()) <= set(whole.indices.tolist())
        of_whole, of_left = (np.bincount(before.train.labels[client.indices], minlength=4) for client in (whole, left))
        assert of_left.tolist() == np.minimum(of_whole, 3).tolist()


def test_without_shots_runs_are_called_what_they_were():
    assert "shots" not in RunSpec().model_dump()["scenario"]
    assert RunSpec(scenario=Scenario(shots=0)).run_id == RunSpec().run_id
    assert RunSpec(scenario=Scenario(shots=1)).run_id != RunSpec().run_id
