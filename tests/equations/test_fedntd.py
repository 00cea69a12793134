"""FedNTD: Lee et al. 2022, the loss L_CE + beta L_NTD."""

from math import log

import pytest
import torch

from fedbench.core.errors import FedbenchError
from fedbench.core.types import Model, Outputs
from fedbench_methods.fedntd import FedNTD, FedNtdParams, not_true, not_true_distillation
from tests.equations.kit import end_of


def test_the_true_classs_column_is_deleted_and_the_order_of_the_others_kept():
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]] * 3)
    got = not_true(logits, torch.tensor([0, 2, 3]))
    assert got.tolist() == [[2.0, 3.0, 4.0], [1.0, 2.0, 4.0], [1.0, 2.0, 3.0]]


def test_loss_is_the_divergence_from_the_received_to_the_local_model():
    # o = (2, 1, 0), o^g = (1, 2, 0), y = 0: what is left is (1, 0) and (2, 0).
    # q^g = (.880797, .119203), q = (.731059, .268941):
    # KL(q^g || q) = .880797 log(.880797 / .731059) + .119203 log(.119203 / .268941) = .164119 - .096988 = .067131
    # (the other direction, KL(q || q^g), would be .082604)
    local, received = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([[1.0, 2.0, 0.0]])
    got = not_true_distillation(local, received, torch.tensor([0]), tau=1.0)
    assert got.item() == pytest.approx(0.067131, abs=1e-6)


def test_temperature_softens_both_sides_and_its_square_scales_the_term():
    # tau = log 2: logits (log 2, 0) and (2 log 2, 0) become (1, 0) and (2, 0) after the division, as above
    local = torch.tensor([[5.0, log(2), 0.0]])
    received = torch.tensor([[-3.0, 2 * log(2), 0.0]])
    got = not_true_distillation(local, received, torch.tensor([0]), tau=log(2))
    assert got.item() == pytest.approx(log(2) ** 2 * 0.067131, abs=1e-6)


def test_loss_is_the_mean_over_the_batch():
    # the row above, and one where both models agree (0): half of it
    local = torch.tensor([[2.0, 1.0, 0.0], [1.0, 4.0, 2.0]])
    received = torch.tensor([[1.0, 2.0, 0.0], [1.0, -9.0, 2.0]])
    got = not_true_distillation(local, received, torch.tensor([0, 1]), tau=1.0)
    assert got.item() == pytest.approx(0.067131 / 2, abs=1e-6)


def test_the_true_logit_of_either_model_does_not_matter_and_its_gradient_is_exactly_zero():
    generator = torch.Generator().manual_seed(0)
    local = torch.randn(5, 4, generator=generator, requires_grad=True)
    received = torch.randn(5, 4, generator=generator, requires_grad=True)
    labels = torch.tensor([0, 3, 1, 2, 2])
    loss = not_true_distillation(local, received, labels, tau=2.0)
    loss.backward()
    rows = torch.arange(5)
    assert torch.equal(local.grad[rows, labels], torch.zeros(5))
    assert torch.equal(received.grad[rows, labels], torch.zeros(5))
    for side in (0, 1):
        moved = [local.detach().clone(), received.detach().clone()]
        moved[side][rows, labels] += 1e4
        assert torch.equal(not_true_distillation(*moved, labels, tau=2.0), loss.detach())


def test_gradient_pulls_the_local_not_true_probabilities_to_the_received_ones():
    # d/do of tau^2 KL(q^g || softmax(o / tau)) is tau (q - q^g); with tau = 3 and logits 3 times those above,
    # 3 (.731059 - .880797) = -.449213 for the first not-true class, the opposite for the second
    local = torch.tensor([[6.0, 3.0, 0.0]], requires_grad=True)
    not_true_distillation(local, torch.tensor([[3.0, 6.0, 0.0]]), torch.tensor([0]), tau=3.0).backward()
    torch.testing.assert_close(local.grad, torch.tensor([[0.0, -0.449213, 0.449213]]), atol=1e-5, rtol=0)


def test_equal_models_give_exactly_zero_and_no_gradient():
    logits = torch.randn(6, 5, generator=torch.Generator().manual_seed(1)).requires_grad_()
    loss = not_true_distillation(logits, logits.detach(), torch.arange(6) % 5, tau=1.0)
    loss.backward()
    assert loss.item() == 0.0
    torch.testing.assert_close(logits.grad, torch.zeros(6, 5), atol=1e-7, rtol=0)


def test_extreme_logits_stay_finite():
    local, received = torch.tensor([[0.0, 500.0, -500.0]]), torch.tensor([[0.0, -500.0, 500.0]])
    # all of q^g on the second class, where log q is -1000
    assert not_true_distillation(local, received, torch.tensor([0]), tau=1.0).item() == pytest.approx(1000.0)


def test_two_classes_leave_one_logit_and_the_term_is_zero():
    local = torch.tensor([[1.0, -2.0], [0.3, 5.0]], requires_grad=True)
    loss = not_true_distillation(local, torch.tensor([[9.0, 0.0], [0.0, 3.0]]), torch.tensor([0, 1]), tau=1.0)
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(local.grad, torch.zeros(2, 2))


def scaled_inputs(tensors, inputs, training):
    """Logits w * x; in training mode shifted on one class, as batch statistics would."""
    shift = torch.tensor([0.0, 0.0, 1.0]) if training else 0.0
    return Outputs(tensors["w"] * inputs + shift, inputs)


def test_the_hook_compares_with_the_received_weights_in_eval_mode_and_weighs_by_beta(make_step):
    model = Model(weights={"w": torch.tensor(1.0)}, forward=scaled_inputs)
    # y = 0, x = (7, 1, 0). Received, w = 2, eval: (2, 0) is left. Local, w = 1, training: (1, 0 + 1): (1, 1).
    # q^g = (.880797, .119203), q = (1/2, 1/2): KL = log 2 - H(q^g) = .693147 - .365334 = .327813; beta = 2
    step = make_step(model, torch.tensor([[7.0, 1.0, 0.0]]), [0], received={"w": torch.tensor(2.0)}, num_classes=3)
    got = FedNTD(FedNtdParams(beta=2.0)).loss_terms(step)
    assert got.item() == pytest.approx(2 * 0.327813, abs=1e-5)


def test_first_step_of_a_round_equals_fedavgs_and_the_second_does_not():
    settings = {"rounds": 1, "momentum": 0.0, "batch_size": 1000}
    one, ours = (end_of(name, **settings).weights["head.weight"] for name in ("fedavg", "fedntd"))
    torch.testing.assert_close(ours, one, atol=1e-6, rtol=0)
    two, ours = (end_of(name, local_epochs=3, **settings).weights["head.weight"] for name in ("fedavg", "fedntd"))
    assert not torch.allclose(ours, two, atol=1e-5, rtol=0)


def test_hidden_labels_are_refused(make_step):
    model = Model(weights={"w": torch.tensor(1.0)}, forward=scaled_inputs)
    with pytest.raises(FedbenchError, match="needs labels"):
        FedNTD(FedNtdParams()).loss_terms(make_step(model, torch.ones(2, 3), None))
