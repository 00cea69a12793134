"""CLIMB: Shen et al. 2022: clients are weighted so that none has a loss far above the mean."""

import math

import pytest
import torch

from fedbench.core.method.tasks import ReportedTask
from fedbench.core.spec import RunSpec
from fedbench.core.types import Model
from fedbench.rounds.loop import rounds
from fedbench.toolkit.fedavg import average
from fedbench_methods.climb import Climb, ClimbParams, client_weights, next_dual
from fedbench_methods.shared.reweighting import loss_and_accuracy
from tests.equations.kit import aggregation, linear, run_of, updates_of


def of(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_dual_and_weights_by_hand():
    # L = (2, 0), mean 1, eps 0, eta 1, N = 2: (1/2, -1/2) clipped at 0
    dual = next_dual(of(0, 0), of(2, 0), 1.0, 0.0, 100.0)
    assert dual.tolist() == [0.5, 0.0] and client_weights(dual).tolist() == [1.25, 0.75]
    # once more: (1, 0); with eps .5 and eta 2: .5 + 2 (1 - .5) / 2 = 1
    assert next_dual(dual, of(2, 0), 1.0, 0.0, 100.0).tolist() == [1.0, 0.0]
    assert next_dual(dual, of(2, 0), 2.0, 0.5, 100.0).tolist() == [1.0, 0.0]
    assert next_dual(dual, of(2, 0), 1.0, 0.0, 0.75).tolist() == [0.75, 0.0]
    # back from (.5, 0) where client 1 is the worse: .5 - .5, 0 + .5
    assert next_dual(dual, of(0, 2), 1.0, 0.0, 100.0).tolist() == [0.0, 0.5]


def test_within_the_tolerance_nothing_moves():
    # the released default of 1: a client 1 above the mean is still within it
    assert next_dual(of(0, 0), of(2, 0), 1.0, 1.0, 100.0).tolist() == [0, 0]
    assert next_dual(of(0, 0), of(2.5, 0), 1.0, 1.0, 100.0).tolist() == [0.125, 0]


def test_who_did_not_report_keeps_its_dual_and_is_no_part_of_the_mean():
    dual = next_dual(of(0, 0.3, 0), of(2, math.nan, 0), 1.0, 0.0, 100.0)
    torch.testing.assert_close(dual, of(1 / 3, 0.3, 0))


def test_no_weight_is_below_zero():
    # mean 2: (5, -1, -1)
    assert client_weights(of(6, 0, 0)).tolist() == [5, 0, 0]


def mean(weights, ends, sizes=(1, 3), x=1.0, weighting="samples"):
    method, state = Climb(ClimbParams()), {"climb": {"dual": of(0, 0), "weights": of(*weights)}}
    updates = updates_of([torch.tensor([end]) for end in ends], sizes)
    task = aggregation({"w": torch.tensor([x])}, updates, state, training={"weighting": weighting})
    return method.aggregate(task, average)["w"].item()


def test_changes_count_by_share_and_weight_and_are_not_brought_to_a_sum_of_one():
    # 1 + .25 * 1.25 * (2 - 1) + .75 * .75 * (4 - 1) = 3
    assert mean((1.25, 0.75), (2.0, 4.0)) == pytest.approx(3.0)
    # uniform: 1 + .5 * 1.25 * 1 + .5 * .75 * 3 = 2.75
    assert mean((1.25, 0.75), (2.0, 4.0), weighting="uniform") == pytest.approx(2.75)
    assert mean((1.0, 1.0), (2.0, 4.0)) == 3.5
    assert mean((0.0, 0.0), (2.0, 4.0)) == 1.0


def test_reports_are_mean_cross_entropies_of_the_received_model(make_task):
    model = Model({"w": torch.tensor([0.0, 0.0])}, linear)
    received = {"w": torch.tensor([1.0, 0.0])}
    task = make_task(model, torch.tensor([[1.0, 0.0], [-3.0, 2.0]]), [0, 0], method="climb", received=received)
    # logits (1, 0) and (-3, 0), label 0
    losses = [math.log(1 + math.exp(-1)), math.log(1 + math.exp(3))]
    [report] = task.hooks.report(task=task)
    assert report["climb.loss"].item() == pytest.approx(sum(losses) / 2)
    assert loss_and_accuracy(task, received, {})[1] == 0.5


def test_a_round_is_weighted_by_the_losses_before_it():
    method, state = Climb(ClimbParams(tolerance=0.0)), {"climb": {"dual": of(0, 0), "weights": of(1, 1)}}

    def reported(*losses):
        reports = {k: {"climb.loss": torch.tensor(loss)} for k, loss in enumerate(losses)}
        method.reported(ReportedTask(1, (0, 1), reports, {}, {}, Model({}, None), RunSpec(), state))
        return state["climb"]["weights"].tolist()

    assert reported(2.0, 0.0) == [1, 1]
    assert reported(0.0, 0.0) == [1.25, 0.75]


def test_everyone_reports_one_float_and_others_are_sent_the_model():
    run = run_of("climb")
    record = [record for _, record, _ in rounds(run, run.initial_state(), 1)][1]
    model = sum(4 * value.numel() for value in run.model.weights.values())
    assert record.bytes_up == 2 * model + 4 * 4 and record.bytes_down == 4 * model
