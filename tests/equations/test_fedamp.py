"""FedAMP: Huang et al. 2021: every client is sent a mean in which the clients like it count most."""

from math import exp

import pytest
import torch

from fedbench.api import Unworkable
from fedbench.core.types import Model
from fedbench.rounds.loop import predict, train_round
from fedbench.rounds.messages import broadcast
from fedbench.testing import digest, final_state
from fedbench_methods.fedamp import attention, kept_by, personal_mean
from tests.equations.kit import RESNET, all_of, linear, run_of, runs

fedamp_run = runs("fedamp", executor="sequential")


def test_attention_is_alpha_times_the_slope_of_one_minus_exp():
    # 3 e^{-t/2} / 2 at t = 0, 2, 4
    found = attention(torch.tensor([0.0, 2.0, 4.0]), 2.0, 3.0)
    torch.testing.assert_close(found, torch.tensor([1.5, 1.5 * exp(-1), 1.5 * exp(-2)]))


def test_the_mean_by_hand():
    weights = {3: {"a": torch.tensor([0.0]), "b": torch.tensor([0.0])}}
    weights |= {
        5: {"a": torch.tensor([1.0]), "b": torch.tensor([1.0])},
        9: {"a": torch.tensor([0.0]), "b": torch.tensor([2.0])},
    }
    # squared distances from client 3: 2 and 4; sigma 4, alpha 1
    near, far = exp(-0.5) / 4, exp(-1) / 4
    found = personal_mean(weights, 3, 4.0, 1.0)
    assert found["a"].item() == pytest.approx(near) and found["b"].item() == pytest.approx(near + 2 * far)
    # from client 5, at (1, 1): 2 to both; (1 - 2 xi) w_5 + xi (w_3 + w_9)
    found = personal_mean(weights, 5, 4.0, 1.0)
    assert found["a"].item() == pytest.approx(1 - 2 * near) and found["b"].item() == pytest.approx(
        1 - 2 * near + 2 * near
    )


def test_far_clients_leave_the_own_weights_to_the_bit_and_alone_so_does_the_only_one():
    weights = {k: {"a": torch.full((3,), 0.1 + 1e3 * k)} for k in range(3)}
    assert torch.equal(personal_mean(weights, 1, 1.0, 1.0)["a"], weights[1]["a"])
    assert personal_mean({4: weights[1]}, 4, 1.0, 1.0) is weights[1]


def test_shares_of_more_than_one_are_refused():
    weights = {k: {"a": torch.zeros(1)} for k in range(4)}
    # three others at distance 0: 3 alpha / sigma
    assert personal_mean(weights, 0, 3.0, 1.0)["a"] == 0
    with pytest.raises(Unworkable, match="a share of 1.5 in that of client 0"):
        personal_mean(weights, 0, 2.0, 1.0)


def test_a_client_is_pulled_to_what_it_received_by_lambda_over_alpha(make_task):
    w, x = torch.tensor([0.2, -0.1]), torch.tensor([1.0, 0.0])
    task = make_task(
        Model({"w": w}, linear),
        x[None],
        [0],
        method="fedamp",
        params={"fedamp": {"pull": 0.6, "alpha": 2.0}},
        local_epochs=2,
    )
    found = task.hooks.local_train(task=task).weights["w"]
    first = w - 0.5 * (torch.sigmoid(w[0]) - 1) * x
    # the second step is pulled back by 0.6 / 2 of the first
    second = first - 0.5 * ((torch.sigmoid(first[0]) - 1) * x + 0.3 * (first - w))
    torch.testing.assert_close(found, second)


@pytest.mark.parametrize("stack", ["fedamp", "promptfl+fedamp"])
def test_the_server_keeps_each_clients_last_weights_and_mixes_them_for_it(stack):
    run = fedamp_run(stack, {"sigma": 4.0}, rounds=3)
    state = final_state(run)
    kept = kept_by(state.server["fedamp"])
    assert len(kept) >= 3
    for client, own in kept.items():
        weights = {k: {n.removeprefix("weights/"): t for n, t in each.items()} for k, each in kept.items()}
        sent = broadcast(run, state, client).weights
        for name, value in personal_mean(weights, client, 4.0, 1.0).items():
            assert torch.equal(sent[name], value) and not torch.equal(value, own[f"weights/{name}"])
    answer = predict(run, state, run.test, clients=tuple(kept))
    inputs = all_of(run.test)
    for client, labels in answer.by_client.items():
        own = {n.removeprefix("weights/"): t for n, t in kept[client].items()}
        assert torch.equal(labels, run.model.forward(own, inputs, False).logits.argmax(1))


def test_the_first_round_is_fedavgs_and_a_client_that_sent_nothing_has_the_global_model():
    run, plain = (
        fedamp_run(params={"pull": 0.0}, executor="auto", rounds=3),
        run_of("fedavg", backbone="clip:embedded"),
    )
    state, _ = train_round(run, run.initial_state())
    assert digest(state) == digest(train_round(plain, plain.initial_state())[0])
    kept = kept_by(state.server["fedamp"])
    answer = predict(run, state, run.test, clients=(0, 1, 2, 3))
    assert all(torch.equal(answer.by_client[k], answer.labels) for k in {0, 1, 2, 3} - kept.keys())


def test_running_statistics_come_back_to_their_client():
    run = fedamp_run(backbone=RESNET, rounds=3)
    state = final_state(run, until=1)
    for client, own in kept_by(state.server["fedamp"]).items():
        sent = broadcast(run, state, client)
        assert sent.buffers.keys() == state.buffers.keys()
        assert all(torch.equal(t, own[f"buffers/{n}"]) for n, t in sent.buffers.items())


def test_with_pfllibs_norm_the_pull_has_one_strength_at_any_distance(make_task):
    w, x = torch.tensor([0.2, -0.1]), torch.tensor([1.0, 0.0])
    params = {"fedamp": {"pull": 0.6, "alpha": 2.0, "norm": "unsquared"}}
    task = make_task(Model({"w": w}, linear), x[None], [0], method="fedamp", params=params, local_epochs=2)
    found = task.hooks.local_train(task=task).weights["w"]
    first = w - 0.5 * (torch.sigmoid(w[0]) - 1) * x
    # (0.3 / 2) times the unit vector from w to the first step, which is along x
    second = first - 0.5 * ((torch.sigmoid(first[0]) - 1) * x + 0.15 * x)
    torch.testing.assert_close(found, second)
