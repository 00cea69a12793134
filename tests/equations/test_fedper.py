"""FedPer: Arivazhagan et al. 2019; and its reverse, LG-FedAvg: Liang et al. 2020."""

import pytest
import torch

from fedbench.rounds.exchange import schedule_of
from fedbench.rounds.executors.sequential import train_client
from fedbench.rounds.loop import predict, train_round
from fedbench.testing import final_state, tiny_run, tiny_spec
from tests.equations.kit import all_of, run_of, task_of


def of_one_round(spec):
    """What the clients of round 1 train under FedAvg, and their numbers of samples."""
    run = tiny_run(spec, executor="sequential")
    state = run.initial_state()
    tasks = [task_of(run, k, state=state) for k in schedule_of(run, 1).training]
    return run, {task.client: train_client(task) for task in tasks}


def mean(updates, name):
    total = sum(u.num_examples for u in updates.values())
    return sum(u.num_examples / total * u.weights[name].double() for u in updates.values()).float()


@pytest.mark.parametrize("method", ["fedper", "lg-fedavg"])
def test_one_part_is_the_weighted_mean_and_the_other_what_each_client_trained(method):
    spec = tiny_spec("fedavg", backbone="resnet8?width=1")
    plain, updates = of_one_round(spec)
    run = run_of(method, backbone="resnet8?width=1", executor="sequential")
    state, _ = train_round(run, run.initial_state())
    head = {"head.weight", "head.bias"}
    private = head if method == "fedper" else (plain.model.weights.keys() | plain.model.buffers.keys()) - head
    assert run.private == private
    assert len(updates) == 2 and len({u.num_examples for u in updates.values()}) == 2
    for name in plain.model.weights:
        if name in private:
            assert torch.equal(state.weights[name], plain.model.weights[name]), (
                "the global model keeps the initial ones"
            )
            assert all(torch.equal(state.own[k][name], u.weights[name]) for k, u in updates.items())
        else:
            torch.testing.assert_close(state.weights[name], mean(updates, name))
    assert state.own.keys() == updates.keys()
    sent = [t for n, t in {**plain.model.weights, **plain.model.buffers}.items() if n not in private]
    assert run.info.round_bytes == sum(t.numel() * t.element_size() for t in sent)


def test_own_models_are_the_shared_layers_with_the_clients_own():
    run = run_of("fedper", rounds=2)
    state = final_state(run)
    answer = predict(run, state, run.test, clients=(0, 1, 2, 3))
    inputs = all_of(run.test)
    for client, labels in answer.by_client.items():
        weights = {**state.weights, **state.own.get(client, {})}
        assert torch.equal(labels, run.model.forward(weights, inputs, False).logits.argmax(1))
    initial = {**state.weights, **{name: run.model.weights[name] for name in run.private}}
    assert torch.equal(answer.labels, run.model.forward(initial, inputs, False).logits.argmax(1))


def test_more_layers_are_private_where_asked_for():
    run = run_of("fedper", {"fedper": {"layers": 2}}, rounds=1)
    assert run.private == {"body.fc2.weight", "body.fc2.bias", "head.weight", "head.bias"}


@pytest.mark.parametrize(("method", "kept"), [("fedper", "last"), ("lg-fedavg", "first")])
def test_of_a_prompt_some_context_vectors_are_private_and_it_trains_as_a_whole(method, kept):
    whole = tiny_spec("promptfl", backbone="clip:embedded")
    plain, updates = of_one_round(whole)
    run = run_of(f"promptfl+{method}", backbone="clip:embedded", executor="sequential")
    assert run.private == {f"{kept}.prompt.context"}
    first = final_state(run, until=1)
    rows = {"first": slice(0, 8), "last": slice(8, 16)}
    for client, update in updates.items():
        assert torch.equal(first.own[client][f"{kept}.prompt.context"], update.weights["prompt.context"][rows[kept]])
    other = "first" if kept == "last" else "last"
    averaged = mean(updates, "prompt.context")[rows[other]]
    torch.testing.assert_close(first.weights[f"{other}.prompt.context"], averaged)
    context = torch.cat([run.model.weights["first.prompt.context"], run.model.weights["last.prompt.context"]])
    assert torch.equal(context, plain.model.weights["prompt.context"])
    # 8 of 16 vectors of width 64
    assert run.info.round_bytes == 4 * 8 * 64


@pytest.mark.parametrize("learner", ["fedclip", "maple", "clip-lora"])
@pytest.mark.parametrize("method", ["fedper", "lg-fedavg", "fedrep"])
def test_the_layers_of_any_learner_are_told_apart_by_name(learner, method):
    run = run_of(f"{learner}+{method}", backbone="clip:embedded")
    last = {"fedclip": "adapter.W2", "maple": "coupling.1.weight", "clip-lora": "lora.text.1.v.A"}[learner]
    assert (last in run.private) == (method != "lg-fedavg")
    assert 0 < len(run.private) < len(run.model.weights)
