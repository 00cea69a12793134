"""FedDG-GA: Zhang et al. 2023: clients whose data the mean serves worse count more."""

import math

import pytest
import torch

from fedbench.core.method.tasks import AggregationTask, ReportedTask
from fedbench.core.spec import RunSpec, Training
from fedbench.core.types import Model, Update
from fedbench.rounds.loop import rounds
from fedbench.testing import digest
from fedbench.toolkit.fedavg import average, average_buffers
from fedbench_methods.feddg_ga import FITTED, FedDGGA, FedDGGAParams, adjusted
from tests.equations.kit import end_of, run_of


def of(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_weights_by_hand():
    # gaps (3, 0), mean 1.5: (1, -1) of the largest; d = .1
    torch.testing.assert_close(adjusted(of(0.5, 0.5), of(3, 0), 0.1, True), of(0.6, 0.4))
    # not centred: (1, 0), (.6, .5) / 1.1
    torch.testing.assert_close(adjusted(of(0.5, 0.5), of(3, 0), 0.1, False), of(0.6, 0.5) / 1.1)
    # gaps may be below zero: (-3, -1), mean -2: (-1, 1)
    torch.testing.assert_close(adjusted(of(0.5, 0.5), of(-3, -1), 0.1, True), of(0.4, 0.6))
    # (-3, -1) as they are: (-1, -1/3) of the largest
    torch.testing.assert_close(adjusted(of(0.5, 0.5), of(-3, -1), 0.3, False), of(0.2, 0.4) / 0.6)


def test_weights_are_clipped_and_equal_gaps_leave_them():
    # 0.05 - 0.1 < 0, so that the rest is all
    torch.testing.assert_close(adjusted(of(0.95, 0.05), of(1, 0), 0.1, True), of(1, 0))
    for gaps in (of(2, 2), of(0, 0), of(math.nan, math.nan)):
        assert adjusted(of(0.7, 0.3), gaps, 0.1, True).tolist() == [0.7, 0.3]


def test_who_has_no_gap_keeps_its_weight_up_to_the_sum():
    after = adjusted(of(0.25, 0.25, 0.5), of(1, 0, math.nan), 0.1, True)
    torch.testing.assert_close(after, of(0.35, 0.15, 0.5))


def test_a_mean_is_by_the_weights_of_the_cohort_whatever_the_samples():
    method, state = (
        FedDGGA(FedDGGAParams()),
        {"feddg-ga": {"weights": of(0.2, 0.5, 0.3), "fitted": of(0, 0, 0), "trained": torch.ones(3) > 0}},
    )
    ends = {0: (1.0, 7), 2: (6.0, 1)}
    updates = tuple(
        Update(k, {"w": torch.tensor([end])}, {"s": torch.tensor([end])}, n, {FITTED: torch.tensor(0.25 * k)})
        for k, (end, n) in ends.items()
    )
    w, s = {"w": torch.zeros(1)}, {"s": torch.zeros(1)}
    task = AggregationTask(1, w, s, updates, Model(w, None, s), RunSpec(training=Training(weighting="uniform")), state)
    answer = method.aggregate(task, average)
    # (.2 * 1 + .3 * 6) / .5 = 4, running statistics too
    assert answer.weights["w"].item() == pytest.approx(4) and answer.buffers["s"].item() == pytest.approx(4)
    assert average_buffers(updates, "uniform", s)["s"].item() == 3.5
    kept = state["feddg-ga"]
    assert kept["trained"].tolist() == [True, False, True] and kept["fitted"].tolist() == [0.0, 0.0, 0.5]


def test_gaps_are_of_the_round_before_and_steps_get_shorter():
    def after(round):
        state = {"feddg-ga": {"weights": of(0.5, 0.5), "fitted": of(1.0, 1.0), "trained": torch.ones(2) > 0}}
        reports = {0: {"feddg-ga.received": torch.tensor(3.0)}, 1: {"feddg-ga.received": torch.tensor(0.5)}}
        spec = RunSpec(training=Training(rounds=4))
        task = ReportedTask(round, (0, 1), reports, {}, {}, Model({}, None), spec, state)
        FedDGGA(FedDGGAParams(step=0.2)).reported(task)
        return state["feddg-ga"]["weights"].tolist()

    # gaps (2, -.5): (1, -1); d = .2 / 2 after round 1, .75 of it after round 2
    assert after(2) == pytest.approx([0.6, 0.4]) and after(3) == pytest.approx([0.575, 0.425])


@pytest.mark.parametrize("metric", ["loss", "accuracy"])
def test_in_a_run_the_weights_follow_the_gaps_and_sum_to_one(metric):
    run = run_of("feddg-ga", {"feddg-ga": {"metric": metric}}, rounds=3)
    played = rounds(run, run.initial_state(), 2)
    next(played)
    first, record, _ = next(played)
    model = sum(4 * value.numel() for value in run.model.weights.values())
    assert record.bytes_up == 2 * (model + 4) and record.bytes_down == 2 * model
    assert first.server["feddg-ga"]["weights"].tolist() == [0.25] * 4
    second, later, _ = next(played)
    assert later.bytes_up == 2 * (model + 4) + 4 * 4 and later.bytes_down == 4 * model
    weights = second.server["feddg-ga"]["weights"]
    assert weights.sum().item() == pytest.approx(1)
    if metric == "loss":
        assert (weights != 0.25).sum() >= 2


def test_it_goes_around_a_prompt_and_under_a_server_step():
    one, other = (end_of(s, rounds=3) for s in ("feddg-ga+promptfl", "fedavgm+feddg-ga+promptfl"))
    assert one.weights.keys() == other.weights.keys() == {"prompt.context"} and digest(one) != digest(other)
