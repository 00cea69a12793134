"""FedLC: Zhang et al. 2022, cross-entropy on logits calibrated by a client's class counts."""

import pytest
import torch

from fedbench.core.types import LabelledBatch, Model, Outputs
from fedbench.rounds.loop import evaluate, train_round
from fedbench.toolkit.losses import mean_cross_entropy
from fedbench_methods.fedlc import FedLC, FedLcParams, calibrated, left_out
from tests.equations.kit import run_of

LOGITS = torch.tensor([[1.0, 0.0]])
# n = (16, 1), tau = 1: n^(-1/4) = (1/2, 1), a = (1/2, -1)
A = torch.tensor([[0.5, -1.0]])


# tau = 2 doubles what is subtracted: (1 - 1, 0 - 2)
@pytest.mark.parametrize(("tau", "expected"), [(1.0, [[0.5, -1.0]]), (2.0, [[0.0, -2.0]])])
def test_logits_lose_tau_over_the_fourth_root_of_their_count(tau, expected):
    assert calibrated(LOGITS, torch.tensor([16, 1]), tau).tolist() == expected


def test_calibration_is_of_the_clients_own_counts_and_rare_classes_lose_most():
    # 81, 16, 1: 1/3, 1/2, 1
    got = calibrated(torch.zeros(1, 3), torch.tensor([81, 16, 1]), 1.0)
    torch.testing.assert_close(got, torch.tensor([[-1 / 3, -1 / 2, -1.0]]))


# log(1 + e^-1.5) = .201413, log(1 + e^1.5) = 1.701413
@pytest.mark.parametrize(("label", "expected"), [(0, 0.201413), (1, 1.701413)])
def test_with_the_positive_in_the_denominator_it_is_cross_entropy_of_the_calibrated_logits(label, expected):
    assert mean_cross_entropy(A, torch.tensor([label])).item() == pytest.approx(expected, abs=1e-6)


# only the other class is left in the sum: -a_y + a_other
@pytest.mark.parametrize(("label", "expected"), [(0, -1.5), (1, 1.5)])
def test_as_printed_the_positive_is_not_in_the_denominator(label, expected):
    assert left_out(A, torch.tensor([label])).item() == pytest.approx(expected, abs=1e-6)


def test_as_printed_with_three_classes():
    # y = 0, a = (2, 0, 0): log(e^0 + e^0) - 2 = .693147 - 2
    got = left_out(torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([0]))
    assert got.item() == pytest.approx(-1.306853, abs=1e-6)


def test_both_are_means_over_the_batch():
    both, labels = A.expand(2, 2), torch.tensor([0, 1])
    assert mean_cross_entropy(both, labels).item() == pytest.approx((0.201413 + 1.701413) / 2, abs=1e-6)
    assert left_out(both, labels).item() == pytest.approx(0.0, abs=1e-6)


def test_the_printed_form_is_unbounded_below_and_the_default_is_not():
    far = torch.tensor([[1e4, 0.0]])
    assert left_out(far, torch.tensor([0])).item() == -1e4
    assert mean_cross_entropy(far, torch.tensor([0])).item() == 0.0
    assert FedLcParams().denominator == "include"


def outputs_of(logits):
    return Outputs(logits, torch.zeros(len(logits), 1))


def loss_of(make_step, logits, labels, counts, **params):
    """What the hook gives for the batch (logits, labels) of a client with class counts ``counts``."""
    own = [c for c, count in enumerate(counts) for _ in range(count)]
    model = Model(weights={"w": torch.zeros(1)}, forward=lambda *_: None)
    step = make_step(model, torch.zeros(len(own), 1), own, num_classes=len(counts), outputs=outputs_of(logits))
    batch = LabelledBatch(torch.zeros(len(labels), 1), torch.arange(len(labels)), torch.tensor(labels))
    step.__dict__["batch"] = batch
    return FedLC(FedLcParams(**params)).local_loss(step)


def test_the_hook_counts_the_whole_client_not_the_batch(make_step):
    assert loss_of(make_step, LOGITS, [0], [16, 1]).item() == pytest.approx(0.201413, abs=1e-6)
    assert loss_of(make_step, LOGITS, [1], [16, 1]).item() == pytest.approx(1.701413, abs=1e-6)
    assert loss_of(make_step, LOGITS, [1], [16, 1], denominator="exclude").item() == pytest.approx(1.5, abs=1e-6)


@pytest.mark.parametrize(("counts", "tau"), [([5, 5], 3.0), ([16, 1], 0.0)])
def test_equal_counts_or_tau_zero_give_plain_cross_entropy(make_step, counts, tau):
    # log(1 + e^-1) = .313262
    assert loss_of(make_step, LOGITS, [0], counts, tau=tau).item() == pytest.approx(0.313262, abs=1e-6)


def test_the_logit_of_a_class_the_client_has_none_of_gets_no_gradient(make_step):
    logits = torch.tensor([[0.3, -0.2, 0.1]], requires_grad=True)
    loss_of(make_step, logits, [0], [3, 4, 0]).backward()
    # e^-100 of the others' size; not zero but for the width of a float, and no NaN
    assert 0 <= logits.grad[0, 2].item() < 1e-40
    assert logits.grad[0, 1].item() > 0.3


def test_an_absent_class_is_lowered_by_a_hundred_tau():
    got = calibrated(torch.zeros(1, 2), torch.tensor([1, 0]), 0.5)
    torch.testing.assert_close(got, torch.tensor([[-0.5, -50.0]]))


def test_as_printed_a_client_of_one_class_pulls_the_absent_ones_down(make_step):
    logits = torch.tensor([[0.0, 0.0, 0.0]], requires_grad=True)
    loss_of(make_step, logits, [0], [3, 0, 0], denominator="exclude").backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[-1.0, 0.5, 0.5]]))


@pytest.mark.parametrize("loss", [mean_cross_entropy, left_out])
def test_extreme_logits_stay_finite(loss):
    logits = torch.tensor([[900.0, -900.0, 0.0]], requires_grad=True)
    value = loss(calibrated(logits, torch.tensor([4, 0, 9]), 10.0), torch.tensor([1]))
    value.backward()
    assert value.item() == pytest.approx(2800, rel=0.01)
    assert torch.isfinite(logits.grad).all()


def test_predictions_are_by_the_logits_as_they_are():
    run, plain = run_of("fedlc", rounds=1), run_of("fedavg", rounds=1)
    state, _ = train_round(run, run.initial_state())
    assert torch.equal(evaluate(run, state)[1].labels, evaluate(plain, state)[1].labels)
