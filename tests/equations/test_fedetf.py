"""FedETF: Li et al. 2023: a fixed equiangular classifier, a balanced softmax and a learned temperature."""

import pytest
import torch
from torch.nn.functional import cross_entropy, linear, normalize

from fedbench.testing import final_state
from fedbench_methods.fedetf import SCALE
from tests.equations.kit import runs

run_of = runs("fedetf", executor="sequential")


@pytest.mark.parametrize("width", ["classes", "features"])
def test_the_classifier_is_a_simplex_that_the_seed_gives(width):
    found = run_of(params={"width": width}).model.constants["etf"]
    assert found.shape == (4, 4 if width == "classes" else 128)
    wanted = torch.full((4, 4), -1 / 3).fill_diagonal_(1.0)
    torch.testing.assert_close(found @ found.T, wanted)
    assert torch.equal(found, run_of(params={"width": width}).model.constants["etf"])
    other = run_of(seed=1)
    assert not torch.equal(run_of().model.constants["etf"], other.model.constants["etf"])


def test_logits_are_b_times_the_cosines_of_the_projection():
    run = run_of(params={"scale": 3.0})
    inputs, weights = run.test.read(torch.arange(9)), run.model.weights
    made = run.model.forward(weights, inputs, False)
    z = linear(normalize(inputs, dim=-1), weights["projection.weight"], weights["projection.bias"])
    unit = z / z.norm(dim=1, keepdim=True)
    torch.testing.assert_close(made.features, unit)
    torch.testing.assert_close(made.logits, 3 * unit @ run.model.constants["etf"].T)


def test_loss_is_cross_entropy_with_the_logarithm_of_the_counts_added(make_step):
    run = run_of()
    inputs, labels = run.train.read(torch.arange(6)), [0, 0, 1, 0, 2, 1]
    weights = {name: value.clone().requires_grad_() for name, value in run.model.weights.items()}
    step = make_step(run.model, inputs, labels, weights=weights, method="fedetf", num_classes=4)
    loss = step.task.hooks.local_objective(step=step)
    logits = run.model.forward(weights, inputs, True).logits
    shifted = logits + torch.tensor([3.0, 2.0, 1.0, 1e-8]).log()
    torch.testing.assert_close(loss, cross_entropy(shifted, torch.tensor(labels)))
    loss.backward()
    # d loss / d b = <softmax - onehot, cosines>
    residual = (shifted.softmax(1) - torch.eye(4)[torch.tensor(labels)]) / 6
    torch.testing.assert_close(weights[SCALE].grad, (residual * logits / weights[SCALE]).sum().detach())


@pytest.mark.parametrize("backbone", ["clip:embedded", "convnet"])
def test_the_head_is_gone_and_what_takes_its_place_is_trained_and_sent(backbone):
    run = run_of(backbone=backbone, rounds=2)
    state = final_state(run)
    assert not {"head.weight", "head.bias"} & run.model.weights.keys() and run.model.head is None
    assert all(not torch.equal(value, run.model.weights[name]) for name, value in state.weights.items())
    width = {"clip:embedded": 128, "convnet": 84}[backbone]
    body = sum(w.numel() for n, w in run.model.weights.items() if n.startswith("body."))
    assert run.info.round_bytes == 4 * (body + 4 * width + 4 + 1)


def test_the_projection_and_b_are_one_layer_for_a_personalisation():
    run = run_of("fedetf+fedper", backbone="convnet", rounds=2)
    assert run.private == {"projection.weight", "projection.bias", SCALE}
