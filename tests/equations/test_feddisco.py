"""FedDisco: Ye et al. 2023."""

import math

import pytest
import torch

from fedbench.core.errors import Unworkable
from fedbench.core.method.tasks import StartTask
from fedbench.core.spec import RunSpec
from fedbench.core.types import ClientReport, Model
from fedbench_methods.feddisco import FedDisco, FedDiscoParams, discrepancy_weights, distances
from tests.equations.kit import aggregation, updates_of

COUNTS = torch.tensor([[4, 0], [2, 2], [1, 3]])
SHARES = COUNTS.double() / 4
UNIFORM = torch.tensor([0.5, 0.5], dtype=torch.float64)


def test_divergences_are_divided_by_their_sum():
    # KL to uniform: log 2, 0, .25 log .5 + .75 log 1.5 = .130812; the sum is .823959
    expected = torch.tensor([0.841240, 0.0, 0.158760], dtype=torch.float64)
    torch.testing.assert_close(distances(SHARES, UNIFORM, "kl"), expected, atol=1e-6, rtol=0)


def test_divergence_is_of_the_client_from_the_target_and_not_the_other_way():
    # .25 log(.25 / .1) + .75 log(.75 / .9) = .0923, .5 log 5 + .5 log(.5 / .9) = .5108
    target, shares = torch.tensor([0.1, 0.9]).double(), torch.tensor([[0.25, 0.75], [0.5, 0.5]]).double()
    first = 0.25 * math.log(2.5) + 0.75 * math.log(0.75 / 0.9)
    second = 0.5 * math.log(5) + 0.5 * math.log(0.5 / 0.9)
    expected = torch.tensor([first, second]).double() / (first + second)
    torch.testing.assert_close(distances(shares, target, "kl"), expected, atol=1e-6, rtol=0)


def test_clients_that_all_have_the_targets_labels_are_at_no_distance():
    assert torch.equal(distances(SHARES[1:2], UNIFORM, "kl"), torch.zeros(1, dtype=torch.float64))


@pytest.mark.parametrize(
    ("distance", "first", "last"),
    # client 0 is (1, 0), client 2 (.25, .75); cosine of (1, 3) and (1, 1): 4 / sqrt(20)
    [("l1", 1.0, 0.5), ("l2", 0.5**0.5, 0.125**0.5), ("cosine", 1 - 0.5**0.5, 1 - 4 / 20**0.5)],
)
def test_other_distances_are_not_normalised(distance, first, last):
    found = distances(SHARES, UNIFORM, distance).tolist()
    assert found == pytest.approx([first, 0.0, last], abs=1e-12)


def test_weights_by_hand_and_none_below_zero():
    p, away = torch.full((3,), 1 / 3, dtype=torch.float64), distances(SHARES, UNIFORM, "kl")
    # 1/3 - .5 d + .1: .012713, .433333, .353953; their sum is .8
    expected = torch.tensor([0.015892, 0.541667, 0.442441], dtype=torch.float64)
    torch.testing.assert_close(discrepancy_weights(p, away, 0.5, 0.1), expected, atol=1e-5, rtol=0)
    # with a = 2: -1.249, .433333, .115813
    expected = torch.tensor([0.0, 0.789096, 0.210904], dtype=torch.float64)
    torch.testing.assert_close(discrepancy_weights(p, away, 2.0, 0.1), expected, atol=1e-5, rtol=0)


def test_where_nobody_weighs_anything_the_run_is_given_up():
    with pytest.raises(Unworkable, match="lower feddisco.a or raise feddisco.b"):
        discrepancy_weights(torch.tensor([0.5, 0.5]).double(), torch.tensor([0.5, 0.5]).double(), 1.0, 0.0)


def started(counts, **params):
    method, state = FedDisco(FedDiscoParams(**params)), {}
    reports = [ClientReport(k, int(row.sum()), row) for k, row in enumerate(counts)]
    sent = method.start(StartTask(reports, Model({}, None), RunSpec(), state))
    assert torch.equal(sent["class_counts"], counts)
    return method, state


@pytest.mark.parametrize(("weighting", "size"), [("samples", 12), ("uniform", 4)])
def test_the_mean_is_by_the_cohorts_own_labels_and_sizes(weighting, size):
    method, state = started(torch.tensor([[4, 0], [2, 2], [3, 9]]))
    # clients 1 and 2; d = (0, 1): the sum is over the cohort. p = 4 and 12 of 16, or halves
    updates = updates_of([[1.0], [5.0]], [4, 12], clients=[1, 2])
    training = {"weighting": weighting}
    task = aggregation({"w": torch.zeros(1)}, updates, state, training=training, num_clients=3)
    p = 4 / (4 + size)
    first, second = p + 0.1, (1 - p) - 0.5 + 0.1
    expected = (first * 1 + second * 5) / (first + second)
    assert method.aggregate(task)["w"].item() == pytest.approx(expected, abs=1e-6)


def test_the_target_may_be_the_labels_of_all_clients():
    _, state = started(torch.tensor([[4, 0], [3, 9]]), target="global")
    assert torch.equal(state["feddisco"]["target"], torch.tensor([7 / 16, 9 / 16], dtype=torch.float64))
