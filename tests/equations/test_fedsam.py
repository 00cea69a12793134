"""FedSAM and FedASAM: Qu et al. 2022, Caldarola et al. 2022."""

import pytest
import torch

from fedbench.core.types import Model, Outputs, StepGradients
from fedbench.toolkit.wrapping import with_own
from fedbench_methods.fedasam import FedASAM, FedASAMParams, scales
from fedbench_methods.fedsam import FedSAM, FedSAMParams
from fedbench_methods.shared.ascent import both, perturbation
from tests.equations.kit import linear


def quadratic(a):
    """``rest`` whose loss is a w^2 / 2, of every weight."""

    def rest(step):
        loss = sum((a * w.square() / 2).sum() for w in step.weights.values())
        return StepGradients({name: a * w.detach() for name, w in step.weights.items()}, loss.detach())

    return rest


@pytest.fixture
def step_at(make_step):
    def make(weights, model=None):
        model = model or Model(weights, linear)
        leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
        return make_step(model, torch.zeros(2, 2), [0, 1], weights=leaves)

    return make


@pytest.mark.parametrize("w", [2.0, -3.0])
def test_on_a_quadratic_the_gradient_is_that_a_step_of_rho_away_from_zero(step_at, w):
    step = step_at({"w": torch.tensor([w])})
    found = FedSAM(FedSAMParams(rho=0.5)).local_gradients(step, quadratic(3.0))
    # a (w + rho sign w), and the loss at w
    assert found.by_name["w"].item() == pytest.approx(3 * (w + (0.5 if w > 0 else -0.5)))
    assert found.loss.item() == pytest.approx(1.5 * w * w)


def test_the_norm_is_over_all_tensors():
    # |g| = 5 over both
    moved = perturbation({"a": torch.tensor([3.0]), "b": torch.tensor([0.0, -4.0])}, 0.5)
    torch.testing.assert_close(moved["a"], torch.tensor([0.3]))
    torch.testing.assert_close(moved["b"], torch.tensor([0.0, -0.4]))


def test_asam_scales_twice_by_the_weight_and_biases_not_at_all():
    # T = (|-2| + .5, 1) = (2.5, 1), g = (2, 12): T g = (5, 12), norm 13; e = .26 (2.5 * 5, 12) / 13
    weights = {"w": torch.tensor([-2.0]), "head.bias": torch.tensor([7.0])}
    moved = perturbation({"w": torch.tensor([2.0]), "head.bias": torch.tensor([12.0])}, 0.26, scales(weights, 0.5))
    assert moved["w"].item() == pytest.approx(0.02 * 12.5)
    assert moved["head.bias"].item() == pytest.approx(0.02 * 12)


def test_asam_with_eta_one_and_weights_of_zero_is_sam(step_at):
    step = step_at({"w": torch.tensor([0.0, 0.0])})

    def slope(step):
        return StepGradients({"w": torch.tensor([3.0, -4.0]) + step.weights["w"].detach()}, torch.tensor(0.0))

    sam = FedSAM(FedSAMParams(rho=0.5)).local_gradients(step, slope)
    asam = FedASAM(FedASAMParams(rho=0.5, eta=1.0)).local_gradients(step, slope)
    torch.testing.assert_close(sam.by_name["w"], torch.tensor([3.3, -4.4]))
    torch.testing.assert_close(asam.by_name["w"], sam.by_name["w"])


def test_a_gradient_of_zero_moves_nothing(step_at):
    found = FedSAM(FedSAMParams(rho=0.5)).local_gradients(step_at({"w": torch.tensor([0.0])}), quadratic(1.0))
    assert found.by_name["w"].item() == 0.0


@pytest.mark.parametrize("name", ["fedsam", "fedasam"])
def test_a_local_step_by_hand(train_client, name):
    # logits (w . x, 0), label 0, lr .5; g = (sigmoid(w1) - 1) (1, 0) at x = (1, 0): e = -rho (1, 0), w1 negative slope
    found = train_client([(1.0, 0.0, 0)], start=(0.3, 0.7), method=name, params={name: {"rho": 0.25}}).weights["w"]
    # ASAM: T = (.3 + .2, .9): T g has one entry, so e = rho T_1 sign
    move = 0.25 if name == "fedsam" else 0.25 * 0.5
    slope = torch.sigmoid(torch.tensor(0.3 - move)) - 1
    torch.testing.assert_close(found, torch.tensor([0.3 - 0.5 * slope.item(), 0.7]))


def test_statistics_and_what_a_loss_keeps_are_those_of_the_second_pass(make_step):
    def forward(tensors, inputs, training):
        if training:
            tensors["seen"] += 1
        score = inputs @ tensors["w"]
        return Outputs(torch.stack([score, -score], 1), inputs)

    model = Model({"w": torch.tensor([0.1, 0.2])}, forward, {"seen": torch.zeros(())})
    weights = {"w": model.weights["w"].clone().requires_grad_()}
    step = make_step(model, torch.ones(2, 2), [0, 1], weights=weights, buffers={"seen": torch.zeros(())})
    step.task.state["counter"] = {"n": torch.tensor(0)}
    visited = []

    def rest(step):
        visited.append(step.weights["w"].detach().clone())
        step.task.state["counter"] = {"n": step.task.state["counter"]["n"] + 1}
        loss = step.outputs.logits.square().sum() + step.weights["w"].sum()
        [gradient] = torch.autograd.grad(loss, [step.weights["w"]])
        return StepGradients({"w": gradient}, loss.detach())

    both(step, rest, 0.5)
    assert step.buffers["seen"].item() == 1
    assert step.task.state["counter"]["n"].item() == 1
    assert (visited[1] - visited[0]).norm().item() == pytest.approx(0.5)
    assert torch.equal(step.weights["w"], model.weights["w"])


def test_a_model_of_the_clients_own_climbs_by_a_norm_of_its_own(step_at):
    model = with_own(Model({"w": torch.tensor([0.0])}, linear), "own/")
    step = step_at({"w": torch.tensor([2.0]), "own/w": torch.tensor([-5.0])}, model)
    found = FedSAM(FedSAMParams(rho=0.5)).local_gradients(step, quadratic(1.0)).by_name
    assert found["w"].item() == pytest.approx(2.5)
    assert found["own/w"].item() == pytest.approx(-5.5)
