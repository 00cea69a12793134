"""FedRep: Collins et al. 2021, Algorithm 1: the head first, then the body under it."""

import pytest
import torch

from fedbench.core.types import LinearHead, Model
from fedbench.testing import final_state
from fedbench_methods.fedrep import head_steps
from tests.equations.kit import body_and_head, run_of


def test_the_last_share_of_the_steps_is_the_bodys_and_both_have_one():
    # 20 % of 10, of 3 (0.6: one), of 2 (0.4: one all the same)
    assert [head_steps(steps, 0.2) for steps in (10, 3, 2)] == [8, 2, 1]
    # 90 % of 2 would leave the head without a step
    assert head_steps(2, 0.9) == 1 and head_steps(1, 0.5) == 0


def trained(make_task, epochs, **training):
    weights = {"body.weight": torch.tensor([2.0]), "head.weight": torch.tensor([0.5]), "head.bias": torch.zeros(1)}
    model = Model(weights, body_and_head, head=LinearHead())
    training = {"lr": 0.5, "local_epochs": epochs, **training}
    task = make_task(model, torch.ones(1, 1), [0], method="fedrep", params={"fedrep": {"body_share": 0.5}}, **training)
    return {name: value.item() for name, value in task.hooks.local_train(task=task).weights.items()}


def test_the_head_steps_under_the_received_body_and_the_body_under_the_new_head(make_task):
    found = trained(make_task, 2)
    # x 1, b 2, h .5: o = 1; r = sigmoid(o) - 1; step 1: h = .5 - .5 r b, bias = -.5 r
    r = torch.sigmoid(torch.tensor(1.0)) - 1
    h, bias = 0.5 - 0.5 * r * 2, -0.5 * r
    assert found["head.weight"] == pytest.approx(h.item()) and found["head.bias"] == pytest.approx(bias.item())
    # step 2: o = h b + bias, b = 2 - .5 r' h
    later = torch.sigmoid(h * 2 + bias) - 1
    assert found["body.weight"] == pytest.approx((2 - 0.5 * later * h).item())


def test_what_is_frozen_neither_decays_nor_coasts(make_task):
    # with decay alone at work the head would go on shrinking in the body's step, and coast by its momentum
    plain = trained(make_task, 2, momentum=0.9, weight_decay=0.1)
    r = torch.sigmoid(torch.tensor(1.0)) - 1
    assert plain["head.weight"] == pytest.approx((0.5 - 0.5 * (r * 2 + 0.1 * 0.5)).item())
    later = torch.sigmoid(torch.tensor(plain["head.weight"] * 2 + plain["head.bias"])) - 1
    # the body's first step: no momentum yet, and decay once
    assert plain["body.weight"] == pytest.approx((2 - 0.5 * (later * plain["head.weight"] + 0.1 * 2)).item())


def test_a_single_step_is_both_parts(make_task):
    found = trained(make_task, 1)
    r = torch.sigmoid(torch.tensor(1.0)) - 1
    assert found["body.weight"] == pytest.approx((2 - 0.5 * r * 0.5).item())
    assert found["head.weight"] == pytest.approx((0.5 - 0.5 * r * 2).item())


def test_in_a_run_heads_stay_and_the_body_is_averaged():
    run = run_of("fedrep", rounds=2)
    state = final_state(run)
    assert run.private == {"head.weight", "head.bias"}
    assert all(torch.equal(state.weights[name], run.model.weights[name]) for name in run.private)
    assert not torch.equal(state.weights["body.conv1.weight"], run.model.weights["body.conv1.weight"])
