"""FedBABU: Oh, Kim, Yun 2022: only the body is trained, under a head that stays as it was drawn."""

import pytest
import torch

from fedbench.core.errors import FedbenchError
from fedbench.core.types import LinearHead, Model
from fedbench.rounds.finetuning import finetuned_metrics
from fedbench.testing import final_state
from tests.equations.kit import body_and_head, end_of, run_of


def trained(make_task, *, round=1, **params):
    weights = {"body.weight": torch.tensor([2.0]), "head.weight": torch.tensor([0.5]), "head.bias": torch.zeros(1)}
    task = make_task(
        Model(weights, body_and_head, head=LinearHead()),
        torch.ones(1, 1),
        [0],
        method="fedbabu",
        params={"fedbabu": params},
        round=round,
        rounds=10,
        weight_decay=0.1,
        momentum=0.9,
        local_epochs=2,
    )
    return {name: value.item() for name, value in task.hooks.local_train(task=task).weights.items()}


def test_the_body_steps_and_the_head_does_not_move_by_decay_either(make_task):
    found = trained(make_task)
    assert found["head.weight"] == 0.5 and found["head.bias"] == 0.0
    # o = h b = 1; r = sigmoid(o) - 1; g = r h + .1 b; b = 2 - .5 g; then momentum .9
    b, velocity = torch.tensor(2.0), torch.tensor(0.0)
    for _ in range(2):
        velocity = 0.9 * velocity + (torch.sigmoid(0.5 * b) - 1) * 0.5 + 0.1 * b
        b = b - 0.5 * velocity
    assert found["body.weight"] == pytest.approx(b.item())


@pytest.mark.parametrize(("part", "moved"), [("all", "bh"), ("head", "h"), ("body", "b")])
def test_after_the_last_round_what_is_asked_for_is_trained(make_task, part, moved):
    found = trained(make_task, round=11, finetune=part)
    assert (found["body.weight"] != 2.0) == ("b" in moved)
    assert (found["head.weight"] != 0.5) == (found["head.bias"] != 0.0) == ("h" in moved)


@pytest.mark.parametrize("backbone", ["convnet", "resnet8?width=1"])
def test_in_a_run_the_head_stays_bit_for_bit_and_clients_fine_tune(backbone):
    run = run_of("fedbabu", backbone=backbone, rounds=2, finetune_epochs=1, weight_decay=0.1)
    state = final_state(run)
    for name, value in state.weights.items():
        assert torch.equal(value, run.model.weights[name]) == name.startswith("head.")
    before = {name: value.clone() for name, value in state.weights.items()}
    assert 0 <= finetuned_metrics(run, state)["finetuned_mean_client_accuracy"] <= 100
    assert all(torch.equal(value, before[name]) for name, value in state.weights.items())


def test_a_model_that_a_client_keeps_is_trained_whole():
    state = end_of("fedbabu+ditto", rounds=1)
    assert all(not torch.equal(own["ditto/head.weight"], state.weights["head.weight"]) for own in state.own.values())


def test_around_a_learner_the_last_layer_is_the_head_and_a_head_alone_is_refused():
    run = run_of("maple+fedbabu", backbone="clip:embedded", rounds=1)
    state = final_state(run)
    same = {name for name, value in state.weights.items() if torch.equal(value, run.model.weights[name])}
    assert same == {"coupling.1.weight", "coupling.1.bias"}
    with pytest.raises(FedbenchError, match="fedbabu needs a model of more layers"):
        run_of("fedbabu", backbone="clip:embedded")
