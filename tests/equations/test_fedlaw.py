"""FedLAW: Li et al. 2023."""

import math

import pytest
import torch

from fedbench.core.method.tasks import AggregationTask, ServerData
from fedbench.core.spec import RunSpec
from fedbench.core.types import Model, Update
from fedbench.models.inputs import FeatureInputs
from fedbench.rounds.loop import train_round
from fedbench_methods.fedlaw import FedLAW, FedLAWParams, mixed
from tests.equations.kit import linear, run_of


def aggregated(*, sizes=(1, 1), labels=(0,), **params):
    """What the server makes of clients that end at (1, 0) and (0, 2), with samples (1, 1)."""
    ends = (torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0]))
    updates = tuple(Update(k, {"w": end}, {}, n) for k, (end, n) in enumerate(zip(ends, sizes, strict=True)))
    x = {"w": torch.zeros(2)}
    data = ServerData(FeatureInputs(torch.ones(len(labels), 2)), torch.tensor(labels))
    task = AggregationTask(1, x, {}, updates, Model(x, linear), RunSpec(), {}, num_clients=2, server_data=data)
    found = FedLAW(FedLAWParams(**params)).aggregate(task)
    return found.weights["w"], task.metrics.get("fedlaw_gamma")


def test_mixed_is_gamma_times_the_softmax_mean():
    trained = {"w": torch.tensor([[1.0, 0.0], [0.0, 4.0]])}
    # lambda = (1/4, 3/4), gamma = 2
    logits = torch.tensor([0.0, math.log(3)], dtype=torch.float64)
    found = mixed(trained, logits, torch.tensor(math.log(2), dtype=torch.float64))["w"]
    torch.testing.assert_close(found, torch.tensor([0.5, 6.0]))


@pytest.mark.parametrize(("label", "sign"), [(0, 1), (1, -1)])
def test_one_step_by_hand(label, sign):
    # the score gamma (lambda_1 + 2 lambda_2) = 1.5 is to rise for label 0, to fall for 1; a step of Adam moves by lr:
    # b by .1 that way, a by -.1 and .1, as client 2's score of 2 is above the mean and client 1's of 1 below
    w, gamma = aggregated(labels=(label,), epochs=1, lr=0.1)
    second = 1 / (1 + math.exp(-0.2 * sign))
    assert gamma == pytest.approx(math.exp(0.1 * sign), abs=1e-5)
    torch.testing.assert_close(w, gamma * torch.tensor([1 - second, 2 * second]), atol=1e-5, rtol=0)


def test_it_begins_at_the_clients_shares():
    # a tiny rate leaves p = (1/4, 3/4)
    w, _ = aggregated(sizes=(1, 3), epochs=1, lr=1e-5)
    torch.testing.assert_close(w, torch.tensor([0.25, 1.5]), atol=1e-4, rtol=0)


def test_the_rate_is_halved_after_20_epochs():
    # at a tiny rate the gradient stays as it is, and Adam moves b by lr: 20 lr + 10 lr / 2
    assert math.log(aggregated(epochs=30, lr=1e-4)[1]) == pytest.approx(25e-4, rel=1e-2)
    # two batches an epoch
    assert math.log(aggregated(epochs=30, lr=1e-4, labels=(0,) * 4, batch_size=2)[1]) == pytest.approx(50e-4, rel=1e-2)


def test_no_epochs_are_the_mean():
    w, gamma = aggregated(sizes=(1, 3), epochs=0)
    assert torch.equal(w, torch.tensor([0.25, 1.5])) and gamma is None


def test_statistics_are_those_met_on_the_servers_samples():
    run = run_of("fedlaw", backbone="resnet8?width=1", rounds=1)
    plain = run_of("fedavg", backbone="resnet8?width=1", rounds=1)
    (ours, record), (theirs, _) = (train_round(each, each.initial_state()) for each in (run, plain))
    assert record.method_metrics["fedlaw_gamma"] > 0
    moved = [not torch.equal(value, theirs.buffers[name]) for name, value in ours.buffers.items()]
    assert moved and all(moved)
    assert run.info.round_bytes == plain.info.round_bytes
