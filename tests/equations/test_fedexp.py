"""FedExP: Jhunjhunwala, Wang, Joshi 2023."""

from dataclasses import replace

import pytest
import torch

from fedbench.core.method.tasks import AggregationTask, EvaluationTask
from fedbench.core.spec import RunSpec
from fedbench.core.types import Model, Predictions, Update
from fedbench.rounds.loop import evaluate
from fedbench.testing import final_state
from fedbench.toolkit.fedavg import average
from fedbench_methods.fedexp import FedExP, FedExPParams
from tests.equations.kit import aggregation, all_of, run_of, updates_of

# eps of 1e-6 is the least allowed: what it adds to these numbers is below 1e-4
TINY = 1e-6


def stepped(changes, sizes, *, x=None, round=1, state=None, training=None, **params):
    """x after the round, and eta_g."""
    x = torch.zeros(len(changes[0])) if x is None else x
    updates = updates_of([x + torch.tensor(change) for change in changes], sizes)
    task = aggregation({"w": x}, updates, state, round=round, training=training)
    answer = FedExP(FedExPParams(**params)).aggregate(task, average)
    return answer["w"], task.metrics["fedexp_server_lr"]


def test_clients_that_agree_are_averaged_as_under_fedavg_bit_for_bit():
    # the ratio is 1/2
    x = torch.tensor([0.1, -3.0])
    w, rate = stepped([[0.3, 0.7]] * 2, [1, 2], x=x)
    assert rate == 1.0
    assert torch.equal(w, x + torch.tensor([0.3, 0.7]))


def test_orthogonal_changes_are_at_the_boundary_and_opposed_ones_go_further():
    # (1, 0) and (0, 1), p = 1/2: |D|^2 = 1/2, 1 / (2 * .5) = 1
    assert stepped([[1.0, 0.0], [0.0, 1.0]], [1, 1], epsilon=TINY)[1] == pytest.approx(1.0, abs=1e-4)
    # 1 and -.5: D = .25, (1 + .25) / 2 = .625, .625 / (2 * .0625) = 5; x = 5 * .25
    w, rate = stepped([[1.0], [-0.5]], [1, 1], epsilon=TINY)
    assert rate == pytest.approx(5.0, rel=1e-4)
    assert w.item() == pytest.approx(1.25, rel=1e-4)
    # the same with all signs turned
    assert stepped([[-1.0], [0.5]], [1, 1], epsilon=TINY)[0].item() == pytest.approx(-1.25, rel=1e-4)


def test_clients_weigh_by_their_samples_in_both_sums():
    # p = 1/4, 3/4: D = .25 - .375 = -.125, sum p |D_k|^2 = .25 + .1875 = .4375; .4375 / (2 * .015625) = 14
    w, rate = stepped([[1.0], [-0.5]], [1, 3], epsilon=TINY)
    assert rate == pytest.approx(14.0, rel=1e-3)
    assert w.item() == pytest.approx(-1.75, rel=1e-3)
    # uniform: 5, as above
    assert stepped([[1.0], [-0.5]], [1, 3], epsilon=TINY, training={"weighting": "uniform"})[1] == pytest.approx(
        5, rel=1e-3
    )


def test_epsilon_by_hand_once_a_cohort_or_once_a_client():
    # .625 / (2 (.0625 + .0625)) = 2.5; with 2 clients .625 / (2 (.0625 + .125)) = 5/3
    assert stepped([[1.0], [-0.5]], [1, 1], epsilon=0.0625)[1] == pytest.approx(2.5)
    assert stepped([[1.0], [-0.5]], [1, 1], epsilon=0.0625, epsilon_of="client")[1] == pytest.approx(5 / 3)


def test_epsilon_falls_with_the_square_of_the_clients_rate():
    # round 2 at lr_decay .5: .0625 / 4; .625 / (2 (.0625 + .015625)) = 4
    assert stepped([[1.0], [-0.5]], [1, 1], epsilon=0.0625, round=2, training={"lr_decay": 0.5})[1] == pytest.approx(4)


def test_the_norm_is_over_all_weights_together():
    x = {"a": torch.zeros(1), "b": torch.zeros(1)}
    updates = (
        Update(0, {"a": torch.tensor([1.0]), "b": torch.tensor([2.0])}, {}, 1),
        Update(1, {"a": torch.tensor([-0.5]), "b": torch.tensor([-2.0])}, {}, 1),
    )
    task = aggregation(x, updates)
    FedExP(FedExPParams(epsilon=TINY)).aggregate(task, average)
    # (1 + 4 + .25 + 4) / 2 = 4.625; D = (.25, 0); 4.625 / (2 * .0625) = 37
    assert task.metrics["fedexp_server_lr"] == pytest.approx(37, rel=1e-3)


def test_predictions_are_by_the_mean_of_the_last_two_iterates_from_round_2_on():
    seen = []

    def rest(task):
        seen.append(task.weights["w"].item())
        return Predictions(torch.zeros(1, dtype=torch.int64))

    method, state, x = FedExP(FedExPParams()), {}, torch.tensor([0.0])
    task = EvaluationTask(Model({"w": x}, None), {"w": x}, {}, None, 2, state=state)
    method.evaluate(task, rest)
    for number in (1, 2):
        # one client that moves by 1
        updates = (Update(0, {"w": x + 1}, {}, 1),)
        x = method.aggregate(AggregationTask(number, {"w": x}, {}, updates, task.model, RunSpec(), state), average)["w"]
        method.evaluate(replace(task, weights={"w": x}), rest)
    # x: 0, 1, 2; the initial weights are no iterate
    assert seen == [0.0, 1.0, 1.5]
    # a client's own model is its own
    method.evaluate(replace(task, weights={"w": x}, client=0), rest)
    assert seen[-1] == 2.0


def test_it_predicts_so_in_a_run_around_another_methods_clients():
    run = run_of("fedexp+scaffold", rounds=3)
    before, after = final_state(run, until=2), final_state(run)
    inputs = all_of(run.test)
    weights = {name: (before.weights[name] + value) / 2 for name, value in after.weights.items()}
    assert torch.equal(evaluate(run, after)[1].labels, run.model.forward(weights, inputs, False).logits.argmax(1))
