"""How many steps a client takes, and how much their gradients weigh in its change of weights."""

import pytest
import torch

from fedbench.core.spec import Training
from fedbench.core.types import Model
from fedbench.toolkit.local_training import batches_of, gradient_weight, local_steps, rates_by_name


@pytest.mark.parametrize(("count", "batch", "epochs", "steps"), [(10, 4, 1, 3), (9, 4, 2, 4), (3, 8, 5, 5)])
def test_steps_are_those_that_are_taken_with_a_last_batch_of_one_joined_to_the_one_before(
    make_task, count, batch, epochs, steps
):
    # 10 by 4: 4 + 4 + 2; 9 by 4: 4 + 5, twice; 3 by 8: one an epoch. Dropping short batches would give 2, 4, 0
    model = Model(weights={"w": torch.zeros(2)}, forward=None)
    task = make_task(model, torch.zeros(count, 2), [0] * count, batch_size=batch, local_epochs=epochs)
    assert local_steps(task) == steps


def test_one_local_step_on_the_full_batch_is_one_step_of_gradient_descent(train_client):
    # logits (w . x, 0), w = 0: gradient of the mean loss 1/3 [(-1/2) (2, 0) + (1/2) (0, 4) + (-1/2) (1, 1)]
    # = (-1/2, 1/2); w - (1/2) of it
    samples = [(2.0, 0.0, 0), (0.0, 4.0, 1), (1.0, 1.0, 0)]
    one = train_client(samples, local_steps=1, momentum=0.9)
    torch.testing.assert_close(one.weights["w"], torch.tensor([0.25, -0.25]))
    # three steps on full batches are three epochs
    three, epochs = train_client(samples, local_steps=3), train_client(samples, local_epochs=3)
    assert torch.equal(three.weights["w"], epochs.weights["w"]) and three.metrics == epochs.metrics


@pytest.mark.parametrize(("count", "sizes"), [(10, [4, 4, 2, 4, 4]), (9, [4, 5, 4, 5, 4]), (3, [3] * 5)])
def test_five_steps_whatever_a_client_holds(make_task, count, sizes):
    model = Model({"w": torch.zeros(2)}, None)
    task = make_task(model, torch.zeros(count, 2), [0] * count, batch_size=4, local_steps=5)
    assert [len(batch) for batch in batches_of(task)] == sizes and local_steps(task) == 5


def test_plain_sgd_weighs_each_of_its_steps_as_one():
    assert [gradient_weight(steps, 0.0) for steps in (1, 2, 7)] == [1.0, 2.0, 7.0]


@pytest.mark.parametrize(("steps", "weight"), [(1, 1.0), (2, 2.9), (10, 41.381)])
def test_momentum_weighs_early_gradients_more(steps, weight):
    # rho .9: two steps weigh (1 + .9) + 1. Ten: [10 - .9 (1 - .9^10) / .1] / .1 = [10 - 5.861894] / .1 = 41.38106
    assert gradient_weight(steps, 0.9) == pytest.approx(weight, abs=1e-4)


def test_a_proximal_pull_weighs_them_less():
    # eta mu = .1, three steps: 1 + .9 + .81 = (1 - .9^3) / .1
    assert gradient_weight(3, 0.0, 0.1) == pytest.approx(2.71)


def test_weights_that_overshoot_count_by_their_size():
    # eta mu = 1.5, three steps: 1, -.5, .25
    assert gradient_weight(3, 0.0, 1.5) == pytest.approx(1.75)


@pytest.mark.parametrize(("momentum", "pull"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.2), (0.9, 0.05)])
def test_it_is_how_far_sgd_goes_on_a_constant_gradient(momentum, pull):
    # all weights a are positive here, so a gradient of one moves by eta times their sum; mu = pull / eta
    weight, rate = torch.zeros(1, dtype=torch.float64, requires_grad=True), 0.5
    optimiser = torch.optim.SGD([weight], rate, momentum=momentum)
    for _ in range(6):
        optimiser.zero_grad()
        (weight + pull / rate / 2 * weight.square()).sum().backward()
        optimiser.step()
    assert -weight.item() / rate == pytest.approx(gradient_weight(6, momentum, pull))


def test_rates_are_the_rounds_own_times_the_factor_of_the_weight():
    model = Model(weights={"a": torch.zeros(1), "b": torch.zeros(1)}, forward=None, lr_factors={"b": 0.1})
    assert rates_by_name(Training(lr=0.8, lr_decay=0.5), model, 3) == pytest.approx({"a": 0.2, "b": 0.02})
