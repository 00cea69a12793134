"""FedUV: Son et al. 2024."""

from math import exp, sqrt

import pytest
import torch

from fedbench.core.types import Model, Outputs
from fedbench_methods.feduv import uniformity_term, variance_term


def test_one_sure_sample_of_every_class_reaches_the_goal_and_equal_ones_miss_all_of_it():
    for classes in (2, 5):
        assert variance_term(torch.eye(classes)).item() == pytest.approx(0.0, abs=1e-6)
        flat = torch.full((4, classes), 1 / classes)
        assert variance_term(flat).item() == pytest.approx(classes**-0.5, abs=1e-5)


def test_variance_by_hand_and_nothing_for_too_much_of_it():
    # columns (.9, .5) and (.1, .5): deviations .4 / sqrt 2 each; goal 1 / sqrt 2
    found = variance_term(torch.tensor([[0.9, 0.1], [0.5, 0.5]]))
    assert found.item() == pytest.approx((1 - 0.4) / sqrt(2))
    # three classes; columns (1, 0), (0, 1), (0, 0): deviations .7071, .7071, 0 to the goal .5774
    found = variance_term(torch.tensor([[1.0, 0, 0], [0, 1.0, 0]]))
    assert found.item() == pytest.approx(1 / sqrt(3) / 3, abs=1e-5)


def test_many_balanced_sure_samples_miss_a_little():
    # k = 2 of each of 3: sqrt(2 / (9 - 1.5))
    found = variance_term(torch.eye(3).repeat(2, 1))
    assert found.item() == pytest.approx(1 / sqrt(3) - sqrt(2 / 7.5), abs=1e-6)


def test_the_slope_at_equal_predictions_is_finite():
    logits = torch.zeros(3, 4, requires_grad=True)
    variance_term(logits.softmax(1)).backward()
    assert torch.isfinite(logits.grad).all()


def test_uniformity_by_hand_with_the_median_of_the_squared_distances():
    # points 0, 1, 3 on a line: 1, 9, 4; median 4
    found = uniformity_term(torch.tensor([[0.0, 0.0], [1.0, 0.0], [3.0, 0.0]]))
    assert found.item() == pytest.approx((exp(-1 / 4) + exp(-9 / 4) + exp(-1)) / 3, rel=1e-5)
    # of an even number the lower: points 0, 1, 3, 7: 1, 9, 49, 4, 36, 16; median 9
    found = uniformity_term(torch.tensor([[0.0], [1.0], [3.0], [7.0]]))
    assert found.item() == pytest.approx(sum(exp(-t / 9) for t in (1, 9, 49, 4, 36, 16)) / 6, rel=1e-5)


def test_uniformity_does_not_depend_on_scale_and_its_gradient_flows_through_the_median():
    torch.manual_seed(0)
    z = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    assert uniformity_term(3 * z).item() == pytest.approx(uniformity_term(z).item())
    assert torch.autograd.gradcheck(uniformity_term, (z,))
    [gradient] = torch.autograd.grad(uniformity_term(z), z)
    # invariant to scale: no slope along z itself, as there would be with a constant sigma
    assert (gradient * z).sum().item() == pytest.approx(0.0, abs=1e-12)


def test_terms_are_weighted_and_absent_for_own_models_and_single_samples(make_step):
    logits, features = torch.tensor([[2.0, 0.0], [0.5, 0.5]]), torch.tensor([[0.0, 1.0], [2.0, 0.0]])

    def terms(count, is_own=False):
        made = make_step(
            Model({"w": torch.eye(2)}, None),
            torch.zeros(count, 2),
            [0] * count,
            method="feduv",
            params={"feduv": {"variance": 3.0, "uniformity": 0.7}},
        )
        step = type(made)(**{**vars(made), "is_own": is_own})
        step.__dict__["outputs"] = Outputs(logits[:count], features[:count])
        return step.task.hooks.loss_terms(step=step)

    # one pair is its own median: exp(-1)
    assert [t.item() for t in terms(2)] == [pytest.approx(3 * variance_term(logits.softmax(1)).item() + 0.7 * exp(-1))]
    assert terms(1) == terms(2, is_own=True) == []
