"""Local: every client alone, with whatever a stack trains."""

from dataclasses import replace

import pytest
import torch

from fedbench.rounds.exchange import schedule_of
from fedbench.rounds.executors.sequential import train_client
from fedbench.rounds.loop import evaluate, predict
from fedbench.testing import final_state
from tests.equations.kit import all_of, run_of, task_of


@pytest.mark.parametrize("learner", ["fedavg", "promptfl"])
def test_a_client_goes_on_from_its_own_weights_and_nothing_is_sent(learner):
    run = run_of(f"{learner}+local", rounds=3, executor="sequential")
    assert run.info.round_bytes == 0
    plain = run_of(learner, rounds=3, executor="sequential")
    state, drawn = plain.initial_state(), [schedule_of(plain, number).training for number in (1, 2, 3)]
    # of four clients two a round: somebody is drawn twice, or where training starts from would not be seen
    client = max(range(4), key=lambda each: sum(each in cohort for cohort in drawn))
    own, weights = final_state(run).own[client], dict(state.weights)
    for number, cohort in enumerate(drawn, 1):
        if client in cohort:
            task = task_of(plain, client, state=state, round=number)
            weights = train_client(replace(task, received=weights)).weights
    assert weights
    assert all(torch.equal(value, own[name]) for name, value in weights.items())


def test_there_is_no_global_model_and_own_models_predict_by_the_clients_weights():
    run = run_of("local", rounds=3)
    state = final_state(run)
    metrics, answer = evaluate(run, state)
    assert answer.labels is None and "global_accuracy" not in metrics
    assert metrics["personal_mean_client_accuracy"] > 0
    answer = predict(run, state, run.test, clients=(0, 1, 2, 3))
    inputs = all_of(run.test)
    assert set(answer.by_client) == {0, 1, 2, 3}
    for client, labels in answer.by_client.items():
        weights = state.own.get(client, run.model.weights)
        assert torch.equal(labels, run.model.forward(weights, inputs, False).logits.argmax(1))


def test_running_statistics_stay_with_their_client():
    run = run_of("local", backbone="resnet8?width=1", rounds=2)
    state = final_state(run)
    assert run.model.buffers and set(run.model.buffers) <= run.private
    assert all(torch.equal(value, run.model.buffers[name]) for name, value in state.buffers.items())
    assert any(
        not torch.equal(own[name], run.model.buffers[name])
        for own in state.own.values()
        for name in own.keys() & run.model.buffers.keys()
    )
