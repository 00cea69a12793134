"""Clients in turn: Li and Lyu 2023, Algorithm 1."""

from dataclasses import replace

import pytest
import torch

from fedbench.core.errors import MethodFault
from fedbench.rounds.exchange import aggregated_state, train_clients
from fedbench.rounds.loop import rounds
from fedbench.rounds.messages import broadcasts, client_task
from fedbench.toolkit.fedavg import average_buffers, weighted_mean
from fedbench.toolkit.local_training import local_sgd
from fedbench_methods.shared.clients import drawn_order
from tests.equations.kit import RESNET, runs

turn_run = runs("in-turn")


def tasks_of(run, state, clients=(0, 1, 3)):
    sent = broadcasts(run, state, clients, 0)
    return [client_task(run, state, 1, 0, client, sent[client]) for client in clients]


def trained(run):
    state = run.initial_state()
    tasks = tasks_of(run, state)
    return state, tasks, train_clients(run, state, tasks)[1]


def test_the_order_is_of_the_round_and_seed_and_keeps_for_those_who_are_left():
    orders = {tuple(drawn_order(range(6), number, seed)) for number in range(4) for seed in range(4)}
    assert len(orders) == 16 and all(sorted(order) == list(range(6)) for order in orders)
    whole = drawn_order(range(6), 3, 1)
    assert drawn_order({5, 0, 2}, 3, 1) == [client for client in whole if client in {5, 0, 2}]


def test_each_client_goes_on_from_where_the_one_before_it_ended():
    run = turn_run(rounds=2)
    _, tasks, updates = trained(run)
    assert [update.client for update in updates] == [0, 1, 3]
    by_client, weights = {task.client: task for task in tasks}, {}
    for client in drawn_order(by_client, 1, run.spec.seed):
        task = by_client[client]
        wanted = local_sgd(replace(task, received={**task.received, **weights}, inputs=task.inputs.resident()))
        [found] = [update for update in updates if update.client == client]
        assert all(torch.equal(found.weights[name], wanted.weights[name]) for name in wanted.weights)
        weights = wanted.weights


@pytest.mark.parametrize("end", ["last", "mean"])
def test_the_round_ends_at_the_last_clients_model_or_at_the_mean_of_all(end):
    run = turn_run(params={"end": end}, rounds=2)
    state, _, updates = trained(run)
    after, _ = aggregated_state(run, state, updates, 0, 1)
    last = next(u for u in updates if u.client == drawn_order((0, 1, 3), 1, run.spec.seed)[-1])
    sizes = torch.tensor([update.num_examples for update in updates], dtype=torch.float64)
    for name, found in after.weights.items():
        mean = weighted_mean([update.weights[name] for update in updates], sizes / sizes.sum())
        assert torch.equal(found, last.weights[name] if end == "last" else mean)


def test_where_the_last_client_is_lost_the_one_before_it_counts():
    run = turn_run(rounds=2)
    state, _, updates = trained(run)
    *_, before, last = drawn_order((0, 1, 3), 1, run.spec.seed)
    arrived = tuple(update for update in updates if update.client != last)
    after, _ = aggregated_state(run, state, arrived, 0, 1)
    [wanted] = [update.weights for update in updates if update.client == before]
    assert all(torch.equal(after.weights[name], wanted[name]) for name in wanted)


def test_running_statistics_go_on_from_client_to_client():
    run = turn_run(backbone=RESNET, rounds=2)
    state, _, updates = trained(run)
    first, *_, last = drawn_order((0, 1, 3), 1, run.spec.seed)
    by_client = {update.client: update for update in updates}
    after, _ = aggregated_state(run, state, updates, 0, 1)
    counters = [name for name, value in state.buffers.items() if not value.is_floating_point()]
    for name, found in after.buffers.items():
        assert torch.equal(found, by_client[last].buffers[name])
    assert counters and all(after.buffers[n] > by_client[first].buffers[n] for n in counters)
    averaged = average_buffers(updates, "samples", state.buffers)
    assert any(not torch.equal(after.buffers[n], averaged[n]) for n in averaged)


def test_a_private_prompt_stays_with_its_client():
    run = turn_run("fedotp+in-turn", rounds=2)
    state, tasks, updates = trained(run)
    assert run.private and not any(run.private & update.weights.keys() for update in updates)
    assert sorted(state.own) == [0, 1, 3]
    names = run.private
    for client in (1, 3):
        assert any(not torch.equal(state.own[0][name], state.own[client][name]) for name in names)


def test_drift_is_from_the_model_that_a_client_was_handed():
    run = turn_run("drift+in-turn", rounds=2)
    tasks, updates = train_clients(run, (state := run.initial_state()), tasks_of(run, state))
    first, last = drawn_order((0, 1, 3), 1, run.spec.seed)[::2]
    received, sent = ({one.client: one for one in these} for these in (tasks, updates))
    second = next(client for client in (0, 1, 3) if client not in (first, last))
    assert all(torch.equal(received[first].received[name], value) for name, value in state.weights.items())
    assert all(torch.equal(received[last].received[name], value) for name, value in sent[second].weights.items())
    told = [record.measured for _, record, _ in rounds(run, state)]
    assert all(found["drift"] > 0 for found in told if found)


def test_an_order_of_other_clients_is_refused(monkeypatch):
    run = turn_run(rounds=2)
    monkeypatch.setattr("fedbench_methods.in_turn.drawn_order", lambda clients, round, seed: [0, 1])
    with pytest.raises(MethodFault, match=r"in-turn answers the hook turns with \[0, 1\]"):
        trained(run)
