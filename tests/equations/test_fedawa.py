"""FedAWA: Shi et al. 2025."""

import math

import pytest
import torch

from fedbench.core.types import Update
from fedbench_methods.fedawa import FedAWA, FedAWAParams, objective, products
from tests.equations.kit import aggregation

# x = (1, 0), changes (1, 0) and (0, 1): the models are (2, 0) and (1, 1), with cosines 1 and sqrt(1/2)
X = {"a": torch.tensor([1.0]), "b": torch.tensor([[0.0]])}
ENDS = [{"a": torch.tensor([2.0]), "b": torch.tensor([[0.0]])}, {"a": torch.tensor([1.0]), "b": torch.tensor([[1.0]])}]


def aggregated(method, state, *, clients=(0, 1), sizes=(1, 3), ends=ENDS, num_clients=2):
    updates = tuple(Update(k, end, {}, n) for k, end, n in zip(clients, ends, sizes, strict=True))
    found = method.aggregate(aggregation(X, updates, state, num_clients=num_clients))
    return found["a"].item(), found["b"].item()


def test_products_are_over_all_weights_in_one():
    gram, away = products(X, ENDS)
    assert torch.equal(gram, torch.eye(2, dtype=torch.float64))
    assert away.tolist() == pytest.approx([0.0, 1 - 0.5**0.5])


@pytest.mark.parametrize(("first", "value"), [(0.5, 0.85355), (0.75, 0.60355)])
def test_objective_by_hand(first, value):
    # .5: .5 * .29289, and twice .5 * .70711; .75: .25 * .29289, .75 * .35355 and .25 * 1.06066
    weights = torch.tensor([first, 1 - first], dtype=torch.float64)
    assert objective(weights, *products(X, ENDS)).item() == pytest.approx(value, abs=1e-5)


def test_objective_and_its_gradient_are_those_of_the_vectors_themselves():
    generator = torch.Generator().manual_seed(0)
    x, ends = torch.randn(30, generator=generator), torch.randn(4, 30, generator=generator)
    leaves = [torch.tensor([0.1, -0.3, 0.5, 0.2], dtype=torch.float64, requires_grad=True) for _ in range(2)]
    ours = objective(torch.softmax(leaves[0], 0), *products({"w": x}, [{"w": end} for end in ends]))
    pi, rows = torch.softmax(leaves[1], 0), ends.double()
    changes = rows - x.double()
    theirs = (pi * (1 - torch.cosine_similarity(x.double()[None], rows))).sum()
    theirs = theirs + (pi * (changes - (pi[:, None] * changes).sum(0)).norm(dim=1)).sum()
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(v, w)[0] for v, w in zip((ours, theirs), leaves, strict=True)))


def test_a_step_of_adam_moves_each_logit_by_the_rate():
    # p = (.25, .75): d/dpi_1 of .29289 (1 - pi_1) + 2 sqrt(2) pi_1 (1 - pi_1) is 1.41421 - .29289 > 0: a = (-.5, .5)
    state = {}
    pi = 1 / (1 + 3 * math.e)
    found = aggregated(FedAWA(FedAWAParams(lr=0.5)), state)
    assert found == pytest.approx((1 + pi, 1 - pi), abs=1e-5)
    assert state["fedawa"]["learned"].tolist() == pytest.approx([-0.5, 0.5], abs=1e-5)


def test_what_was_learned_stays_with_the_client():
    state = {"fedawa": {"learned": torch.tensor([0.0, 0.0, 1.0, 7.0], dtype=torch.float64)}}
    # clients 0 and 2 weigh 1 and 3 e before the step, which pushes them further apart by e each
    method = FedAWA(FedAWAParams(lr=0.5))
    pi = 1 / (1 + 3 * math.e**2)
    found = aggregated(method, state, clients=(0, 2), num_clients=4)
    assert found == pytest.approx((1 + pi, 1 - pi), abs=1e-5)
    assert state["fedawa"]["learned"].tolist() == pytest.approx([-0.5, 0.0, 1.5, 7.0], abs=1e-5)


def test_as_released_it_begins_nearly_uniform_and_learns_a_round_late():
    # softmax(.25, .75)
    pi = 1 / (1 + math.exp(0.5))
    method, state = FedAWA(FedAWAParams(lr=0.5, logits="shares", applied="before")), {}
    assert aggregated(method, state) == pytest.approx((1 + pi, 1 - pi), abs=1e-6)
    learned = state["fedawa"]["learned"]
    # -.29289 + 2 sqrt(2) (1 - 2 * .37754) > 0
    assert learned.tolist() == pytest.approx([-0.5, 0.5], abs=1e-5)
    pi = 1 / (1 + math.exp(0.5 + 1))
    assert aggregated(method, state) == pytest.approx((1 + pi, 1 - pi), abs=1e-5)


def test_clients_that_agree_learn_nothing():
    state = {}
    found = aggregated(FedAWA(FedAWAParams(lr=0.5, steps=3)), state, ends=[ENDS[1], ENDS[1]])
    assert found == (1.0, 1.0)
    assert state["fedawa"]["learned"].abs().max() < 1e-6
