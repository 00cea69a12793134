"""pFedMe: Dinh, Tran, Nguyen 2020, Algorithm 1."""

import pytest
import torch

from fedbench.core.types import Model
from fedbench.rounds.loop import predict, train_round
from fedbench.testing import final_state
from tests.equations.kit import all_of, linear, run_of

X = torch.tensor([1.0, 2.0])


def slope(w):
    """The gradient of CE of logits (w . x, 0) with label 0."""
    return (torch.sigmoid(w @ X) - 1) * X


def trained(make_task, epochs, **training):
    model = Model({"w": torch.tensor([0.2, -0.1])}, linear)
    params = {"pfedme": {"pull": 3.0, "inner_lr": 0.1, "inner_steps": 2}}
    task = make_task(model, X[None], [0], method="pfedme", params=params, local_epochs=epochs, **training)
    return task.hooks.local_train(task=task).weights["w"], task.state["pfedme"]["weights/w"]


def test_k_steps_of_theta_and_one_of_w(make_task):
    w = torch.tensor([0.2, -0.1])
    theta = w - 0.1 * slope(w)
    theta = theta - 0.1 * (slope(theta) + 3 * (theta - w))
    found, own = trained(make_task, 1)
    torch.testing.assert_close(own, theta)
    # lr .5: w - .5 * 3 (w - theta)
    torch.testing.assert_close(found, w - 1.5 * (w - theta))


def test_theta_goes_on_from_the_step_before_around_the_new_w(make_task):
    w = torch.tensor([0.2, -0.1])
    theta = w
    for _ in range(2):
        for _ in range(2):
            theta = theta - 0.1 * (slope(theta) + 3 * (theta - w))
        w = w - 1.5 * (w - theta)
    found, own = trained(make_task, 2)
    torch.testing.assert_close(own, theta)
    torch.testing.assert_close(found, w)


def test_the_runs_optimiser_moves_w_by_lambda_times_the_way_to_theta(make_task):
    w = torch.tensor([0.2, -0.1])
    _, theta = trained(make_task, 1)
    found, _ = trained(make_task, 1, weight_decay=0.1)
    torch.testing.assert_close(found, w - 0.5 * (3 * (w - theta) + 0.1 * w))


def test_the_server_moves_by_beta_of_the_mean():
    states = {}
    for beta in (1.0, 0.25):
        run = run_of("pfedme", {"pfedme": {"beta": beta}}, rounds=1, executor="sequential")
        states[beta], _ = train_round(run, run.initial_state())
    for name, x in run.model.weights.items():
        assert not torch.equal(states[1.0].weights[name], x)
        torch.testing.assert_close(states[0.25].weights[name], x + 0.25 * (states[1.0].weights[name] - x))


@pytest.mark.parametrize(("stack", "backbone"), [("pfedme", "resnet8?width=1"), ("promptfl+pfedme", "clip:embedded")])
def test_own_models_predict_by_theta_with_the_clients_statistics(stack, backbone):
    run = run_of(stack, backbone=backbone, rounds=2)
    state = final_state(run)
    answer = predict(run, state, run.test, clients=(0, 1, 2, 3))
    inputs = all_of(run.test)
    seen = 0
    for client, labels in answer.by_client.items():
        kept = state.clients.get(client, {}).get("pfedme", {})
        own = {name.partition("/")[2]: tensor for name, tensor in kept.items()}
        assert not kept or own.keys() == state.weights.keys() | state.buffers.keys()
        logits = run.model.forward({**state.weights, **state.buffers, **own}, inputs, False).logits
        assert torch.equal(labels, logits.argmax(1))
        seen += bool(kept)
    assert seen >= 2
    sent = {**run.model.weights, **run.model.buffers}
    assert run.info.round_bytes == sum(t.numel() * t.element_size() for t in sent.values())
