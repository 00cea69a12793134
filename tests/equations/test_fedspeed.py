"""FedSpeed: Sun et al. 2023."""

import pytest
import torch

from fedbench.core.types import Model
from fedbench.testing import digest, final_state
from fedbench.toolkit.fedavg import average
from fedbench_methods.fedspeed import FedSpeed, FedSpeedParams, corrected
from fedbench_methods.shared import dynamic_regularisation as dynamic
from tests.equations.kit import aggregation, end_of, linear, run_of, updates_of


def test_the_correction_by_hand():
    # 2 + (3 - 1 + 4) / 2
    values = (torch.tensor(each) for each in (2.0, 3.0, 1.0, 4.0))
    assert corrected(*values, 2.0).item() == 5.0


@pytest.mark.parametrize(("mix", "rho"), [(1.0, 0.25), (0.5, 0.25), (1.0, 0.0), (0.0, 0.25)])
def test_local_steps_by_hand(make_task, mix, rho):
    model = Model(weights={"w": torch.tensor([0.2, -0.1])}, forward=linear)
    h = torch.tensor([0.3, -0.5])
    params = {"fedspeed": {"lam": 2.5, "rho": rho, "mix": mix}}
    kwargs = {"method": "fedspeed", "params": params, "payload": {dynamic.DRIFT + "w": h}, "local_epochs": 2}
    task = make_task(model, torch.tensor([[1.0, 0.0]]), [0], **kwargs)
    found = task.hooks.local_train(task=task)
    # lr .5; logits (w1, 0), label 0: the gradient is (sigmoid(w1) - 1, 0), uphill of it w1 is lower by rho
    x = w = model.weights["w"]
    losses = []
    for _ in range(2):
        losses.append(torch.nn.functional.softplus(-w[0]))
        here, there = torch.sigmoid(w[0]) - 1, torch.sigmoid(w[0] - rho) - 1
        mixed = torch.stack([(1 - mix) * here + mix * there, torch.tensor(0.0)])
        w = w - 0.5 * (mixed + (w - x + h) / 2.5)
    torch.testing.assert_close(found.weights["w"], w)
    assert found.metrics["train_loss"] == pytest.approx(float(sum(losses) / 2), abs=1e-6)


def aggregated(method, state, ends, *, clients=(0, 2), sizes=(1, 3)):
    """x after a round from x = 1, of N = 4 clients."""
    updates, training = updates_of(ends, sizes, clients), {"weighting": "samples"}
    task = aggregation({"w": torch.tensor(1.0)}, updates, state, training=training, num_clients=4)
    return method.aggregate(task, average)["w"].item()


@pytest.mark.parametrize(
    ("params", "first", "second"),
    [
        # changes 1 and 4: (2 + 1 + 5 + 4) / 2 = 6; then client 2 ends at 0: h = 4 - 1 = 3, 0 + 3
        ({}, 6.0, 3.0),
        # as FedDyn: 3.5 + 5 / 4; then 0 + (1 + 3) / 4
        ({"server": "all"}, 4.75, 1.0),
        # by samples: (3 + 3 * 9) / 4 = 7.5
        ({"weighting": "run"}, 7.5, 3.0),
    ],
)
def test_server_by_hand(params, first, second):
    method, state = FedSpeed(FedSpeedParams(**params)), {}
    assert aggregated(method, state, [2.0, 5.0]) == first
    assert aggregated(method, state, [0.0], clients=(2,), sizes=(3,)) == second


def test_without_the_ascent_and_with_the_released_server_it_is_feddyn():
    params = {"fedspeed": {"rho": 0.0, "lam": 2.0, "server": "all"}, "feddyn": {"alpha": 0.5}}
    ends = []
    for name in ("fedspeed", "feddyn"):
        run = run_of(name, {name: params[name]}, rounds=3, executor="sequential")
        ends.append(final_state(run).weights)
        start = run.model.weights
    for name, value in ends[0].items():
        torch.testing.assert_close(value, ends[1][name], atol=1e-5, rtol=0)
        assert (value - start[name]).abs().max() > 1e-3


def test_a_stacks_mean_is_taken_of_the_corrected_weights_and_own_models_have_no_drift():
    plain = end_of("fedspeed", rounds=2)
    assert digest(end_of("fedspeed+feddisco", rounds=2)) != digest(plain)
    beside = end_of("fedspeed+ditto", rounds=2)
    assert all(torch.equal(value, beside.weights[name]) for name, value in plain.weights.items())
    assert not any("ditto/" in key for key in beside.server["fedspeed"])
