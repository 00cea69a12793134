"""Fed-Focal: Sarkar et al. 2020, the focal loss -a (1 - p)^gamma log p."""

from math import log

import pytest
import torch

from fedbench.core.types import Model, Outputs
from fedbench_methods.fed_focal import FedFocal, FedFocalParams, focal_loss

ZERO = torch.tensor([0])


def with_probability(p):
    """Two logits that give class 0 probability ``p``."""
    return torch.tensor([[log(p / (1 - p)), 0.0]])


# gamma 2: .1^2 * .105361, .5^2 * .693147, .9^2 * 2.302585; gamma 1: .1 * .105361
@pytest.mark.parametrize(
    ("p", "gamma", "expected"),
    [(0.9, 2.0, 1.0536e-3), (0.5, 2.0, 0.173287), (0.1, 2.0, 1.865094), (0.9, 1.0, 0.0105361)],
)
def test_loss_by_hand(p, gamma, expected):
    got = focal_loss(with_probability(p), ZERO, gamma, 1.0)
    assert got.item() == pytest.approx(expected, rel=1e-4)


def test_loss_is_the_mean_over_the_batch_times_alpha():
    logits = torch.cat([with_probability(0.5), with_probability(0.1)])
    got = focal_loss(logits, torch.tensor([0, 0]), 2.0, 0.25)
    assert got.item() == pytest.approx(0.25 * (0.173287 + 1.865094) / 2, rel=1e-5)


def test_p_is_that_of_the_samples_own_class():
    # class 1 of (p, 1 - p) with p = .9 has .1
    got = focal_loss(with_probability(0.9), torch.tensor([1]), 2.0, 1.0)
    assert got.item() == pytest.approx(1.865094, rel=1e-4)


def test_gamma_zero_is_cross_entropy_exactly_in_value_and_gradient():
    generator = torch.Generator().manual_seed(0)
    logits, labels = 9 * torch.randn(7, 5, generator=generator), torch.arange(7) % 5
    plain, ours = (logits.clone().requires_grad_() for _ in range(2))
    likelihood = torch.log_softmax(plain, dim=1).gather(1, labels[:, None])
    wanted, got = -likelihood.mean(), focal_loss(ours, labels, 0.0, 1.0)
    wanted.backward()
    got.backward()
    assert torch.equal(got, wanted)
    assert torch.equal(ours.grad, plain.grad)


# against p - 1: (1-p)^g - g (1-p)^(g-1) p log p; gamma 2: .25 + .5 (.693147) = .596574, .01 + .18 (.105361) = .028965
@pytest.mark.parametrize(("p", "expected"), [(0.5, 0.596574), (0.9, 0.028965)])
def test_gradient_relative_to_cross_entropys(p, expected):
    logits = with_probability(p).requires_grad_()
    focal_loss(logits, ZERO, 2.0, 1.0).backward()
    assert logits.grad[0, 0].item() / (p - 1) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("gamma", [0.5, 2.0, 5.0])
def test_gradient_has_the_sign_of_cross_entropys_for_all_p(gamma):
    logits = torch.stack([torch.linspace(-20, 14, 69), torch.zeros(69)], dim=1).requires_grad_()
    focal_loss(logits, torch.zeros(69, dtype=torch.int64), gamma, 1.0).backward()
    assert (logits.grad[:, 0] < 0).all()
    assert (logits.grad[:, 1] > 0).all()


# p = 0 in floats, where log(softmax) is -inf; and p = 1, where a power below one has an infinite slope
@pytest.mark.parametrize(("logit", "gamma", "expected"), [(-500.0, 2.0, 500.0), (500.0, 0.5, 0.0), (500.0, 2.0, 0.0)])
def test_extreme_probabilities_stay_finite(logit, gamma, expected):
    logits = torch.tensor([[logit, 0.0]], requires_grad=True)
    loss = focal_loss(logits, ZERO, gamma, 1.0)
    loss.backward()
    assert loss.item() == pytest.approx(expected)
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[0, 0].item() == pytest.approx(-1.0 if expected else 0.0)


def test_the_hook_uses_gamma_and_alpha(make_step):
    model = Model(weights={"w": torch.zeros(1)}, forward=lambda *_: None)
    outputs = Outputs(with_probability(0.5), torch.zeros(1, 1))
    step = make_step(model, torch.zeros(1, 1), [0], outputs=outputs)
    assert FedFocal(FedFocalParams()).local_loss(step).item() == pytest.approx(0.173287, rel=1e-5)
    # .5^1 * .693147 * .5
    assert FedFocal(FedFocalParams(gamma=1.0, alpha=0.5)).local_loss(step).item() == pytest.approx(log(2) / 4)
