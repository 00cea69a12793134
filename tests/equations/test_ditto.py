"""Ditto: Li et al. 2021: every client's own model beside the global one, around whatever a stack trains."""

import torch

from fedbench.core.types import Model
from fedbench.rounds.loop import predict
from fedbench.testing import final_state
from fedbench.toolkit.wrapping import with_own
from fedbench_methods.ditto import OWN
from tests.equations.kit import all_of, linear, run_of, task_of


def test_own_model_takes_the_gradient_of_its_own_loss_and_lambda_times_the_way_from_x(make_task):
    model = with_own(Model(weights={"w": torch.tensor([0.2, -0.1])}, forward=linear), OWN)
    received = {"w": model.weights["w"], OWN + "w": torch.tensor([1.0, 0.0])}
    task = make_task(
        model, torch.tensor([[1.0, 0.0]]), [0], method="ditto", params={"ditto": {"pull": 0.4}}, received=received
    )
    weights = task.hooks.local_train(task=task).weights
    # lr 0.5; logits (w1, 0) and label 0: the gradient is (-(1 - sigmoid(w1)), 0)
    x, v = torch.tensor([0.2, -0.1]), torch.tensor([1.0, 0.0])
    slope_x, slope_v = torch.sigmoid(x[0]) - 1, torch.sigmoid(v[0]) - 1
    torch.testing.assert_close(weights["w"], x - 0.5 * torch.stack([slope_x, torch.tensor(0.0)]))
    # 0.4 (v - x) = (0.32, 0.04)
    torch.testing.assert_close(
        weights[OWN + "w"], v - 0.5 * (torch.stack([slope_v, torch.tensor(0.0)]) + 0.4 * (v - x))
    )


def test_without_a_pull_every_client_trains_alone():
    run = run_of("ditto", {"ditto": {"pull": 0.0}}, rounds=3, executor="sequential")
    own = final_state(run).own[0]
    only = run_of("fedavg", rounds=3, executor="sequential")
    state = only.initial_state()
    # client 0 alone: the own model goes on from its own weights whenever the client is drawn
    from fedbench.rounds.exchange import schedule_of
    from fedbench.rounds.executors.sequential import train_client

    weights = {name: value.clone() for name, value in state.weights.items()}
    for number in range(1, 4):
        if 0 in schedule_of(only, number).training:
            task = task_of(only, 0, state=state, round=number)
            weights = train_client(type(task)(**{**vars(task), "received": weights})).weights
    assert all(torch.equal(value, own[OWN + name]) for name, value in weights.items())


def test_own_models_predict_by_the_copy_and_the_global_one_by_the_rest():
    run = run_of("ditto", {"ditto": {"pull": 0.0}}, rounds=3)
    state = final_state(run)
    answer = predict(run, state, run.test, clients=(0, 1, 2, 3))
    fedavg = run_of("fedavg", rounds=3)
    for client, labels in answer.by_client.items():
        own = state.own.get(client, {})
        weights = {name: own.get(OWN + name, fedavg.model.weights[name]) for name in fedavg.model.weights}
        logits = fedavg.model.forward(weights, all_of(fedavg.test), False).logits
        assert torch.equal(labels, logits.argmax(1))
