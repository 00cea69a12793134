"""APFL: Deng, Kamani, Mahdavi 2020, Algorithm 1."""

import math

import pytest
import torch

from fedbench.core.types import Model
from fedbench.rounds.executors.sequential import train_client
from fedbench.rounds.loop import predict
from fedbench.testing import final_state
from fedbench.toolkit.wrapping import beside, with_own
from fedbench_methods.apfl import OWN, SHARE, bounded, mixed
from tests.equations.kit import all_of, linear, run_of


def trained(make_task, alpha=0.25, **params):
    w, v = torch.tensor([0.2, -0.1]), torch.tensor([1.0, 0.4])
    model = with_own(Model({"w": w}, linear), OWN)
    received = {"w": w, OWN + "w": v}
    if params.get("alpha_moves") == "step":
        model, received = beside(model, {SHARE: torch.tensor(alpha)}), {**received, SHARE: torch.tensor(alpha)}
    params = {"apfl": {"alpha": alpha, **params}}
    task = make_task(model, torch.tensor([[1.0, 2.0]]), [0], method="apfl", params=params, received=received)
    return w, v, task.hooks.local_train(task=task).weights


def moved(make_task, alpha, v, kept=None, **training):
    """α_k after a round, of a client that has ``kept`` another than the first one."""
    w = torch.tensor([0.2, -0.1])
    received = {"w": w, OWN + "w": torch.tensor(v)}
    state = {} if kept is None else {"apfl": {SHARE: torch.tensor(kept)}}
    task = make_task(
        with_own(Model({"w": w}, linear), OWN),
        torch.tensor([[1.0, 2.0]]),
        [0],
        method="apfl",
        params={"apfl": {"alpha": alpha}},
        received=received,
        state=state,
        **training,
    )
    train_client(task)
    return float(task.state["apfl"][SHARE])


@pytest.mark.parametrize("training", [{}, {"local_epochs": 3, "momentum": 0.9, "weight_decay": 0.1, "clip_norm": 0.01}])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_share_moves_once_a_round_by_plain_sgd(make_task, training, optimizer):
    # as below, u . x = .45 and <v - w, slope> = -(1 - sigmoid(.45)) 1.8; lr .5
    wanted = 0.25 + 0.5 * (1 - 1 / (1 + math.exp(-0.45))) * 1.8
    assert moved(make_task, 0.25, [1.0, 0.4], optimizer=optimizer, **training) == pytest.approx(wanted)
    assert moved(make_task, 0.9, [1.0, 0.4], 0.25, optimizer=optimizer, **training) == pytest.approx(wanted)


def test_the_kept_share_is_clipped(make_task):
    assert moved(make_task, 0.9, [1.0, 0.4], lr=50.0) == 1
    assert moved(make_task, 0.1, [-1.0, -0.4], lr=50.0) == 0


def test_the_share_is_kept_alike_by_both_executors():
    at_once, one_by_one = (run_of("apfl", rounds=3, executor=name) for name in ("cohort", "sequential"))
    found, wanted = final_state(at_once), final_state(one_by_one)
    for client, kept in wanted.clients.items():
        torch.testing.assert_close(found.clients[client]["apfl"][SHARE], kept["apfl"][SHARE])


def test_the_three_steps_of_algorithm_1(make_task):
    w, v, found = trained(make_task, alpha_moves="step")
    x = torch.tensor([1.0, 2.0])
    # lr .5; the gradient of CE of logits (u . x, 0), label 0, at u is (sigmoid(u . x) - 1) x
    mixture = 0.25 * v + 0.75 * w  # (.4, .025): u . x = .45
    torch.testing.assert_close(mixture, torch.tensor([0.4, 0.025]))
    slope = (torch.sigmoid(torch.tensor(0.45)) - 1) * x
    torch.testing.assert_close(found["w"], w - 0.5 * (torch.sigmoid(w @ x) - 1) * x)
    torch.testing.assert_close(found[OWN + "w"], v - 0.5 * 0.25 * slope)
    # <v - w, slope> = -(1 - sigmoid(.45)) (.8 * 1 + .5 * 2)
    torch.testing.assert_close(found[SHARE], 0.25 - 0.5 * (v - w) @ slope)
    assert found[SHARE] > 0.25, "the own model is the better one here"


def test_a_fixed_share_is_no_weight_and_the_rest_is_the_same(make_task):
    _, _, adaptive = trained(make_task, alpha_moves="step")
    _, _, fixed = trained(make_task, adaptive=False)
    assert SHARE not in fixed and torch.equal(fixed[OWN + "w"], adaptive[OWN + "w"])


def test_a_share_outside_its_bounds_counts_as_the_nearest_and_comes_back():
    for value, bound in ((1.3, 1.0), (-0.2, 0.0), (0.7, 0.7)):
        alpha = torch.tensor(value, requires_grad=True)
        found = bounded(alpha)
        assert found.item() == pytest.approx(bound)
        found.backward()
        assert alpha.grad == 1


def test_the_mixture_is_w_to_the_bit_where_v_is_w_or_has_no_share():
    w, v = {"a": torch.rand(9)}, {"a": torch.rand(9)}
    assert torch.equal(mixed(w, w, torch.tensor(0.3))["a"], w["a"])
    assert torch.equal(mixed(v, w, torch.tensor(0.0))["a"], w["a"])


def test_own_models_predict_by_the_mixture_and_one_of_share_zero_as_the_global():
    run = run_of("apfl", rounds=2)
    state = final_state(run)
    answer = predict(run, state, run.test, clients=(0, 1, 2, 3))
    inputs = all_of(run.test)
    for client, labels in answer.by_client.items():
        own = {**state.weights, **state.own.get(client, {})}
        share = state.clients[client]["apfl"][SHARE] if client in state.clients else 0.5
        weights = {n: (1 - share) * own[n] + share * own[OWN + n] for n in ("head.weight", "head.bias")}
        assert torch.equal(labels, run.model.forward(weights, inputs, False).logits.argmax(1))
    assert any(kept["apfl"][SHARE] != 0.5 for kept in state.clients.values())
    run = run_of("apfl", {"apfl": {"alpha": 0.0, "adaptive": False}}, rounds=2)
    answer = predict(run, final_state(run), run.test, clients=(0, 1))
    assert all(torch.equal(labels, answer.labels) for labels in answer.by_client.values())
