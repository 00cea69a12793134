"""FedDecorr: Shi et al. 2023."""

import pytest
import torch

from fedbench.core.types import Model, Outputs
from fedbench_methods.feddecorr import decorrelation, standardised


def test_entries_have_mean_zero_and_variance_one_over_n_minus_one():
    # (1, 3): mean 2, variance 2: -+ 1 / sqrt 2
    torch.testing.assert_close(standardised(torch.tensor([[1.0], [3.0]]))[:, 0], torch.tensor([-1.0, 1.0]) / 2**0.5)


def test_two_equal_entries_of_two_samples():
    features = torch.tensor([[1.0, 5.0], [3.0, 9.0]])
    # z = -+ .707 in both: the off-diagonal entry of z^T z is 1, its square over N = 2 is .5
    assert decorrelation(features, "code").item() == pytest.approx(0.5)
    # K = 1 everywhere, four entries over d^2 = 4
    assert decorrelation(features, "paper").item() == pytest.approx(1.0)


@pytest.mark.parametrize("count", [3, 64])
def test_the_codes_term_is_n_minus_one_squared_over_n_times_the_mean_square_of_a_correlation(count):
    torch.manual_seed(0)
    features = torch.randn(count, 5) @ torch.randn(5, 5)
    squares = torch.corrcoef(features.T).square()
    off = (squares.sum() - 5) / 20
    assert decorrelation(features, "code").item() == pytest.approx(((count - 1) ** 2 / count * off).item(), rel=1e-4)
    assert decorrelation(features, "paper").item() == pytest.approx((squares.sum() / 25).item(), rel=1e-4)


def test_independent_entries_have_no_code_term_and_signs_do_not_matter():
    features = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    assert decorrelation(features, "code").item() == pytest.approx(0.0, abs=1e-6)
    slanted = torch.tensor([[1.0, 2.0], [2.0, 1.0], [3.0, 5.0]])
    mirrored = slanted * torch.tensor([1.0, -3.0])
    assert decorrelation(slanted, "code").item() == pytest.approx(decorrelation(mirrored, "code").item(), rel=1e-5)


def test_the_term_is_beta_times_it_and_absent_for_one_sample_and_own_models(make_step):
    model = Model({"w": torch.eye(2)}, None)
    features = torch.tensor([[1.0, 5.0], [3.0, 9.0]])

    def terms(count, **changes):
        outputs = Outputs(torch.zeros(count, 2), features[:count])
        params = {"feddecorr": {"beta": 0.4}}
        step = make_step(model, torch.zeros(count, 2), [0] * count, outputs=outputs, method="feddecorr", params=params)
        step = type(step)(**{**{k: v for k, v in vars(step).items() if k != "outputs"}, **changes})
        step.__dict__["outputs"] = outputs
        return step.task.hooks.loss_terms(step=step)

    assert [term.item() for term in terms(2)] == [pytest.approx(0.2)]
    assert terms(1) == terms(2, is_own=True) == []
