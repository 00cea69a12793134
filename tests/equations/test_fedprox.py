"""FedProx: Li et al. 2020, Eq. 2."""

import pytest
import torch

from fedbench_methods.fedprox import proximal_term, unsquared_term


def test_term_is_half_mu_times_the_squared_distance():
    weights = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[1.0]])}
    received = {"a": torch.tensor([1.0, 1.0]), "b": torch.tensor([[4.0]])}
    # (2^2 + 1^2) + 3^2 = 14; 0.5 * 0.3 * 14 = 2.1
    assert proximal_term(weights, received, 0.3).item() == pytest.approx(2.1)


def test_gradient_is_mu_times_the_difference_with_its_sign():
    weight = torch.tensor([3.0, -2.0], requires_grad=True)
    proximal_term({"w": weight}, {"w": torch.tensor([1.0, 1.0])}, 0.3).backward()
    # 0.3 * (3 - 1, -2 - 1)
    torch.testing.assert_close(weight.grad, torch.tensor([0.6, -0.9]))


def test_unsquared_form_has_half_mu_times_the_unit_direction_as_gradient():
    weight = torch.tensor([4.0, -3.0], requires_grad=True)
    term = unsquared_term({"w": weight}, {"w": torch.zeros(2)}, 0.5)
    term.backward()
    # distance 5: 0.25 * 5 = 1.25, gradient 0.25 * (4/5, -3/5)
    assert term.item() == pytest.approx(1.25)
    torch.testing.assert_close(weight.grad, torch.tensor([0.2, -0.15]))


def test_unsquared_form_has_no_gradient_where_it_has_no_direction():
    weight = torch.tensor([1.0, 2.0], requires_grad=True)
    unsquared_term({"w": weight}, {"w": torch.tensor([1.0, 2.0])}, 0.5).backward()
    assert torch.equal(weight.grad, torch.zeros(2))


def test_first_step_adds_nothing_and_the_second_pulls_back(train_client):
    samples, start = [(1.0, 0.0, 0)], (0.2, -0.1)
    kwargs = {"method": "fedprox", "params": {"fedprox": {"mu": 0.8}}, "start": start}
    one = train_client(samples, **kwargs).weights["w"]
    assert torch.equal(one, train_client(samples, start=start).weights["w"])
    # second step, lr 0.5: the FedAvg step from `one` minus 0.5 * 0.8 * (one - start)
    plain = train_client(samples, start=tuple(one.tolist())).weights["w"]
    two = train_client(samples, local_epochs=2, **kwargs).weights["w"]
    torch.testing.assert_close(two, plain - 0.4 * (one - torch.tensor(start)))


def test_mu_zero_is_fedavg_bit_for_bit(train_client):
    samples = [(1.0, 0.3, 0), (-0.7, 2.0, 1), (0.1, 0.1, 0)]
    kwargs = {"start": (0.2, -0.1), "local_epochs": 3, "batch_size": 2, "momentum": 0.9}
    zero = train_client(samples, method="fedprox", params={"fedprox": {"mu": 0.0}}, **kwargs)
    assert torch.equal(zero.weights["w"], train_client(samples, **kwargs).weights["w"])


def test_exact_minimiser_on_a_quadratic():
    # F(w) = (a/2)(w - w*)^2 with a=2, w*=5, w^t=1, mu=3: y = (a w* + mu w^t) / (a + mu) = 13/5
    weight, received = torch.tensor([0.0], requires_grad=True), {"w": torch.tensor([1.0])}
    optimiser = torch.optim.SGD([weight], 0.1)
    for _ in range(200):
        loss = (weight - 5).square().sum() + proximal_term({"w": weight}, received, 3.0)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert weight.item() == pytest.approx(2.6, abs=1e-5)
